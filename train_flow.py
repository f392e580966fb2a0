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
- Samples of a flow trained by matching, whose paths are nearly straight, are solved by SAMPLE_STEPS
  steps of rk4, which come as close to the solution as dopri5 at 1e-3: `sampler`.
- "Halved every 100 epochs" is "after each tenth of the run", so that any budget has all of it.
- A transformer field, its views, Muon and averaged weights are options; what they gain is in
  the README.
"""

import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import data
import exnode
from beyond.likelihood import sampled_log_prob
from beyond.matching import COUPLINGS, matching_loss
from sets import count
from solvers import METHODS, SolverError, Stats
from support import metrics, options, own_sets, pages, pictures, training
from support.files import write_whole
from support.splits import UNLABELLED

FIELDS = ("attention", "deepsets", "transformer")
INTERVALS = 10  # of the run, each with half the learning rate of the one before
VALID_POINTS = 6400  # points, of all sets together, in an evaluation
SCORE_SETS = 1000  # samples that are scored at the end
UNIT_SETS = 2000  # training sets that give a flow its units
SAMPLE_STEPS = 4  # of rk4, in the whole chain, for samples of a flow trained by matching
EXPLODED = 1e4  # deviations of the data, beyond which no point of a sample can be
PAGE_SETS, PAGE_FRAMES = 8, 13  # of a run's page: samples, and times on their way from noise
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
    "probes": ("trace", None, "hutchinson", "sampled"),
}
TRAINING = (
    "objective", "finetune", "gradient", "method", "steps", "coupling", "finest", "spare", "clip",
)  # fmt: skip
MODEL_OPTIONS = ("blocks", "hidden", "heads", "field", "time", "fine", "cells", "condition")


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
    help = "Condition the flow on the label of a set, or on the context that your own sets have."
    add("--condition", choices=("label", "context"), help=help)
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
    help += " hutchinson for the transformer; sampled, which is ours, costs half in training."
    add("--trace", choices=(*exnode.TRACES, "sampled"), help=help)
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
    help = "Class of the samples, for a flow conditioned on labels; if not given, any."
    add("--label", metavar="NAME", help=help)
    help = "Context of the samples, for a flow conditioned on it."
    add("--context", type=options.numbers, metavar="C,C", help=help)
    help = "Write log p of each of your own sets at PATH, and how it compares with test sets."
    add("--score", type=options.path, metavar="PATH", help=help)
    add("--evaluate", action="store_true", help="Only test the best weights of --load RUN.")
    args = parser.parse_args(argv)
    return check(parser, args, argv)


def check(parser, args, argv):
    """Options that go together, and those that come from another run."""
    if args.recipe is not None:
        return options.repeat(parser, args)
    usual = {name: parser.get_default(name) for name in ONLY_WITH}
    options.check_data(parser, args, data.NAMES)
    if bool(args.sample) + args.evaluate + (args.score is not None) != bool(args.load):
        parser.error("--load RUN goes with one of --sample K, --score PATH and --evaluate")
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
        names = (*MODEL_OPTIONS, *options.DATA, "category", "points", "seed")
        names += ("coupling", "finest", "spare") if args.objective == "matching" else ()
        args = options.parse_as_in(args.finetune, parser, argv, names)
        fixed = ("heads", "cells") if parser.get_default("cells") else ("heads",)
        options.refuse(parser, args, fixed, "is not that of the model in --finetune RUN")
    for name, (other, *values) in ONLY_WITH.items():
        if getattr(args, name) != usual[name] and getattr(args, other) not in values:
            values = " or ".join(value for value in values if value)
            parser.error(f"argument --{name}: only with --{other} {values}")
    if (args.label is None, args.context is None) != (True, True) and not args.sample:
        parser.error("--label and --context go with --sample K")
    if args.label is not None and args.condition != "label":
        parser.error("--label: the flow in --load RUN is not conditioned on labels")
    if (args.context is not None) != bool(args.sample and args.condition == "context"):
        parser.error("--context C,C goes with --sample K of a flow conditioned on it, always")
    if args.sample:
        names = ("data", "category", "batch_size", "test_sets", "columns", "skip_bad", "noise")
        options.refuse(parser, args, names, "is for sets of data, which --sample does not read")
        options.refuse(parser, args, ("trace", "probes"), "is for densities, not for --sample")
        if args.objective == "matching":  # sampler
            options.refuse(parser, args, ("tolerance",), "is for densities, not for --sample")
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
    return data.load(args.data, args.root, seed=args.seed, **how, **options.own_data(args))


def condition_size(args, split):
    """The numbers per set that the flow is conditioned on."""
    if args.condition == "context" and split.context is None:
        raise training.UsageError(f"--condition context: the sets of {args.data} have none")
    if args.condition == "label" and len(split.classes) < 2:
        fault = f"the sets of {args.data} have no labels, or one only"
        raise training.UsageError(f"--condition label: {fault}")
    if args.condition == "context":
        return split.context.shape[1]
    return len(split.classes) if args.condition else 0


def condition(args, model, batch):
    """What a flow is conditioned on, `(B, c)`: labels as one-hot vectors, the context, or None."""
    if args.condition == "label":
        classes = model.blocks[0].field.context
        if batch.label.max() >= classes:
            raise training.UsageError(f"--load {args.load}: has {classes} classes, the sets more")
        return F.one_hot(batch.label, classes).to(batch.x.dtype)
    return batch.context if args.condition else None


def build(args, split):
    try:
        return exnode.build(vars(args), split.dim, context=condition_size(args, split))
    except ValueError as e:  # a width that is too small for its heads
        raise training.UsageError(f"--hidden: {e}") from None


def read_run(args):
    """The model with the best weights of --load RUN."""
    kind = exnode.SetFlow, "of a set flow"
    return training.load_model("--load", args.load, exnode.load, *kind)


def dopri5(args, least=0.0):
    """The solver of all evaluations, at --tolerance, but at a tolerance of no less than `least`."""
    tolerance = max(args.tolerance, least)
    return {"method": "dopri5", "rtol": tolerance, "atol": tolerance}


def sampler(args):
    """The solver of samples: dopri5, or for a flow trained by matching SAMPLE_STEPS steps of rk4.

    Steps even in t come as close to the solution as dopri5 at 1e-3 does: benchmarks/sampling.py.
    """
    if args.objective != "matching":
        return dopri5(args)
    steps = -(-SAMPLE_STEPS // args.blocks)  # in each block
    return {"method": "rk4", "options": {"step_size": 0.5 / steps}}


def density(args):
    """The trace of evaluations: --trace, or the exact one where that is cheap."""
    usual = "hutchinson" if args.field == "transformer" else "exact"
    return {"trace": args.trace if args.trace in exnode.TRACES else usual, "probes": args.probes}


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
def log_probs(args, model, split, world, how, stats=None, wrong=False):
    """log p per point of each set of a split; wrong: conditioned on what belongs to another set."""
    generator = torch.Generator(world.device).manual_seed(world.rank)
    batches = data.batches(split, args.batch_size, training=False, workers=1, **world.share)
    total, parts = data.steps(split, args.batch_size, training=False), []
    for batch in training.watch("likelihood", batches, total):
        given = condition(args, model, batch)
        given = given.roll(1, -1 if args.condition == "label" else 0) if wrong else given
        tools = {"generator": generator, "stats": stats, **how}
        log_p = model.log_prob(batch.x, batch.mask, given, **tools).double()
        parts.append((log_p / count(batch.x, batch.mask)).tolist())
    values = np.empty(len(split))
    for rank, mine in enumerate(world.gather(parts)):
        for k, part in enumerate(mine):  # as data.batches shares a batch
            values[k * args.batch_size : (k + 1) * args.batch_size][rank :: world.size] = part
    return values + split.log_unit


def mean_and_error(values):
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"ppll": values.mean().item(), "standard_error": float(error), "sets": len(values)}


def measure_likelihood(args, model, split, world, how):
    """PPLL over all sets of a split, its standard error, its quantiles, and what solving took."""
    stats = Stats()
    values = log_probs(args, model, split, world, how, stats)
    found = mean_and_error(values)
    found["bits_per_dim"] = -found["ppll"] / (split.dim * math.log(2))
    found["evaluations"] = stats.nfe / data.steps(split, args.batch_size, training=False)
    found["quantiles"] = np.quantile(values, np.linspace(0, 1, 101)).round(4).tolist()
    if args.condition:
        found["wrong_" + args.condition] = mean_and_error(
            log_probs(args, model, split, world, how, wrong=True)
        )
    if (twins := split.twins).any():
        found["without_twins"] = mean_and_error(values[~twins])
    return found


@torch.no_grad()
def tolerance_error(args, model, split, world, how):
    """The largest change of a few sets' log p per point at a hundredth of the tolerance."""
    few = split.some(CHECKED_SETS)
    batch = next(data.batches(few, len(few), training=False, device=world.device))
    x, mask, given = batch.x, batch.mask, condition(args, model, batch)
    tight = how["solver"] | {k: how["solver"][k] / 100 for k in ("rtol", "atol")}
    found = []
    for solver in (how["solver"], tight):
        same = torch.Generator(world.device).manual_seed(0)  # the same noise for both
        try:
            log_p = model.log_prob(x, mask, given, generator=same, **how | {"solver": solver})
        except SolverError:
            return None  # unknown: at so small a tolerance there is no solution in this precision
        found.append(log_p / count(x, mask))
    return (found[0] - found[1]).abs().max().item()


