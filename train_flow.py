"""Densities and samples of sets, Sec. 4.3 and Table 2 of the paper.

    python train_flow.py                                            built-in sets, no download
    python train_flow.py --data modelnet --category chair --cuda    the paper's experiment
    python train_flow.py --data mnist --objective matching          without a solver in the loop
    python train_flow.py --finetune runs/flow --out runs/fine       then by likelihood, or again by
                                                                    --objective matching
    python train_flow.py --load runs/flow --sample 9 --points 4096  more points than in training
    python train_flow.py --load runs/flow --evaluate

    Table 2, PPLL in the paper's units            ppll, Split.log_unit
    Fig. 3, samples beside real sets              draw_samples: samples.png
    Fig. 4, more points than in training          --sample K --points N
    App. C.2, recipe: 12 blocks, dopri5 at 1e-5,
    Adam 1e-3, halved every 100 epochs, batches
    of 128; authors' code: 1000 epochs            the defaults; INTERVALS

PPLL is log p(x₁, …, xₙ) / n of an ordered set, in nats; for SpatialMNIST in units of pixels, for
ModelNet of the scaled shape. Bits per dimension are −PPLL / (d ln 2) in the same units.

Departures from the paper
- `--objective matching` regresses the same field on straight paths from data to noise. It puts
  data into units of their own mean and deviation first (`SetFlow.standardise`). `--spare` lowers
  the variance of its targets by more points of each shape: `beyond/matching.py`.
- The test likelihood has the exact trace, or for the transformer, which has no shortcut to it,
  Hutchinson's unbiased estimate with --probes probes, unless --trace says otherwise.
- Weights are selected on held-out training sets, of which about VALID_POINTS points are read, by
  dopri5 at a tolerance of 1e-3 at the tightest. The test sets are read once, at the end, by dopri5
  at --tolerance, whatever --method training has: fixed steps have errors of their own, which
  training through them could exploit. `tolerance_error` beside a test's PPLL is by how many nats
  per point a set is off at that tolerance: the most among CHECKED_SETS, solved at a hundredth.
- "Halved every 100 epochs" is "after each tenth of the run", so that any budget has all of it.
- A transformer field, its views, Muon and averaged weights are options; what they gain is in
  the README.
"""

import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
import exnode
from beyond.matching import COUPLINGS, matching_loss
from sets import count
from solvers import METHODS, SolverError, Stats
from support import metrics, options, pictures, training
from support.files import write_whole

FIELDS = ("attention", "deepsets", "transformer")
INTERVALS = 10  # of the run, each with half the learning rate of the one before
VALID_POINTS = 6400  # points, of all sets together, in an evaluation
SCORE_SETS = 1000  # samples that are scored at the end
CHECKED_SETS = 8  # test sets that are solved once more, at a hundredth of the tolerance
ADVICE = "on a CPU, --objective matching trains the same model without a solver in the loop"
ONLY_WITH = {  # options that would otherwise do nothing
    "steps": ("method", "rk4", "rk5"),
    "gradient": ("objective", "likelihood"),
    "method": ("objective", "likelihood"),
    "coupling": ("objective", "matching"),
    "finest": ("objective", "matching"),
    "spare": ("coupling", "none"),
    "heads": ("field", "attention", "transformer"),
    "time": ("field", "attention", "deepsets"),
    "fine": ("field", "transformer"),
    "cells": ("field", "transformer"),
    "probes": ("trace", None, "hutchinson"),
}
TRAINING = (
    "objective", "finetune", "gradient", "method", "steps", "coupling", "finest", "spare", "clip",
)  # fmt: skip
MODEL_OPTIONS = ("blocks", "hidden", "heads", "field", "time", "fine", "cells")


