"""Evaluations and errors of four adaptive solvers on many problems: work against precision.

python benchmarks/controller.py                     into benchmarks/RESULTS.md
python benchmarks/controller.py --only networks     one group, printed only

Counts and errors do not depend on the load of the machine. Every library solves y' = f(t, y) by
Dormand and Prince's pair with rtol = atol = tolerance, in float64. Errors are against ours at a
thousandth of the smallest tolerance, as root mean squares of (y − exact) / (tol + tol |exact|).
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import problems
import torch
from report import machine, table, write_section
from rivals import LIBRARIES, ours

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import solvers

TOLERANCES = {
    "networks": [10.0**-k for k in range(2, 10)],
    "DETEST": [10.0**-k for k in range(2, 10)],
    "models": [10.0**-k for k in range(2, 6)],
}
BACKWARDS = {"A3", "B5", "C5", "D1", "D2", "D3", "D4", "D5", "E1", "E3", "E5"}  # stable in reverse
MOST = 200_000  # evaluations; some libraries have no limit of their own


class Counted:
    """A field that counts its evaluations."""

    def __init__(self, f):
        self.f, self.nfe = f, 0

    def __call__(self, t, y):
        self.nfe += 1
        if self.nfe > MOST:
            raise RuntimeError("too many evaluations")
        return self.f(t, y)


def error(y, exact, tol):
    return ((y - exact) / (tol + tol * exact.abs())).square().mean().sqrt().item()


def with_reverse(problem, tolerance):
    """The problem with its solution, and the way back where that is stable."""
    exact = ours(problem.f, *problem[3:], tolerance)
    yield problem, exact
    if problem.group != "DETEST" or problem.name in BACKWARDS:
        yield problem._replace(y0=exact, t0=problem.t1, t1=problem.t0), problem.y0


@torch.no_grad()
def measure(group, cases):
    """(problem, tolerance) ↦ a list of {library: (evaluations, error)}."""
    found = defaultdict(list)
    for case in cases:
        for problem, exact in with_reverse(case, TOLERANCES[group][-1] / 1000):
            for tol in TOLERANCES[group]:
                found[problem.name, tol].append(compare(problem, exact, tol))
        print(group, case.name, flush=True)
    return found


def compare(problem, exact, tol):
    row = {}
    for name, solve in LIBRARIES.items():
        f = Counted(problem.f)
        try:
            row[name] = f, error(solve(f, *problem[3:], tol), exact, tol)
        except (RuntimeError, AssertionError):  # the step vanished, or too many evaluations
            row[name] = f, math.inf
    return {name: (f.nfe, far) for name, (f, far) in row.items()}


COLUMNS = [*LIBRARIES, "ours / torchdiffeq", "mean", "worst", "above 1.1", "error ratio"]


def summary(rows):
    """Evaluations of each library, then ours against torchdiffeq's; see `main` for the columns."""
    rows = [row for row in rows if row["torchdiffeq"][1] < math.inf]  # where it did not fail
    sums = [sum(row[name][0] for row in rows) for name in LIBRARIES]
    ratios = [row["ours"][0] / row["torchdiffeq"][0] for row in rows]
    far = [median([row[name][1] for row in rows]) for name in LIBRARIES]
    cells = [f"{n:,} ({e:.1g})" for n, e in zip(sums, far)]
    above = f"{sum(ratio > 1.1 for ratio in ratios)} of {len(rows)}"
    return [
        *cells,
        f"{sums[0] / sums[1]:.2f}",
        f"{statistics.mean(ratios):.2f}",
        f"{max(ratios):.2f}",
        above,
        f"{error_ratio(rows, 'ours'):.2f}",
    ]


def error_ratio(rows, name):
    """The geometric mean of errors against torchdiffeq's; a thousandth of the tolerance is 0."""
    pairs = [[max(row[key][1], 1e-3) for key in (name, "torchdiffeq")] for row in rows]
    return math.exp(statistics.mean(math.log(min(a, 1e9) / b) for a, b in pairs))


@torch.no_grad()
def least(problem, exact, tol):
    """Evaluations and error if every step were as long as its error estimate permits.

    Each step is found by trial, which is not counted: no controller with this estimate spends less.
    None if that goes astray, which 3,000 steps are a sign of.
    """
    t, x, end, steps = problem.t0, problem.y0, problem.t1, 0
    ode = solvers.Problem(problem.f, solvers.Stats(), solvers.METHODS["dopri5"], tol, tol)
    h = (end - t) / 100
    while t != end:
        if steps == 3000:
            return None
        for _ in range(12):
            h = math.copysign(min(abs(h), abs(end - t)), h)
            x1, k = solvers.step(ode, ode.tableau, t, t + h, h, x, [ode(t, x)])
            ratio = solvers.error_ratio(ode, x, x1, h, [*k, ode(t + h, x1)])
            if 0.97 < ratio <= 1 or (ratio <= 1 and abs(h) == abs(end - t)):
                break
            h *= min(max(0.985 ** (1 / 5) * max(ratio, 1e-9) ** -0.2, 0.2), 5)
        steps, x = steps + 1, x1
        t = end if abs(h) == abs(end - t) else t + h
    return 6 * steps + 1, error(x, exact, tol)