def solver_error(args, model, split, world):
    """By how much training's solver is off on a few held-out sets, in nats per point.

    Training can exploit the error of few fixed steps; what is reported is always by dopri5.
    """
    if args.method == "dopri5" and args.tolerance <= 1e-5:
        return 0.0
    few, found = split.some(CHECKED_SETS), []
    for solver in (model.blocks[0].solver, {"method": "dopri5", "rtol": 1e-5, "atol": 1e-5}):
        found.append(log_probs(args, model, few, world, {"solver": solver, **density(args)}))
    error = np.abs(found[0] - found[1]).mean().item()
    if error > 1e-3:
        way = "a smaller --tolerance" if args.method == "dopri5" else "--method dopri5"
        training.say(f"training's solver is off by {error:.2g} nats per point: {way} is honest")
    return error


def draw_sets(args, model, sets, points, mask=None, context=None):
    """`(sets, points, d)` samples by --seed, the same on any device."""
    how = {"solver": sampler(args), "progress": partial(training.watch, "sampling")}
    noise = torch.Generator().manual_seed(args.seed)
    x = model.sample(sets, points, noise, context, mask, **how)
    far = model.to_units(x, mask).abs().max().item()
    if not far < EXPLODED:  # fixed steps, unlike dopri5, do not notice
        raise FloatingPointError(f"samples lie up to {far:.3g} deviations from the data's mean")
    return x