def parse(argv=None):
    usual = {"epochs": 1000, "batch_size": 128, "every": 250}
    parser = options.shared("Model the density of sets.", "flow", **usual)
    number = options.number
    add = parser.group("data")
    help = "Number of points in each set; if not given, 50 on mnist and 512 on modelnet, as in the"
    add("--points", type=number(int, 1, below=10**10), help=f"{help} paper.")
    help = 'Class of the sets, such as "chair"; if not given, all, or synthetic digits.'
    add("--category", help=help)
    help = "Number of test sets that are read at the end; if not given, all."
    add("--test-sets", type=number(int, 2), help=help)
    add = parser.group("the model of the paper")
    help = "Vector field of each block; the transformer is ours."
    add("--field", choices=FIELDS, default="attention", help=help)
    help = "Number of blocks in the chain."
    add("--blocks", type=number(int, 1, below=1000), default=12, help=help)
    help = "Widths of a field's layers."
    add("--hidden", type=options.widths, default="128,128,128", metavar="W,W", help=help)
    help = "Number of attention heads."
    add("--heads", type=number(int, 1, below=2**16), default=4, help=help)
    help = "Let attention and deepsets fields read the ODE's t."
    add("--time", action="store_true", help=help)
    help = "Trace of the density; if not given, hutchinson in training, and in the test exact, or"
    add("--trace", choices=exnode.TRACES, help=f"{help} hutchinson for the transformer.")
    help = "Number of probes of Hutchinson's estimator."
    add("--probes", type=number(int, 1, below=10**4), default=1, help=help)
    help = "How the likelihood is differentiated."
    add("--gradient", choices=exnode.GRADIENTS, default="adjoint", help=help)
    help = "Solver in training; every evaluation is by dopri5."
    add("--method", choices=("dopri5", "rk4", "rk5"), default="dopri5", help=help)
    help = "Relative and absolute tolerance of dopri5."
    add("--tolerance", type=number(float, 1e-12, below=1), default=1e-5, help=help)
    help = "Number of steps of rk4 or rk5 in each block."
    add("--steps", type=number(int, 1, below=10**6), default=1, help=help)
    add = parser.group("training")
    help = "Largest norm of a gradient; if not given, any."
    add("--clip", type=number(float, 1e-9), help=help)
    add = parser.group("ours")
    help = "What training maximises or fits; matching needs no solver in the loop."
    choices = ("likelihood", "matching")
    add("--objective", choices=choices, default="likelihood", help=help)
    help = "Start from the best weights of a RUN, whose data and model, and for matching"
    help += " --coupling, --finest and --spare, are then the defaults; units of data stay RUN's."
    add("--finetune", type=options.path, metavar="RUN", help=help)
    help = "Let a transformer in one block also see near neighbours, at the scale of the noise: for"
    add("--fine", action="store_true", help=f"{help} shapes with flat parts.")
    help = (
        "Tell a transformer in one block that no two points share a cell of a grid with this many"
    )
    help += " cells to a unit: 28 for the pixels of mnist; 0 for no grid."
    add("--cells", type=number(int, 0), default=0, help=help)
    help = "How matching pairs noise with points."
    add("--coupling", choices=COUPLINGS, default="swaps", help=help)
    help = "Smallest noise that matching resolves, as a share of the data's deviation."
    add("--finest", type=number(float, 1e-6, below=1), default=0.1, help=help)
    help = "Number of further points of each shape, with which matching replaces a target by its"
    help += (
        " mean given the noisy point: far less noise in training. For ModelNet (1536 of 2048) and"
    )
    help += " built-in sets."
    add("--spare", type=number(int, 0, below=10**9), default=0, metavar="K", help=help)
    add = parser.group("from a finished run")
    help = "Draw K sets from --load RUN."
    add("--sample", type=number(int, 1), metavar="K", help=help)
    help = "With --sample, also draw how the first five come from noise."
    add("--path", action="store_true", help=help)
    add("--evaluate", action="store_true", help="Only test the best weights of --load RUN.")
    args = parser.parse_args(argv)
    return check(parser, args, argv)


