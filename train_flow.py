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
  data into units of their own mean and deviation first (`SetFlow.standardise`). `--spare` has
  more points of each shape tell where a noisy point may come from (`exnode.exchange`).
- The test likelihood has the exact trace, or for the transformer, which has no shortcut to it,
  Hutchinson's unbiased estimate with --probes probes, unless --trace says otherwise.
- Weights are selected on held-out training sets, of which about VALID_POINTS points are read, by
  dopri5 at a tolerance of 1e-3 at the tightest. The test sets are read once, at the end, by dopri5
  at --tolerance, whatever --method training has.
- "Halved every 100 epochs" is "after each tenth of the run", so that any budget has all of it.
- A transformer field, its views, Muon and averaged weights are options; what they gain is in
  the README.
"""

import copy
import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
from exnode import GRADIENTS, TRACES, SetFlow
from sets import count
from solvers import METHODS, Stats
from support import metrics, pictures, training

FIELDS = ("attention", "deepsets", "transformer")
INTERVALS = 10  # of the run, each with half the learning rate of the one before
VALID_POINTS = 6400  # points, of all sets together, in an evaluation
SCORE_SETS = 1000  # samples that are scored at the end
PIECE = 2**16  # points that are sampled at once
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
    parser = training.options("Model the density of sets.", "flow", **usual)
    add, number = parser.add_argument, training.number
    help = "of the sets: 50 on mnist and 512 on modelnet if None, as in the paper"
    add("--points", type=number(int, 1), help=help)
    add("--category", help='such as "chair"; None: all, or synthetic digits')
    choices = ("likelihood", "matching")
    add(
        "--objective", choices=choices, default="likelihood", help="what training maximises or fits"
    )
    help = "start from the best weights of a RUN, whose data and model, and for matching"
    help += " --coupling, --finest and --spare, are then the defaults; units of data stay RUN's"
    add("--finetune", metavar="RUN", help=help)
    add("--field", choices=FIELDS, default="attention", help="of each block")
    add("--blocks", type=number(int, 1), default=12, help="in the chain")
    add("--hidden", type=training.widths, default=[128] * 3, help="widths of a field's layers")
    add("--heads", type=number(int, 1), default=4, help="of attention")
    add("--time", action="store_true", help="attention and deepsets fields read the ODE's t")
    help = "a transformer in one block also sees near neighbours, at the scale of the noise: for"
    help += " shapes with flat parts"
    add("--fine", action="store_true", help=help)
    help = "a transformer in one block knows that no two points share a cell of a grid, so many to"
    help += " a unit: 28 for the pixels of mnist; 0: no grid"
    add("--cells", type=number(int, 0), default=0, help=help)
    help = "None: hutchinson in training; at the end exact, or hutchinson for the transformer"
    add("--trace", choices=TRACES, help=help)
    add("--probes", type=number(int, 1), default=1, help="of Hutchinson's estimator")
    add("--gradient", choices=GRADIENTS, default="adjoint", help="of the likelihood")
    add("--method", choices=("dopri5", "rk4", "rk5"), default="dopri5", help="solver in training")
    help = "of dopri5, which every evaluation uses"
    add("--tolerance", type=number(float, 1e-12), default=1e-5, help=help)
    add("--steps", type=number(int, 1), default=1, help="of rk4 or rk5 per block")
    choices = ("swaps", "none")
    add("--coupling", choices=choices, default="swaps", help="of noise to points, for matching")
    help = "noise that matching resolves, as a share of the data's deviation"
    add("--finest", type=number(float, 1e-6), default=0.1, help=help)
    help = "more points of each shape, with which matching replaces a point by its mean given its"
    help += " noisy one: far less noise in training. For ModelNet (1536 of 2048) and built-in sets"
    add("--spare", type=number(int, 0), default=0, metavar="K", help=help)
    add("--clip", type=number(float, 1e-9), help="largest norm of a gradient; None: any")
    help = "sets of the test split that are read at the end; None: all"
    add("--test-sets", type=number(int, 2), help=help)
    add("--load", metavar="RUN", help="a run directory, for --sample or --evaluate")
    add("--sample", type=number(int, 1), metavar="K", help="draw K sets from --load RUN")
    help = "with --sample: also draw how the first five come from noise"
    add("--path", action="store_true", help=help)
    add("--evaluate", action="store_true", help="only test the best weights of --load RUN")
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
        args = training.parse_finished(args.load, parser, argv, TRAINING)
        training.refuse(parser, args, MODEL_OPTIONS, "is not that of the model in --load RUN")
    elif args.finetune:
        names = (*MODEL_OPTIONS, "data", "category", "points", "seed")
        names += ("coupling", "finest", "spare") if args.objective == "matching" else ()
        args = training.parse_as_in(args.finetune, parser, argv, names)
        fixed = ("heads", "cells") if parser.get_default("cells") else ("heads",)
        training.refuse(parser, args, fixed, "is not that of the model in --finetune RUN")
    for name, (other, *values) in ONLY_WITH.items():
        if getattr(args, name) != usual[name] and getattr(args, other) not in values:
            values = " or ".join(value for value in values if value)
            parser.error(f"argument --{name}: only with --{other} {values}")
    if args.sample:
        names = ("data", "category", "batch_size", "test_sets")
        training.refuse(parser, args, names, "is for sets of data, which --sample does not read")
        training.refuse(parser, args, ("trace", "probes"), "is for densities, not for --sample")
    only_tested = args.load or args.objective == "matching"  # training reads no trace
    if only_tested and args.field != "transformer" and not args.trace:
        training.refuse(parser, args, ("probes",), "would not be read: the test's trace is exact")
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


def make_model(args, dim):
    """The chain of blocks."""
    solver = {"method": args.method, "rtol": args.tolerance, "atol": args.tolerance}
    if args.method != "dopri5":
        solver["options"] = {"step_size": 0.5 / args.steps}
    flow = {"gradient": args.gradient, "trace": args.trace or "hutchinson", "probes": args.probes}
    flow |= {name: getattr(args, name) for name in MODEL_OPTIONS}
    try:
        return SetFlow(dim, t1=0.5, **flow, **solver)
    except ValueError as e:  # a width that is too small for its heads
        raise training.UsageError(f"--hidden: {e}") from None


def judge(args, model, tolerance=0.0):
    """A copy for evaluations: --trace, or exact where that is cheap; dopri5, not below `tolerance`.

    Fixed steps have errors of their own, which training through them could exploit.
    """
    twin, tolerance = copy.deepcopy(model).eval(), max(args.tolerance, tolerance)
    twin.trace = args.trace or ("hutchinson" if args.field == "transformer" else "exact")
    for block in twin.blocks:
        block.settings = {"method": "dopri5", "rtol": tolerance, "atol": tolerance, "options": None}
    return twin


def read_run(args):
    """The model with the best weights of --load RUN."""
    path = Path(args.load) / "best.pt"
    state = training.read_checkpoint(path)
    if "mean" not in state.get("model", ()):
        raise training.UsageError(f"{path}: of another model, not of a set flow")
    model = make_model(args, len(state["model"]["mean"]))
    training.load_weights(model, state["model"], path)
    return model.eval()


def check_memory(args, world, dim, points, sets=1, whole=0, *, training_too=False, pairs=False):
    """About what so many points take at once; pairs: the exact trace of attention.

    whole: numbers of the output, beside them. Backpropagation keeps 20 evaluations by dopri5.
    """
    kept = 12 * max(args.hidden)  # numbers per point
    if training_too:
        kept = 30 * sum(args.hidden) + 3 * args.spare
    if training_too and args.objective == "likelihood" and args.gradient == "backprop":
        evaluations = 20 if args.method == "dopri5" else len(METHODS[args.method].b) * args.steps
        kept = max(kept, 2.5 * sum(args.hidden) * args.blocks * evaluations)
    cells = 4 * (args.cells + 4) ** dim if args.cells else 0  # a CellView's table
    need = 4 * (whole + sets * (points * kept + cells) + 8 * pairs * points**2)
    training.check_memory(need, world, f"{sets} sets of {points} points at once")


# -------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def measure_likelihood(model, split, batch_size, world, seed=0):
    """PPLL over all sets of a split, its standard error, and what solving took."""
    sums, stats = torch.zeros(2, dtype=torch.float64, device=world.device), Stats()
    generator = torch.Generator(world.device).manual_seed(seed + world.rank)
    batches = data.batches(split, batch_size, training=False, workers=1, **world.share)
    total = data.steps(split, batch_size, training=False)
    for x, mask, *_ in training.watch("likelihood", batches, total):
        log_p = model.log_prob(x, mask, generator=generator, stats=stats).double()
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


def draw_base(model, sets, points, seed):
    """Base points z `(sets, points, d)`, drawn on the CPU: the same on any device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sets, points, model.dim, generator=generator).to(model.mean)