def draw_like(args, model, split):
    """All sets of a split, their mask, and as many samples of the same sizes and conditions."""
    batch = next(data.batches(split, len(split), training=False, device=model.mean.device))
    given = condition(args, model, batch)
    made = draw_sets(args, model, len(split), batch.x.shape[1], batch.mask, given)
    return batch.x, batch.mask, made


def measure_samples(args, model, split, sets=SCORE_SETS):
    """Scores of generated sets against as many test sets, and the seconds each took."""
    split, begun = split.some(sets), time.monotonic()
    real, mask, samples = draw_like(args, model, split)
    samples.sum().item()  # a GPU has done its work only now
    seconds = (time.monotonic() - begun) / len(split)
    scores = metrics.sample_scores(samples, real, mask, partial(training.watch, "scores"))
    return {**scores, "sets": len(split), "seconds_per_sample": seconds}


def test_metrics(args, model, test, world):
    """All that is measured on test sets."""
    test, how = test.some(args.test_sets), {"solver": dopri5(args), **density(args)}
    results = measure_likelihood(args, model, test, world, how)
    results |= {"trace": how["trace"], "log_unit": test.log_unit, "tolerance": args.tolerance}
    results["tolerance_error"] = tolerance_error(args, model, test, world, how)
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
    if world.rank == 0:
        training.write_sets(args.out, splits.train)
    valid = splits.valid.some(-(-VALID_POINTS // points))

    def batches(epoch, start):
        draw = {"seed": args.seed, "epoch": epoch, "start": start, "workers": 1}
        return data.batches(splits.train, args.batch_size, **draw, **world.share)

    def loss(model, batch):
        x, mask, given = batch.x, batch.mask, condition(args, model, batch)
        if args.objective == "likelihood":
            density = sampled_log_prob if args.trace == "sampled" else type(model).log_prob
            return -(density(model, x, mask, given) / count(x, mask)).mean()
        how = {"coupling": args.coupling, "finest": args.finest}
        if args.spare:
            return matching_loss(model, x[:, :points], None, given, spare=x[:, points:], **how)
        return matching_loss(model, x, mask, given, **how)

    def evaluate(model):
        how = {"solver": dopri5(args, least=1e-3), **density(args)}
        found = {"valid_ppll": log_probs(args, model, valid, world, how).mean().item()}
        if args.objective == "likelihood":
            found["solver_error"] = solver_error(args, model, valid, world)
        return found

    make = partial(build, args, splits.train)
    begin = partial(start, args, train=splits.train)
    steps = data.steps(splits.train, args.batch_size)
    run = training.begin(args, world, make, begin, steps, INTERVALS)
    advice = "" if args.cuda or args.objective == "matching" else ADVICE
    run.fit(loss, batches, evaluate, best="valid_ppll", advice=advice)
    return finish(args, run, splits.test)


def start(args, model, train):
    """Weights of --finetune, or data in units of their own, for matching and for own sets."""
    if args.finetune:
        before = training.read_config(args.finetune)
        new = [name for name in ("fine", "cells") if not before.get(name)]  # start without effect
        training.load_best(model, args.finetune, [f"blocks.0.field.{name}." for name in new])
    elif args.objective == "matching" or args.data not in data.NAMES:
        some = train.some(UNIT_SETS)
        x, mask, _ = some.draw(np.arange(len(some)))
        try:
            model.standardise(*(None if a is None else torch.from_numpy(a) for a in (x, mask)))
        except ValueError as e:
            raise training.UsageError(f"--data {args.data}: {e}") from None
    if args.cells:  # where the cells lie in the units of the data
        grid = args.cells * torch.stack([model.std, model.mean])
        model.blocks[0].field.cells.grid.copy_(grid)


def finish(args, run, test):
    """Pictures, then the test, which takes longer, and results.json, which marks the end."""
    if run.world.rank == 0:
        draw_run(args, run.model, test)
    found = test_metrics(args, run.model, test, run.world)
    show(args, found)
    training.say(f"pictures: samples.png, path.png and path-moving.png in {args.out}")
    if run.world.rank == 0:
        draw_page(Path(args.out) / "view.html", args, run.model, test, found)
    return run.finish(found)


def show(args, test):
    """The numbers of a test, on stderr."""
    unit = f"{test['ppll']:.4f} ± {test['standard_error']:.4f}"
    training.say(f"test PPLL {unit} nats per point, {test['bits_per_dim']:.4f} bits per dimension")
    if args.data not in data.NAMES:
        training.say(f"densities are in the units of {args.data}")
    if args.condition:
        wrong = test[f"wrong_{args.condition}"]
        value = f"{wrong['ppll']:.4f} ± {wrong['standard_error']:.4f}"
        training.say(f"{value} nats per point if conditioned on a wrong {args.condition}")
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


def as_seen(x, mask=None):
    """The sets of x as pictures show them: their own points, in two or three axes."""
    x = F.pad(x, (0, 1)) if x.shape[-1] == 1 else x[..., :3]
    x = x.cpu().numpy()
    return list(x) if mask is None else [one[there] for one, there in zip(x, mask.cpu().numpy())]


def draw_samples(path, samples, real=None):
    """Rows of samples, nine or, of many points, fewer and larger, beneath as many real sets."""
    across, cell = (9, 112) if max(map(len, samples)) <= 1024 else (4, 252)
    rows = [samples[i : i + across] for i in range(0, len(samples), across)]
    labels, colours = ["samples"] + [""] * (len(rows) - 1), ["blue"] * len(rows)
    if real is not None:
        rows, labels, colours = [real, *rows], ["real", *labels], ["grey", *colours]
    grid = pictures.point_grid(rows, row_labels=labels, colours=colours, cell=cell)
    pictures.write_png(path, grid)


def draw_beside(path, args, model, test):
    """Nine real sets, and eighteen samples, as large as those and nine others, beneath."""
    real, mask, samples = draw_like(args, model, test.some(18))
    draw_samples(path, as_seen(samples, mask), as_seen(real, mask)[:9])


def draw_run(args, model, test):
    """The pictures of a run: curves.png, samples.png, path.png and path-moving.png."""
    out = Path(args.out)
    draw_curves(out)
    draw_beside(out / "samples.png", args, model, test)
    batch = next(data.batches(test.some(5), 5, training=False, device=model.mean.device))
    draw_path(out / "path", args, model, batch.x, batch.mask, condition(args, model, batch))


@torch.no_grad()
def paths(model, z, frames, mask=None, context=None, solver=None):
    """Where points are on the way from noise to data: `(frames, ...)`, in the units of data."""
    at, blocks = [z], len(model.blocks)
    s = torch.linspace(1, 0, frames).tolist()
    for start, end in zip(s, s[1:]):  # in time of the whole chain, block i owning [i, i + 1] / K
        for i in reversed(range(blocks)):
            high, low = min(start * blocks - i, 1.0), max(end * blocks - i, 0.0)
            if high > low:
                block = model.blocks[i]
                times = (high * block.t1, low * block.t1)
                z = block.integrate(z, times, mask, context, solver)
        at.append(z)
    return torch.stack([model.from_units(z) for z in at])


def draw_path(name, args, model, like, mask=None, context=None):
    """How the first five samples, as large as sets `like`, come from noise: two pictures."""
    generator = torch.Generator().manual_seed(args.seed)  # the noise of draw_sets
    z = exnode.normal(like.shape, model.mean, generator)
    z, mask, context = (a if a is None else a[:5] for a in (z, mask, context))
    at = paths(model, z, 25, mask, context, sampler(args))  # (frames, sets, n, d)
    sets = [as_seen(frame, mask) for frame in at]
    rows = [[frame[i] for frame in sets[::3]] for i in range(len(z))]
    names = [f"{k / 8:.2f}" for k in range(9)]
    grid = pictures.point_grid(rows, names, title="from noise to data, over time")
    pictures.write_png(f"{name}.png", grid)
    limits = (float(at[0].min()), float(at[0].max()))
    frames = [pictures.point_grid([frame], limits=limits, cell=160) for frame in sets]
    hold = [frames[0]] * 4 + frames + [frames[-1]] * 12
    pictures.write_apng(f"{name}-moving.png", hold, 0.08)
    return at


@torch.no_grad()
def draw_page(path, args, model, split, found):
    """Real sets beside samples on their way from noise, with their densities, as a page."""
    few = split.some(min(PAGE_SETS, args.batch_size))
    batch = next(data.batches(few, len(few), training=False, device=model.mean.device))
    x, mask, given = batch.x, batch.mask, condition(args, model, batch)
    z = exnode.normal(x.shape, model.mean, torch.Generator().manual_seed(args.seed))
    way = paths(model, z, PAGE_FRAMES, mask, given, sampler(args))

    def nats(x):
        noise = torch.Generator(x.device).manual_seed(args.seed)
        how = {"solver": dopri5(args, least=1e-3), "generator": noise, **density(args)}
        return model.log_prob(x, mask, given, **how) / count(x, mask) + split.log_unit

    labels = few.label_names if args.condition == "label" else None
    title = f"{Path(args.out).name}: sets of {args.data}, and samples of a flow"
    how = {"way": way, "real": x, "labels": labels, "nats": nats, "test": found}
    pages.flow_page(path, way[-1], mask, run=args.load or args.out, title=title, **how)


# -------------------------------------------------------------------------- from a finished run
def sizes_of(args):
    """Sizes of the training sets of --load RUN by class, {} where it has no sets.json."""
    found = training.read_sets(args.load)
    if found is None and args.condition == "label":
        raise training.UsageError(f"--load {args.load}: no sets.json, which names its labels")
    return found["sizes"] if found else {}


def choose_sets(args, model):
    """Sizes `(K,)` and conditions `(K, c)` or None of --sample K sets.

    Sizes are --points, or drawn from those of the training sets, of the same label if there is one.
    """
    every, rng = sizes_of(args), np.random.default_rng(args.seed)
    names, counts = list(every), [sum(n for _, n in pairs) for pairs in every.values()]
    if args.label is not None and not every.get(args.label):
        there = ", ".join(name for name in names if every[name]) or "none"
        raise training.UsageError(f"--label {args.label}: there are {there}")
    label = rng.choice(len(names), args.sample, p=np.divide(counts, sum(counts))) if names else None
    if args.label is not None:
        label = np.full(args.sample, names.index(args.label))
    usual = data.POINTS["mnist" if model.dim == 2 else "modelnet"]["flow"]
    sizes = np.full(args.sample, args.points or usual)
    if names and not args.points:
        pairs = [np.array(every[names[k]]) for k in label]
        sizes = np.array([rng.choice(p[:, 0], p=p[:, 1] / p[:, 1].sum()) for p in pairs])
    if args.condition == "label":
        return sizes, F.one_hot(torch.from_numpy(label), len(names)).to(model.mean)
    if args.context:
        check_context(model, len(args.context), "--context")
    given = args.context and torch.tensor([args.context] * args.sample).to(model.mean)
    return sizes, given


def check_context(model, size, where):
    """An error if a flow is not conditioned on `size` numbers for each set."""
    if size != (wanted := model.blocks[0].field.context):
        fault = f"{size} numbers for a set, where the flow is conditioned on {wanted}"
        raise training.UsageError(f"{where}: {fault}")


def sample(args):
    """--sample K: sets as .npy (NaN where there is no point), .npz, .ply and PNG in --out."""
    world, model = training.connect(args), read_run(args)
    model.to(world.device)
    least = 4 * args.sample * (args.points or 1) * model.dim
    check_memory(args, world, model.dim, args.points or 1, 1, least)  # before sizes are drawn
    sizes, context = choose_sets(args, model)
    points = int(sizes.max())
    whole = 4 * args.sample * points * model.dim
    check_memory(
        args, world, model.dim, points, min(args.sample, -(-exnode.PIECE // points)), whole
    )
    mask = torch.arange(points) < torch.from_numpy(sizes)[:, None]
    there = None if mask.all() else mask.to(world.device)
    name = Path(args.out) / f"samples-{args.sample}x{args.points or points}-seed{args.seed}"
    training.make_folder(args.out)
    begun = time.monotonic()
    sets = draw_sets(args, model, args.sample, points, there, context).cpu()
    seconds = (time.monotonic() - begun) / args.sample
    write_samples(name, sets, mask)
    draw_samples(f"{name}.png", as_seen(sets[:27], mask[:27]))
    training.say(f"{name}.npy, .npz and .png: {seconds:.3g} s per set")
    way, labels = None, None
    if args.path:
        way = draw_path(f"{name}-path", args, model, sets, there, context)
        training.say(f"{name}-path.png and -path-moving.png: from noise to data")
    if args.condition == "label":
        labels = [list(sizes_of(args))[k] for k in context.argmax(-1)]
    title = f"{args.sample} samples of {Path(args.load).name}"
    how = {"way": way, "labels": labels, "run": args.load, "title": title}
    pages.flow_page(f"{name}.html", sets, mask, **how)
    return {"samples": sets, "mask": mask, "seconds_per_sample": seconds}


def write_samples(name, sets, mask):
    """NAME.npy, NAME.npz with x and mask, and, in 3-D, a folder NAME with a PLY file for each."""
    x = sets.masked_fill(~mask[..., None], math.nan).numpy()
    write_whole(f"{name}.npy", lambda f: np.save(f, x))
    arrays = {"x": sets.numpy(), "mask": mask.numpy()}
    write_whole(f"{name}.npz", lambda f: np.savez(f, **arrays))
    if x.shape[-1] == 3:
        training.make_folder(name)
        for i, points in enumerate(as_seen(sets, mask), 1):
            own_sets.write_ply(name / f"{i:0{len(str(len(x)))}}.ply", points)


def score(args):
    """--score PATH: a CSV with log p of every set there, the smallest first."""
    world, model = training.connect(args), read_run(args)
    split = data.load_all(args.score, args.data, points=args.points, **options.own_data(args))
    if split.dim != model.dim:
        raise training.UsageError(f"--score {args.score}: {split.dim}-D, the model {model.dim}-D")
    sizes, sets = split.sizes, args.batch_size // world.size
    check_memory(args, world, split.dim, int(sizes.max()), sets, pairs=True)
    label = split.label_names
    split = with_conditions(args, model, split)
    how = {"solver": dopri5(args), **density(args)}
    values = log_probs(args, model.to(world.device), split, world, how)
    known = training.test_quantiles(args.load)
    share = [""] * len(values) if known is None else np.interp(values, known, np.arange(101))
    rows = zip(split.names, label, sizes.tolist(), values * sizes, values, share)
    rows = sorted(rows, key=lambda row: row[4])
    head = ("name", "label", "points", "log_p", "nats_per_point", "percentile")
    path = training.write_table(args.out, f"scores-{Path(args.score).stem}.csv", head, rows)
    training.say(f"{path}: {len(values)} sets, {values.mean():.4f} nats per point on average")
    if known is None:
        training.say("percentiles are left out: --load RUN has no results.json of a test")
    else:
        area = f"area under the curve {1 - share.mean() / 100:.3f}"
        training.say(f"on average at percentile {share.mean():.1f} of the test sets: {area}")
    return {"names": split.names, "nats_per_point": values, "points": sizes}


def with_conditions(args, model, split):
    """A split that has what the flow is conditioned on, its labels numbered as in the run."""
    if args.condition == "context":
        if split.context is None:
            raise training.UsageError(f"--score {args.score}: no context, which the flow needs")
        check_context(model, split.context.shape[1], f"--score {args.score}")
    if args.condition != "label":
        return split
    names = list(sizes_of(args))
    if split.classes == UNLABELLED:
        raise training.UsageError(f"--score {args.score}: no labels, which the flow needs")
    if strange := sorted(set(split.classes) - set(names)):
        raise training.UsageError(f"--score {args.score}: no class {strange[0]!r} in {args.load}")
    number = np.array([names.index(name) for name in split.classes])
    return replace(split, labels=number[split.labels], classes=tuple(names))


def evaluate_only(args):
    world, model = training.connect(args), read_run(args)
    test = load_sets(args).test
    if test.dim != model.dim:
        raise training.UsageError(f"--load {args.load}: a model of {model.dim}-D, not {test.dim}-D")
    sets = args.batch_size // world.size
    check_memory(args, world, test.dim, data.span(test.points)[1], sets, pairs=True)
    found = test_metrics(args, model.to(world.device), test, world)
    show(args, found)
    results = training.write_evaluation(found, args, world)
    if world.rank == 0:
        draw_beside(Path(args.out) / "evaluation.png", args, model, test)
        draw_page(Path(args.out) / "evaluation.html", args, model, test, found)
    return results


def main(argv=None):
    """The results, also printed: of a run, of --sample or of --evaluate."""
    args = parse(argv)
    if args.recipe:
        return [main(words) for words in args.recipe][-1]
    if args.sample:
        return sample(args)
    if args.score is not None:
        return score(args)
    if args.evaluate:
        return evaluate_only(args)
    return training.several(args, train, "ppll") if args.runs > 1 else train(args)


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