def check(parser, args, argv):
    """Options that go together, and those that come from another run."""
    usual = {name: parser.get_default(name) for name in ONLY_WITH}
    wants = bool(args.sample) + args.evaluate
    if bool(args.load) != (wants == 1):
        parser.error("--load RUN goes with either --sample K or --evaluate")
    if args.finetune and args.load:
        parser.error("--finetune RUN trains: leave out --load")
    if args.path and not args.sample:
        parser.error("--path goes with --sample K")
    if args.load:
        args = options.parse_finished(args.load, parser, argv, TRAINING)
        options.refuse(parser, args, MODEL_OPTIONS, "is not that of the model in --load RUN")
    elif options.goes_on(args):
        args = options.parse_as_in(args.out, parser, argv)
    elif args.finetune:
        names = (*MODEL_OPTIONS, "data", "category", "points", "seed")
        names += ("coupling", "finest", "spare") if args.objective == "matching" else ()
        args = options.parse_as_in(args.finetune, parser, argv, names)
        fixed = ("heads", "cells") if parser.get_default("cells") else ("heads",)
        options.refuse(parser, args, fixed, "is not that of the model in --finetune RUN")
    for name, (other, *values) in ONLY_WITH.items():
        if getattr(args, name) != usual[name] and getattr(args, other) not in values:
            values = " or ".join(value for value in values if value)
            parser.error(f"argument --{name}: only with --{other} {values}")
    if args.sample:
        names = ("data", "category", "batch_size", "test_sets")
        options.refuse(parser, args, names, "is for sets of data, which --sample does not read")
        options.refuse(parser, args, ("trace", "probes"), "is for densities, not for --sample")
    only_tested = args.load or args.objective == "matching"  # training reads no trace
    if only_tested and args.field != "transformer" and not args.trace:
        options.refuse(parser, args, ("probes",), "would not be read: the test's trace is exact")
    if args.field != "deepsets" and args.hidden[-1] % args.heads:
        parser.error(f"argument --heads: {args.heads} does not divide {args.hidden[-1]}")
    for name in ("fine", "cells"):
        if getattr(args, name) and args.blocks > 1:
            parser.error(f"argument --{name}: only with --blocks 1, where t tells the noise")
    if args.field == "transformer" and len(set(args.hidden)) > 1:
        parser.error("argument --hidden: a transformer wants one width, once for every layer")
    return args


def load_sets(args):
    how = {"category": args.category, "points": args.points}
    how["spare"] = 0 if args.load else args.spare  # only training reads them
    return data.load(args.data, args.root, seed=args.seed, **how)


def build(args, dim):
    try:
        return exnode.build(vars(args), dim)
    except ValueError as e:  # a width that is too small for its heads
        raise training.UsageError(f"--hidden: {e}") from None


def read_run(args):
    """The model with the best weights of --load RUN."""
    try:
        flow = exnode.load(args.load)
    except ValueError as e:
        raise training.UsageError(f"--load: {e}") from None
    if not isinstance(flow, exnode.SetFlow):
        raise training.UsageError(f"--load {args.load}: of another model, not of a set flow")
    return flow


def dopri5(args, least=0.0):
    """The solver of all evaluations, at --tolerance, but at a tolerance of no less than `least`."""
    tolerance = max(args.tolerance, least)
    return {"method": "dopri5", "rtol": tolerance, "atol": tolerance}


def density(args):
    """The trace of evaluations: --trace, or the exact one where that is cheap."""
    usual = "hutchinson" if args.field == "transformer" else "exact"
    return {"trace": args.trace or usual, "probes": args.probes}


def check_memory(args, world, dim, points, sets=1, whole=0, *, training_too=False, pairs=False):
    """Estimated peak bytes for `sets` sets of `points` points; pairs: attention's exact trace.

    whole: numbers of the output, beside them. Backpropagation keeps 20 evaluations by dopri5.
    """
    kept = (12 + 4 * args.probes) * max(args.hidden)  # numbers per point
    if training_too:
        kept = (26 + 4 * args.probes) * sum(args.hidden) + 3 * args.spare
    if training_too and args.objective == "likelihood" and args.gradient == "backprop":
        evaluations = 20 if args.method == "dopri5" else len(METHODS[args.method].b) * args.steps
        kept = max(kept, 2.5 * sum(args.hidden) * args.blocks * evaluations)
    cells = 4 * (args.cells + 4) ** dim if args.cells else 0  # a CellView's table
    need = 4 * (whole + sets * (points * kept + cells) + 8 * pairs * points**2)
    training.check_memory(need, world, f"{sets} sets of {points} points at once")


