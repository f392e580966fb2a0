"""Quality of samples against evaluations of the field, for the pretrained flows.

python benchmarks/sampling.py --root data                  all of it into benchmarks/RESULTS.md
python benchmarks/sampling.py --only chair --sets 32       one flow, and fewer sets
python benchmarks/sampling.py --only times                 time of large shapes, a ratio

All solvers start from the same noise. The Chamfer distance to the solution at a tolerance of 1e-5
is that of a few sets; it needs no data, so it may choose a solver. 1-NNA, MMD and COV compare with
test sets (support/metrics.py). Counts and scores do not depend on the load of the machine; times
are seconds of the processor, of one thread, on the same noise.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from report import machine, table, write_section

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import exnode
import train_flow
from beyond.matching import noise_level
from solvers import Stats
from support import flows
from support.metrics import chamfer, sample_scores

PROJECT = Path(__file__).parent.parent
FLOWS = ("mnist", "chair", "airplane")
CLOSE_SETS = {"mnist": 32, "chair": 4, "airplane": 4}  # whose distance to the solution is measured
TIGHT = 1e-5
SIZES = (2048, 4096)  # points of the shapes that are timed


def dopri5(tolerance):
    return {"method": "dopri5", "rtol": tolerance, "atol": tolerance}


def contenders(args):
    """Name ↦ times, as shares of t₁, and solver; the first is dopri5 as for densities."""
    ends = torch.tensor([1.0, 0.0])
    found = {f"dopri5, {tol:g}": (ends, dopri5(tol)) for tol in (args.tolerance, 1e-2, 3e-2)}
    for method, steps in (("rk4", 2), ("rk4", 3), ("rk4", 4), ("rk5", 2), ("midpoint", 6)):
        u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        found[f"{method}, {steps} steps in t"] = u, {"method": method}
    for method, steps in (("rk4", 3), ("rk4", 4)):
        u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        found[f"{method}, {steps} steps in log s"] = noise_level(u, args.finest), {"method": method}
    return found


def scored(name):
    """Whether a contender is close enough for its scores to be of interest."""
    return name.startswith(("dopri5", "rk4")) and "log s" not in name


@torch.no_grad()
def draw(model, z, times, solver):
    """Samples from noise z, a few sets at a time, and the evaluations of the last few."""
    block, parts = model.blocks[0], []
    for part in z.split(max(1, 2**13 // z.shape[-2])):
        stats = Stats()
        x = block.integrate(part, times.double() * block.t1, None, None, solver, stats)
        parts.append(model.from_units(x))
    return torch.cat(parts), stats.nfe


def errors(scores, sets):
    """Binomial standard errors of 1-NNA and COV."""
    counted = {"1-NNA": 2 * sets, "COV": sets}
    return {k: math.sqrt(scores[k] * (1 - scores[k]) / n) for k, n in counted.items()}


def measure(flow, root, sets):
    """A row for each contender."""
    run = PROJECT / "pretrained" / flow
    args = train_flow.parse(["--load", str(run), "--evaluate", "--root", str(root)])
    model, test = exnode.load(run), train_flow.load_sets(args).test.some(sets)
    real = next(data.batches(test, len(test), training=False)).x
    z = torch.randn(real.shape, generator=torch.Generator().manual_seed(args.seed))
    few = z[: CLOSE_SETS[flow]]
    exact, _ = draw(model, few, torch.tensor([1.0, 0.0]), dopri5(TIGHT))
    rows = []
    for name, how in contenders(args).items():
        wanted = scored(name)
        x, evaluations = draw(model, z if wanted else few, *how)
        row = [name, evaluations, f"{chamfer(x[: len(few)], exact).mean():.1e}", "", "", ""]
        if wanted:
            scores = sample_scores(x, real)
            off = errors(scores, len(real))
            row[3] = f"{scores['1-NNA']:.3f} ± {off['1-NNA']:.3f}"
            row[4:] = f"{scores['MMD']:.5f}", f"{scores['COV']:.3f} ± {off['COV']:.3f}"
        rows.append(row)
        print(flow, *row, flush=True)
    return rows, len(real)


def write_quality(flow, root, sets):
    rows, sets = measure(flow, root, sets)
    head = ["solver", "evaluations", f"Chamfer to {TIGHT:g}", "1-NNA", "MMD", "COV"]
    text = f"## Samples: {flow}\n\nThe flow in `pretrained/{flow}`, {sets} samples and test sets; "
    text += f"Chamfer distance to a solve at {TIGHT:g} for {CLOSE_SETS[flow]} of them. Steps are "
    text += "even in t, or in the log of the noise s as matching places them."
    write_section(f"sampling-{flow}", f"{text}\n\n{table(head, rows)}")


@torch.no_grad()
def write_times(flow="airplane"):
    """Ratio of the processor's seconds: by the solver of samples, and by that of densities."""
    run = PROJECT / "pretrained" / flow
    args, model = train_flow.parse(["--load", str(run), "--sample", "1"]), exnode.load(run)
    solvers = {"densities": flows.dopri5(args.tolerance), "samples": flows.sampler(args)}
    rows = []
    for points in SIZES:
        z = torch.randn(1, points, model.dim, generator=torch.Generator().manual_seed(0))
        seconds, stats = {}, {name: Stats() for name in solvers}
        for name, solver in solvers.items():
            begun = time.process_time()
            model.decode(z, solver=solver, stats=stats[name])
            seconds[name] = time.process_time() - begun
        ratio = seconds["samples"] / seconds["densities"]
        counts = (stats[name].nfe for name in solvers)
        rows.append([f"{points:,}", *counts, f"{ratio:.2f}"])
        print(rows[-1], flush=True)
    head = ["points", "evaluations, dopri5", "evaluations, samples", "time ratio"]
    text = f"## Samples: time\n\n{machine()} One sample of `pretrained/{flow}`, by dopri5 at "
    text += f"{args.tolerance:g}, as densities are solved, and by the solver of samples."
    write_section("sampling-times", f"{text}\n\n{table(head, rows)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="data", type=Path, help="folder with the data")
    parser.add_argument("--only", choices=(*FLOWS, "times"))
    parser.add_argument("--sets", type=int, default=100)
    args = parser.parse_args()
    torch.set_flush_denormal(True)  # as the scripts do
    for flow in FLOWS:
        if args.only in (None, flow):
            write_quality(flow, args.root, args.sets)
    if args.only in (None, "times"):
        write_times()


if __name__ == "__main__":
    main()