def least_text(found, cases):
    """How far below torchdiffeq's evaluations any controller could go on DETEST."""
    rows = []
    for tol in (1e-3, 1e-5, 1e-7):
        lines = []
        for case in cases:
            row = found[case.name, tol][0]  # forwards in time
            exact = ours(case.f, *case[3:], 1e-12)
            if found_least := least(case, exact, tol):
                lines.append({**row, "least": found_least})
        base = sum(row["torchdiffeq"][0] for row in lines)
        cells = []
        for name in ("ours", "least"):
            ratio = sum(row[name][0] for row in lines) / base
            far = error_ratio(lines, name)
            cells += [f"{ratio:.2f}", f"{far:.2f}", f"{ratio * far**0.2:.2f}"]
        rows.append([f"{tol:.0e}", len(lines), *cells])
    head = ["evaluations", "errors", "evaluations at equal error"]
    head = [
        "tolerance",
        "problems",
        *(f"{who}, {what}" for who in ("ours", "least") for what in head),
    ]
    return [
        "\nThe least that a controller could spend with this tableau and its error estimate: every"
        " step exactly as long as the tolerance permits, none rejected, and trials not counted. As"
        " ratios to torchdiffeq's, forwards in time, sums of evaluations and geometric means of"
        " errors; at equal error with evaluations growing as error^(-1/5).\n",
        table(head, rows),
    ]


def median(values):
    return sorted(values)[len(values) // 2]


def group_text(group, found):
    """The tables of one group: by problem, and by tolerance."""
    by_name, by_tol = defaultdict(list), defaultdict(list)
    for (name, tol), rows in found.items():
        by_name[name] += rows
        by_tol[f"{tol:.0e}"] += rows
    tight = [row for (_, tol), rows in found.items() for row in rows if tol < 1e-2]
    every = [row for rows in found.values() for row in rows]
    total = [["all", *summary(every)], ["all but 1e-2", *summary(tight)]]
    return [
        f"\n### {group}\n",
        table(["problem", *COLUMNS], [[n, *summary(rows)] for n, rows in by_name.items()] + total),
        "",
        table(["tolerance", *COLUMNS], [[n, *summary(rows)] for n, rows in by_tol.items()]),
    ]


@torch.no_grad()
def chain_text(train_steps):
    """The paper's chain, 12 blocks on 128 × 50 × 2 points at 1e-5: evaluations and log p."""
    from steps import FlowOnTorchdiffeq

    x = next(data.batches(data.load("synthetic", points=50).train, 128, seed=1)).x
    rows = []
    for label, flow in problems.chains(train_steps):
        torch.manual_seed(0)
        noise, few = torch.randn(1, *x.shape), 16
        with torch.random.fork_rng():
            tight = problems.SetFlow(2, 12, rtol=1e-9, atol=1e-9).double()
        tight.load_state_dict(flow.state_dict())
        exact = tight.log_prob(x[:few].double(), noise=noise[:, :few].double())
        for name, model in (("ours", flow), ("torchdiffeq", FlowOnTorchdiffeq(flow, 1e-5))):
            stats = solvers.Stats()
            log_prob = model.log_prob(x, noise=noise, stats=stats)
            few_log_prob = model.log_prob(x[:few], noise=noise[:, :few], stats=solvers.Stats())
            far = (few_log_prob - exact).square().mean().sqrt().item() / x.shape[-2]
            assert log_prob.isfinite().all()
            rows.append([f"{label} weights", name, stats.nfe + stats.backward_nfe, f"{far:.1e}"])
    head = ["chain of 12 blocks, 1e-5", "solver", "evaluations", "error of log p, nats per point"]
    return ["\n### The paper's chain\n", table(head, rows)]


def parse(argv=None):
    parser = argparse.ArgumentParser(description="Evaluations against errors.")
    groups = ("networks", "models", "DETEST", "chain")
    parser.add_argument("--only", nargs="+", choices=groups, help="some groups, printed only")
    help = "steps of flow matching that make the trained weights of the chain"
    parser.add_argument("--train-steps", type=int, default=100, help=help)
    return parser.parse_args(argv)


def main(argv=None):
    args, text = parse(argv), []
    torch.set_num_threads(1)
    sources = {
        "networks": problems.networks,
        "models": lambda: problems.models(args.train_steps),
        "DETEST": problems.detest,
    }
    for group in args.only or (*sources, "chain"):
        if group == "chain":
            text += chain_text(args.train_steps)
        else:
            cases = list(sources[group]())
            text += group_text(group, found := measure(group, cases))
            text += least_text(found, cases) if group == "DETEST" else []
    text = [
        "## First step and controller\n",
        machine(),
        "\nEvaluations of f, and in parentheses the median error in units of the tolerance, summed"
        " over tolerances, seeds and both directions of time. `ours / torchdiffeq` compares sums,"
        " `mean` and `worst` are of the ratios of single solves, and `error ratio` is the geometric"
        " mean of ours to torchdiffeq's error (a thousandth of the tolerance counts as 0). Solves"
        " at which torchdiffeq fails are left out: it evaluates beyond the end of the interval,"
        " where a trained field may not be defined. An error of 100 at the tolerance 1e-2 is as"
        " large as the solution: such a solve is lost, and what it cost is chance.",
        *text,
    ]
    print("\n".join(text))
    if not args.only:
        write_section("controller", "\n".join(text))


if __name__ == "__main__":
    main()