# -------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def measure_likelihood(model, split, batch_size, world, how, seed=0):
    """PPLL over all sets of a split, its standard error, and what solving took."""
    sums, stats = torch.zeros(2, dtype=torch.float64, device=world.device), Stats()
    generator = torch.Generator(world.device).manual_seed(seed + world.rank)
    batches = data.batches(split, batch_size, training=False, workers=1, **world.share)
    total = data.steps(split, batch_size, training=False)
    for x, mask, *_ in training.watch("likelihood", batches, total):
        log_p = model.log_prob(x, mask, generator=generator, stats=stats, **how).double()
        value = log_p / count(x, mask) + split.log_unit
        sums += torch.stack([value.sum(), value.square().sum()])
    mean, square = (world.sum(sums) / len(split)).tolist()
    return {
        "ppll": mean,
        "standard_error": math.sqrt(max(square - mean**2, 0) / max(len(split) - 1, 1)),
        "bits_per_dim": -mean / (split.dim * math.log(2)),
        "evaluations": stats.nfe / total,
        "sets": len(split),
    }


@torch.no_grad()
def tolerance_error(model, split, world, how):
    """The largest change of a few sets' log p per point at a hundredth of the tolerance."""
    few = split.some(CHECKED_SETS)
    x, mask, *_ = next(data.batches(few, len(few), training=False, device=world.device))
    tight = how["solver"] | {k: how["solver"][k] / 100 for k in ("rtol", "atol")}
    found = []
    for solver in (how["solver"], tight):
        same = torch.Generator(world.device).manual_seed(0)  # the same noise for both
        try:
            log_p = model.log_prob(x, mask, generator=same, **how | {"solver": solver})
        except SolverError:
            return None  # unknown: at so small a tolerance there is no solution in this precision
        found.append(log_p / count(x, mask))
    return (found[0] - found[1]).abs().max().item()


def draw_sets(args, model, sets, points):
    """`(sets, points, d)` samples by --seed, the same on any device."""
    how = {"solver": dopri5(args), "progress": partial(training.watch, "sampling")}
    return model.sample(sets, points, torch.Generator().manual_seed(args.seed), **how)


def measure_samples(args, model, split, sets=SCORE_SETS):
    """Scores of generated sets against as many test sets, and the seconds each took."""
    split, points = split.some(sets), data.span(split.points)[1]
    sets = len(split)
    real = torch.from_numpy(split.draw(np.arange(sets))[0]).to(model.mean.device)
    begun = time.monotonic()
    samples = draw_sets(args, model, sets, points)
    samples.sum().item()  # a GPU has done its work only now
    seconds = (time.monotonic() - begun) / sets
    scores = metrics.sample_scores(samples, real, partial(training.watch, "scores"))
    return {**scores, "sets": sets, "seconds_per_sample": seconds}


def test_metrics(args, model, test, world):
    """All that is measured on test sets."""
    test, how = test.some(args.test_sets), {"solver": dopri5(args), **density(args)}
    results = measure_likelihood(model, test, args.batch_size, world, how)
    results |= {"trace": how["trace"], "log_unit": test.log_unit, "tolerance": args.tolerance}
    results["tolerance_error"] = tolerance_error(model, test, world, how)
    if (noise := test.noise()) is not None:
        results["noise"] = noise
    return results | {"samples": measure_samples(args, model, test)}


# ---------------------------------------------------------------------------------- training
def train(args):
    """One run: train, select, test, draw; the contents of its results.json."""
    world = training.connect(args)
    with training.directory(args, world, "ppll") as results:
        return results or train_here(args, world)