@torch.no_grad()
def draw_sets(model, sets, points, seed=0):
    """`(sets, points, d)` samples, solved for about PIECE points at a time."""
    parts = draw_base(model, sets, points, seed).split(max(1, PIECE // points))
    return torch.cat([model.decode(part) for part in training.watch("sampling", parts)])


def measure_samples(model, split, seed, sets=SCORE_SETS):
    """Scores of generated sets against as many test sets, and the seconds each took."""
    split, points = split.some(sets), data.span(split.points)[1]
    sets = len(split)
    real = torch.from_numpy(split.draw(np.arange(sets))[0]).to(model.mean.device)
    begun = time.monotonic()
    samples = draw_sets(model, sets, points, seed)
    samples.sum().item()  # a GPU has done its work only now
    seconds = (time.monotonic() - begun) / sets
    scores = metrics.sample_scores(samples, real, partial(training.watch, "scores"))
    return {**scores, "sets": sets, "seconds_per_sample": seconds}


# ---------------------------------------------------------------------------------- training
def train(args):
    """One run: train, select, test, draw; the contents of its results.json."""
    world = training.connect(args)
    if results := training.prepare(args, world):
        training.say(f"{args.out} is complete: PPLL {results['test']['ppll']:.4f}")
        return results
    splits = load_sets(args)
    sets, points = args.batch_size // world.size, data.span(splits.train.points)[1]
    check_memory(args, world, splits.train.dim, points, sets, training_too=True)
    training.seed(args.seed)
    model = make_model(args, splits.train.dim).to(world.device)
    start(args, model, splits.train)
    optimizer = training.OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    steps = data.steps(splits.train, args.batch_size)
    schedule = training.schedule(args.schedule, INTERVALS)
    settings = {"ema": args.ema, "clip": args.clip, "every": args.every}
    run = training.Run(args, world, model, optimizer, schedule, steps, **settings)
    valid = splits.valid.some(-(-VALID_POINTS // points))

    def batches(epoch, start):
        draw = {"seed": args.seed, "epoch": epoch, "start": start, "workers": 1}
        return data.batches(splits.train, args.batch_size, **draw, **world.share)

    def loss(model, batch):
        if args.objective == "matching":
            how = {"coupling": args.coupling, "finest": args.finest}
            if args.spare:
                return model.matching_loss(batch.x[:, :points], spare=batch.x[:, points:], **how)
            return model.matching_loss(batch.x, batch.mask, **how)
        return -(model.log_prob(batch.x, batch.mask) / count(batch.x, batch.mask)).mean()

    def evaluate(model):
        twin = judge(args, model, tolerance=1e-3)
        return {"valid_ppll": measure_likelihood(twin, valid, args.batch_size, world)["ppll"]}

    run.fit(loss, batches, evaluate, best="valid_ppll")
    return finish(args, run, model, splits.test)


def start(args, model, train):
    """Weights of --finetune, or data in units of their own for matching."""
    if args.finetune:
        before = training.read_config(args.finetune)
        new = [name for name in ("fine", "cells") if not before.get(name)]  # start without effect
        training.load_best(model, args.finetune, [f"blocks.0.field.{name}." for name in new])
        model.place_cells()
    elif args.objective == "matching":
        some = train.some(2000)
        x, mask, _ = some.draw(np.arange(len(some)))
        try:
            model.standardise(*(None if a is None else torch.from_numpy(a) for a in (x, mask)))
        except ValueError as e:
            raise training.UsageError(f"--objective matching: {e}") from None


def measure(args, model, test, world):
    twin, test = judge(args, model), test.some(args.test_sets)
    results = measure_likelihood(twin, test, args.batch_size, world)
    results |= {"trace": twin.trace, "tolerance": args.tolerance, "log_unit": test.log_unit}
    if (noise := test.noise()) is not None:
        results["noise"] = noise
    return results | {"samples": measure_samples(twin, test, args.seed)}


def finish(args, run, model, test):
    """Pictures, then the test, which takes longer, and results.json, which marks the end."""
    if run.world.rank == 0:
        out, twin = Path(args.out), judge(args, model)
        draw_curves(out)
        draw_beside(out / "samples.png", twin, test, args.seed)
        z = draw_base(twin, 5, data.span(test.points)[1], args.seed)
        draw_path(out / "path", twin, z)
    results = measure(args, model, test, run.world)
    return run.finish(results)


# ---------------------------------------------------------------------------------- pictures
def draw_curves(out):
    lines = training.read_metrics(out)
    at, value = zip(*[(line["step"], line["valid_ppll"]) for line in lines])
    curve = pictures.curves({"validation": (at, value)}, "step", "PPLL, nats per point")
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


def draw_beside(path, model, test, seed):
    """Nine real sets, and samples of as many points beneath."""
    real = test.some(9)
    samples = draw_sets(model, 18, data.span(test.points)[1], seed)
    draw_samples(path, samples, real.draw(np.arange(len(real)))[0])


@torch.no_grad()
def paths(model, z, frames):
    """Where points are on the way from noise to data: `(frames, ...)`, in the units of data."""
    at, blocks = [z], len(model.blocks)
    s = torch.linspace(1, 0, frames).tolist()
    for start, end in zip(s, s[1:]):  # in time of the whole chain, block i owning [i, i + 1] / K
        for i in reversed(range(blocks)):
            high, low = min(start * blocks - i, 1.0), max(end * blocks - i, 0.0)
            if high > low:
                block = model.blocks[i]
                z = block.integrate(z, None, None, (high * block.t1, low * block.t1), None)
        at.append(z)
    return torch.stack([model.leave(z) for z in at])


def draw_path(name, model, z):
    """name.png, sets on their way from noise z to data, and name-moving.png, the same in motion."""
    at = paths(model, z, 25).cpu().numpy()  # (frames, sets, n, d)
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
    world, model = training.connect(args), judge(args, read_run(args))
    model.to(world.device)
    args.points = args.points or data.POINTS["mnist" if model.dim == 2 else "modelnet"]["flow"]
    sets = min(args.sample, max(1, PIECE // args.points))
    whole = 4 * args.sample * args.points * model.dim
    check_memory(args, world, model.dim, args.points, sets, whole)
    name = Path(args.out) / f"samples-{args.sample}x{args.points}-seed{args.seed}"
    training.make_folder(args.out)
    begun = time.monotonic()
    sets = draw_sets(model, args.sample, args.points, args.seed).cpu()
    seconds = (time.monotonic() - begun) / args.sample
    training.write(Path(f"{name}.npy"), lambda f: np.save(f, sets.numpy()))
    draw_samples(f"{name}.png", sets[:27])
    training.say(f"{name}.npy and .png: {seconds:.3g} s per set")
    if args.path:
        z = draw_base(model, args.sample, args.points, args.seed)[:5]  # of the first samples
        draw_path(f"{name}-path", model, z)
        training.say(f"{name}-path.png and -path-moving.png: from noise to data")
    return {"samples": sets, "seconds_per_sample": seconds}


def evaluate_only(args):
    world, model = training.connect(args), read_run(args)
    test = load_sets(args).test
    if test.dim != model.dim:
        raise training.UsageError(f"--load {args.load}: a model of {model.dim}-D, not {test.dim}-D")
    sets = args.batch_size // world.size
    check_memory(args, world, test.dim, data.span(test.points)[1], sets, pairs=True)
    found = measure(args, model.to(world.device), test, world)
    results = training.write_evaluation(found, args, world)
    if world.rank == 0:
        draw_beside(Path(args.out) / "evaluation.png", judge(args, model), test, args.seed)
    return results


def main(argv=None):
    """The results, also printed: of a run, of --sample or of --evaluate."""
    args = parse(argv)
    if args.sample:
        return sample(args)
    results = evaluate_only(args) if args.evaluate else train(args)
    test = results["test"]
    unit = f"{test['ppll']:.4f} ± {test['standard_error']:.4f}"
    training.say(f"test PPLL {unit} nats per point, {test['bits_per_dim']:.4f} bits per dimension")
    scores = test["samples"]
    text = ", ".join(f"{name} {scores[name]:.4g}" for name in ("1-NNA", "MMD", "COV"))
    training.say(f"{scores['sets']} samples: {text}")
    if not args.evaluate:
        training.say(f"pictures: samples.png, path.png and path-moving.png in {args.out}")
    return results


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