def train_here(args, world):
    splits = load_sets(args)
    sets, points = args.batch_size // world.size, data.span(splits.train.points)[1]
    check_memory(args, world, splits.train.dim, points, sets, training_too=True)
    valid = splits.valid.some(-(-VALID_POINTS // points))

    def batches(epoch, start):
        draw = {"seed": args.seed, "epoch": epoch, "start": start, "workers": 1}
        return data.batches(splits.train, args.batch_size, **draw, **world.share)

    def loss(model, batch):
        if args.objective == "matching":
            how = {"coupling": args.coupling, "finest": args.finest}
            if args.spare:
                x, spare = batch.x[:, :points], batch.x[:, points:]
                return matching_loss(model, x, spare=spare, **how)
            return matching_loss(model, batch.x, batch.mask, **how)
        return -(model.log_prob(batch.x, batch.mask) / count(batch.x, batch.mask)).mean()

    def evaluate(model):
        how = {"solver": dopri5(args, least=1e-3), **density(args)}
        return {"valid_ppll": measure_likelihood(model, valid, args.batch_size, world, how)["ppll"]}

    make = partial(build, args, splits.train.dim)
    begin = partial(start, args, train=splits.train)
    steps = data.steps(splits.train, args.batch_size)
    run = training.begin(args, world, make, begin, steps, INTERVALS)
    advice = "" if args.cuda or args.objective == "matching" else ADVICE
    run.fit(loss, batches, evaluate, best="valid_ppll", advice=advice)
    return finish(args, run, splits.test)


def start(args, model, train):
    """Weights of --finetune, or data in units of their own for matching."""
    if args.finetune:
        before = training.read_config(args.finetune)
        new = [name for name in ("fine", "cells") if not before.get(name)]  # start without effect
        training.load_best(model, args.finetune, [f"blocks.0.field.{name}." for name in new])
    elif args.objective == "matching":
        some = train.some(2000)
        x, mask, _ = some.draw(np.arange(len(some)))
        try:
            model.standardise(*(None if a is None else torch.from_numpy(a) for a in (x, mask)))
        except ValueError as e:
            raise training.UsageError(f"--objective matching: {e}") from None
    if args.cells:  # where the cells lie in the units of the data
        grid = args.cells * torch.stack([model.std, model.mean])
        model.blocks[0].field.cells.grid.copy_(grid)


def finish(args, run, test):
    """Pictures, then the test, which takes longer, and results.json, which marks the end."""
    if run.world.rank == 0:
        draw_run(args, run.model, test)
    found = test_metrics(args, run.model, test, run.world)
    show(found)
    training.say(f"pictures: samples.png, path.png and path-moving.png in {args.out}")
    return run.finish(found)


def show(test):
    """The numbers of a test, on stderr."""
    unit = f"{test['ppll']:.4f} ± {test['standard_error']:.4f}"
    training.say(f"test PPLL {unit} nats per point, {test['bits_per_dim']:.4f} bits per dimension")
    if (off := test["tolerance_error"]) is not None:
        at = f"at tolerance {test['tolerance']:g}"
        training.say(f"{at}, sets are off by up to {off:.2g} nats per point")
    scores = test["samples"]
    text = ", ".join(f"{name} {scores[name]:.4g}" for name in ("1-NNA", "MMD", "COV"))
    training.say(f"{scores['sets']} samples: {text}")


# ---------------------------------------------------------------------------------- pictures
def draw_curves(out):
    series = {"validation": training.curve(out, "valid_ppll")}
    curve = pictures.curves(series, "step", "PPLL, nats per point")
    pictures.write_png(out / "curves.png", curve)


def draw_samples(path, samples, real=None):
    """Rows of samples, nine or, of many points, fewer and larger, beneath as many real sets."""
    across, cell = (9, 112) if samples.shape[-2] <= 1024 else (4, 252)
    parts = np.array_split(np.asarray(samples.cpu()), -(-len(samples) // across))
    rows = [list(part) for part in parts]
    labels, colours = ["samples"] + [""] * (len(rows) - 1), ["blue"] * len(rows)
    if real is not None:
        rows, labels, colours = [list(real), *rows], ["real", *labels], ["grey", *colours]
    grid = pictures.point_grid(rows, row_labels=labels, colours=colours, cell=cell)
    pictures.write_png(path, grid)


def draw_beside(path, args, model, test):
    """Nine real sets, and samples of as many points beneath."""
    real = test.some(9)
    samples = draw_sets(args, model, 18, data.span(test.points)[1])
    draw_samples(path, samples, real.draw(np.arange(len(real)))[0])


def draw_run(args, model, test):
    """The pictures of a run: curves.png, samples.png, path.png and path-moving.png."""
    out, points = Path(args.out), data.span(test.points)[1]
    draw_curves(out)
    draw_beside(out / "samples.png", args, model, test)
    draw_path(out / "path", args, model, 5, points)


@torch.no_grad()
def paths(model, z, frames, solver=None):
    """Where points are on the way from noise to data: `(frames, ...)`, in the units of data."""
    at, blocks = [z], len(model.blocks)
    s = torch.linspace(1, 0, frames).tolist()
    for start, end in zip(s, s[1:]):  # in time of the whole chain, block i owning [i, i + 1] / K
        for i in reversed(range(blocks)):
            high, low = min(start * blocks - i, 1.0), max(end * blocks - i, 0.0)
            if high > low:
                block = model.blocks[i]
                z = block.integrate(z, (high * block.t1, low * block.t1), solver=solver)
        at.append(z)
    return torch.stack([model.from_units(z) for z in at])


def draw_path(name, args, model, sets, points):
    """How the first five of `sets` samples come from noise: name.png, and name-moving.png."""
    generator = torch.Generator().manual_seed(args.seed)  # the noise of draw_sets
    z = exnode.normal((sets, points, model.dim), model.mean, generator)[:5]
    at = paths(model, z, 25, dopri5(args)).cpu().numpy()  # (frames, sets, n, d)
    rows = [list(at[::3, i]) for i in range(len(z))]
    names = [f"{k / 8:.2f}" for k in range(9)]
    grid = pictures.point_grid(rows, names, title="from noise to data, over time")
    pictures.write_png(f"{name}.png", grid)
    limits = (float(at[0].min()), float(at[0].max()))
    frames = [pictures.point_grid([list(row)], limits=limits, cell=160) for row in at]
    hold = [frames[0]] * 4 + frames + [frames[-1]] * 12
    pictures.write_apng(f"{name}-moving.png", hold, 0.08)


# -------------------------------------------------------------------------- from a finished run
def sample(args):
    """--sample K: K sets of --points points as .npy and PNG in the run directory."""
    world, model = training.connect(args), read_run(args)
    model.to(world.device)
    args.points = args.points or data.POINTS["mnist" if model.dim == 2 else "modelnet"]["flow"]
    sets = min(args.sample, max(1, exnode.PIECE // args.points))
    whole = 4 * args.sample * args.points * model.dim
    check_memory(args, world, model.dim, args.points, sets, whole)
    name = Path(args.out) / f"samples-{args.sample}x{args.points}-seed{args.seed}"
    training.make_folder(args.out)
    begun = time.monotonic()
    sets = draw_sets(args, model, args.sample, args.points).cpu()
    seconds = (time.monotonic() - begun) / args.sample
    write_whole(f"{name}.npy", lambda f: np.save(f, sets.numpy()))
    draw_samples(f"{name}.png", sets[:27])
    training.say(f"{name}.npy and .png: {seconds:.3g} s per set")
    if args.path:
        draw_path(f"{name}-path", args, model, args.sample, args.points)
        training.say(f"{name}-path.png and -path-moving.png: from noise to data")
    return {"samples": sets, "seconds_per_sample": seconds}


def evaluate_only(args):
    world, model = training.connect(args), read_run(args)
    test = load_sets(args).test
    if test.dim != model.dim:
        raise training.UsageError(f"--load {args.load}: a model of {model.dim}-D, not {test.dim}-D")
    sets = args.batch_size // world.size
    check_memory(args, world, test.dim, data.span(test.points)[1], sets, pairs=True)
    found = test_metrics(args, model.to(world.device), test, world)
    show(found)
    results = training.write_evaluation(found, args, world)
    if world.rank == 0:
        draw_beside(Path(args.out) / "evaluation.png", args, model, test)
    return results


def main(argv=None):
    """The results, also printed: of a run, of --sample or of --evaluate."""
    args = parse(argv)
    if args.sample:
        return sample(args)
    if args.evaluate:
        return evaluate_only(args)
    return training.several(args, train, "ppll") if args.runs > 1 else train(args)


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
