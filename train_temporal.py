"""Sets that move in time, Sec. 3.4 and 4.4 of the paper: a VAE over rotating digits.

    python train_temporal.py                               built-in digits, no download
    python train_temporal.py --data mnist --cuda           the paper's recipe
    python train_temporal.py --data mnist --objective matching --minutes 30
    python train_temporal.py --finetune runs/temporal --objective matching --kl 0.01 --out runs/two
    python train_temporal.py --load runs/temporal --sample 6 --times 0:1.5:0.05 --points 500
    python train_temporal.py --load runs/temporal --reconstruct mine.npy --at 0,0.3,0.55,1
    python train_temporal.py --load runs/temporal --evaluate --classifier runs/digits
    python train_temporal.py --data mine.npz --objective matching --out runs/mine
    python train_temporal.py --load runs/mine --reconstruct other.npz --times 0:3:0.1

    Sec. 4.4, five fixed times             --times
    App. C.3, recipe: 64 points, latent
    128, dopri5 at 1e-3 and 1e-4, Adam
    1e-3, batches of 128; authors' code:
    halved every 50 of 100 epochs          the defaults; INTERVALS
    Eq. 11, ELBO                           measure_elbo; --objective elbo
    Eq. 12, 13, sampling at any time       --sample, --reconstruct
    Fig. 5, 6, samples, red and green      samples.png, moving.png; frame
    Fig. 7, conditional samples            reconstructions.png
    Fig. 8, interpolation of z₀            latent.png

x is `(B, T, n, d)`: B series of T sets; t is `(T,)`, or `(B, T)` for series with their own times;
mask is `(B, T, n)`, True where a point exists, all False for a set that was not observed.

Departures from the paper
- Weights are selected by the ELBO of held-out series; the test series are read once, at the end.
  Both ELBOs use exact traces (a transformer's, Hutchinson's unbiased one), and at most
  --valid-series and --test-series evenly spaced series: a CPU needs up to a second for each.
  `tolerance_error` beside a test's ELBO is by how many nats per point a series is off at the
  solver's tolerance: the most among CHECKED_SERIES, solved at a hundredth of it.
- The paper shows pictures only. We measure, too: Chamfer distances of reconstructions at trained
  times, between and beyond them, to an independent draw of the true set there. Rivals: a copy of
  the true set at the nearest trained time, and, as the floor, one more draw of the true set.
  And whether a classifier of still digits reads reconstructions, turned back, as it reads the sets
  that were given: `--classifier`, a run of `train_cls.py --data mnist`.
- `--objective matching` regresses the decoder on straight paths, in units of the data's deviation,
  instead of solving it: error per coordinate + --kl · KL / coordinates of a series + --moments ·
  error of the characteristic function that z predicts (beyond/matching.py). With noise and points
  paired at random (--coupling none) 2.4 · error is about −log p + const (ln(1 + 1/ε) in
  noise_level), so that 0.42 is the ELBO's own weight. Noise assigned to near points leaves less to
  explain: after 375 steps on the built-in digits (one seed, 32 points) the KL was 19 nats and
  rising with 0.043, 4.5 and falling with 0.22.
- A person's own series (--data PATH, support/own_files.py) may have any d, sizes and times. Their
  test: Chamfer distances of reconstructions to the observed sets of series with at least two, and
  to every second inner set while the encoder does not see it (interpolation). Rival: a copy of the
  nearest other set that is seen. There is no second draw of a set, so no floor.
- In pictures and files a point keeps its base point y over time (Eq. 13 draws y anew at each time),
  so that it moves continuously; the distribution of the set at each time is the same.
- "Halved every 50 epochs" is "after half the run", so that any budget has all of it.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
import exnode
from beyond.matching import COUPLINGS, Moments, temporal_matching_loss
from solvers import SolverError
from support import options, pages, pictures, training
from support.files import write_whole
from support.metrics import chamfer
from support.series import (
    as_mask,
    as_seen,
    count_points,
    full_mask,
    observed_series,
    shown_mask,
    sum_distances,
    window,
    with_nan,
)

INTERVALS = 2  # of the run, each with half the learning rate of the one before
HIDDEN = {"concatsquash": [512] * 3, "attention": [128] * 3, "transformer": [128] * 4}
TIMES, POINTS = [0.0, 0.25, 0.5, 0.75, 1.0], 64  # of the paper's series
CHECKED_SERIES = 8  # test series that are solved once more, at a hundredth of the tolerance
RENEWED = 20  # batches that batch normalisation's statistics are computed from anew
ADVICE = "on a CPU, --objective matching trains the decoder without a solver"
UNITS = "nats per point, in pixels: log p / n on half a canvas − 2 ln 14; kl in nats per series"
OWN_UNITS = "nats per point, in the units of the file; kl in nats per series"
FARTHEST = 1000  # time that anyone may ask for
MODEL_OPTIONS = (
    "data", "columns", "skip_bad", "noise", "category", "points", "times", "decoder", "hidden",
    "latent", "seed",
)  # fmt: skip
TRAINING = (  # options without a meaning for a finished run
    "objective", "kl", "coupling", "pieces", "match_times", "moments", "gradient", "valid_series",
    "finetune",
)  # fmt: skip


# --------------------------------------------------------------------------------------- options
def times(text):
    """Increasing times: "0,0.25,1", or "start:stop:step" with its stop."""
    try:
        if ":" in text:
            start, stop, step = map(float, text.split(":"))
            count = int((stop - start) / step + 1e-6)
            if count >= 10_000:
                raise argparse.ArgumentTypeError(f"{text!r} has {count + 1} times: at most 10000")
            values = [round(start + k * step, 9) for k in range(count + 1)]
        else:
            values = [float(v) for v in text.split(",")]
    except (ValueError, ArithmeticError):
        want = "want a list such as 0,0.25,1 or a range such as 0:1.5:0.05"
        raise argparse.ArgumentTypeError(f"{text!r}: {want}") from None
    near = bool(values) and np.abs(values).max() <= FARTHEST
    if not near or not (np.diff(np.float32(values)) > 0).all():
        within = f"from -{FARTHEST} to {FARTHEST}"
        raise argparse.ArgumentTypeError(f"{text!r}: times must increase, {within}")
    return values


def parse(argv=None):
    usual = {"epochs": 100, "batch_size": 128, "every": 800}
    parser = options.shared("Model sets over time.", "temporal", **usual)
    number = options.number
    add = parser.group("data")
    help = "Trained times, or with --load those of the output: a list or start:stop:step; if not"
    help += " given, 0,0.25,0.5,0.75,1. Your own series have theirs in the file."
    add("--times", type=times, help=help)
    help = "Number of points in each set; if not given, 64, or all those of your own series."
    add("--points", type=number(int, 1, below=10**10), help=help)
    add("--category", help='Digits or labels to read, such as "1,7"; if not given, all.')
    help = "Largest number of held-out series in an evaluation."
    add("--valid-series", type=number(int, 1), default=256, help=help)
    help = "Largest number of series in the test."
    add("--test-series", type=number(int, 1), default=1000, help=help)
    help = "A run of train_cls.py on upright digits, to see whether it recognises reconstructions."
    add("--classifier", type=options.path, metavar="RUN", help=help)
    add = parser.group("the model of the paper")
    help = "Vector field of the decoder's flow; attention and the transformer are ours."
    add("--decoder", choices=exnode.DECODERS, default="concatsquash", help=help)
    help = "Dimension of z."
    add("--latent", type=number(int, 1, below=2**20), default=128, help=help)
    help = (
        "Widths of the decoder; if not given, 512,512,512, or three of 128, for a transformer four."
    )
    add("--hidden", type=options.widths, metavar="W,W", help=help)
    help = (
        "How a solve is differentiated; if not given, adjoint for elbo, and backprop for matching,"
    )
    add("--gradient", choices=exnode.GRADIENTS, help=f"{help} where only z is solved.")
    help = "Trace of the ELBO in training; in a test too with a transformer, else that is exact."
    add("--trace", choices=exnode.TRACES, default="hutchinson", help=help)
    add = parser.group("ours")
    help = "What training maximises or fits; matching trains the decoder without a solver."
    add("--objective", choices=("elbo", "matching"), default="elbo", help=help)
    help = "Start from the best weights of a RUN, whose data and model options are the defaults;"
    help += " with another --decoder or --hidden, from those of the encoder and the latent ODE."
    add("--finetune", type=options.path, metavar="RUN", help=help)
    help = "Weight of the KL in matching; with --coupling none, 0.42 is the ELBO's own."
    add("--kl", type=number(float, 0), default=0.05, help=help)
    help = "How matching pairs noise with points."
    add("--coupling", choices=COUPLINGS, default="swaps", help=help)
    help = "Also match pieces of K points by themselves, so that z matters; 0 for whole sets."
    add("--pieces", type=number(int, 0), default=0, metavar="K", help=help)
    help = "Match at K random times of a batch, for larger batches; 0 for all of them."
    add("--match-times", type=number(int, 0), default=0, metavar="K", help=help)
    help = "Weight, in matching, of the error of each set's mean cos and sin of w.x as predicted"
    help += " from z: the encoder learns much sooner; 20 is a start."
    add("--moments", type=number(float, 0), default=0.0, help=help)
    add = parser.group("from a finished run")
    add("--evaluate", action="store_true", help="Only test the best weights of --load RUN.")
    add("--sample", type=number(int, 1), metavar="K", help="Draw K series from --load RUN.")
    help = "Reconstruct your series: a file as for --data, with times, or a .npy file of (T, n, d)"
    help += " or (B, T, n, d), NaN for a point that is not there. Digits are centred, in units of"
    help += " half a canvas, y up."
    add("--reconstruct", type=options.path, metavar="FILE", help=help)
    help = "Times of the sets in a .npy file; if not given, evenly spaced from 0 to 1."
    add("--at", type=times, help=help)
    args = parser.parse_args(argv)
    if args.recipe is not None:
        return options.repeat(parser, args)
    if args.finetune and args.load:
        parser.error("--finetune trains: leave out --load")
    if options.goes_on(args) and not args.load:
        args = options.parse_as_in(args.out, parser, argv)
    elif args.finetune:
        hidden, args = args.hidden, options.parse_as_in(args.finetune, parser, argv, MODEL_OPTIONS)
        if args.decoder != parser.get_default("decoder"):  # that of the run
            args.hidden = hidden
    if args.load:
        args = options.parse_finished(args.load, parser, argv, TRAINING)
        names = ("decoder", "hidden", "latent")
        options.refuse(parser, args, names, "is not that of the model in --load RUN")
    args.hidden = args.hidden or HIDDEN[args.decoder]
    args.gradient = args.gradient or {"elbo": "adjoint", "matching": "backprop"}[args.objective]
    return check(parser, args)


def check(parser, args):
    """The options, if they go together."""
    tasks = [args.evaluate, args.sample is not None, args.reconstruct is not None]
    if sum(tasks) != bool(args.load):
        parser.error("--load RUN goes with one of --evaluate, --sample and --reconstruct")
    if args.at and Path(args.reconstruct or "").suffix != ".npy":
        parser.error("--at gives the times of --reconstruct FILE.npy; other files have their own")
    if args.sample or args.reconstruct is not None:
        names = ("data", "category", "batch_size", "test_series", "classifier", "noise")
        options.refuse(parser, args, names, "is for the test series, which nothing reads here")
        args.times = args.times or usual_times(args.load)
    elif is_own(args):
        names, why = ("times", "classifier"), "is for turning digits: own series have their times"
        options.refuse(parser, args, names, why)
        args.times = args.classifier = None
    else:
        args.times, args.points = args.times or TIMES, args.points or POINTS
    if args.sample:
        options.refuse(parser, args, ("columns", "skip_bad"), "is for files, which nothing reads")
    if args.objective == "elbo":
        names = ("kl", "coupling", "pieces", "match_times", "moments")
        options.refuse(parser, args, names, "is for --objective matching")
    if args.trace != parser.get_default("trace") and not reads_trace(args):
        parser.error("--trace: without --objective elbo or a transformer, nothing would read it")
    if args.points and args.pieces > args.points and not args.load:
        parser.error(f"argument --pieces: {args.pieces} of sets of {args.points} points")
    if args.times and args.match_times > len(args.times) and not args.load:
        parser.error(f"argument --match-times: {args.match_times} is more than there are")
    return args


def reads_trace(args):
    """Whether --trace matters: in training by the ELBO, or where the exact trace is dear."""
    return args.decoder == "transformer" or (args.objective == "elbo" and not args.load)


# ------------------------------------------------------------------------------- series and model
def is_own(args):
    return args.data not in data.NAMES


def load_series(args):
    kind = {"task": "temporal", "category": args.category, "points": args.points}
    kind |= {"seed": args.seed, "times": args.times or TIMES, **options.own_data(args)}
    splits = data.load(args.data, args.root, **kind)
    check_times(args.data, splits.train.source.times)
    return splits


def check_times(path, known):
    """An error unless times (T,) or (N, T) of series are near 0 and differ in float32."""
    first, last = np.nanmin(known), np.nanmax(known)
    if max(-first, last) > FARTHEST or (np.diff(np.float32(known)) <= 0).any():
        way = "subtract the first, and choose another unit of time"
        within = f"want steps that float32 resolves, from -{FARTHEST} to {FARTHEST}"
        raise training.UsageError(f"{path}: times from {first:g} to {last:g}: {within}: {way}")


def check_own(args, split):
    """An error where options do not fit a person's own training series."""
    if args.match_times > (most := split.times.shape[-1]):
        raise training.UsageError(f"--match-times {args.match_times}: series have up to {most}")
    for batch in data.batches(split, args.batch_size, training=False) if args.pieces else ():
        if batch.mask is not None or args.pieces > batch.x.shape[-2]:
            why = f"sets must all have as many points, at least {args.pieces}"
            raise training.UsageError(f"--pieces {args.pieces}: {why}: give --points")


def usual_times(run):
    """Five evenly spaced times in the range of a run's own series; TIMES, if it has none."""
    span = (training.read_sets(run) or {}).get("times", TIMES)
    fine = isinstance(span, list) and all(isinstance(t, int | float) for t in span)
    if not fine or not span or not np.abs(span).max() <= FARTHEST:
        raise training.UsageError(f"{run}/sets.json: {str(span)[:40]} are no times")
    return np.unique(np.linspace(span[0], span[-1], 5).round(9)).tolist()


def known_sizes(args, run):
    """Points in a set, --points or those of a run's training series, and how often: two arrays."""
    info = training.read_sets(run)
    if args.points or not info:
        return np.array([[args.points or POINTS], [1]])
    return np.array([pair for pairs in info["sizes"].values() for pair in pairs]).T


def choose_sizes(args, run, count):
    """Points in each of `count` samples, drawn from known_sizes."""
    size, series = known_sizes(args, run)
    return np.random.default_rng(args.seed).choice(size, count, p=series / series.sum())


def at_times(split, times):
    """The same series at other times; a time that comes twice has two draws of its set."""
    return replace(split, source=replace(split.source, times=np.array(times, np.float64)))


def spread(count, most=11):
    """At most so many of `count` positions, evenly spaced, the first and last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def build(args, dim):
    try:
        model = exnode.build(vars(args), dim)
    except ValueError as e:  # widths that the heads of attention do not divide
        raise training.UsageError(f"--hidden: {e}") from None
    if args.moments and not args.load:
        model.moments = Moments(args.latent, dim=dim)
    return model


def check_memory(args, world, points, sets, each, whole=0):
    """Estimated peak bytes for `sets` sets, with `each` numbers a point, and a whole output."""
    pairs = 8 * points if args.decoder != "concatsquash" else 0
    need = 4 * (whole + sets * points * (each + pairs))
    training.check_memory(need, world, f"sets of {points} points with the other options")


def check_training_memory(args, world, split):
    """What the encoder and one evaluation of the decoder hold; backpropagation holds about 30."""
    sets = min(args.batch_size, len(split)) // world.size * split.times.shape[-1]
    decoder = sum(args.hidden)
    if args.objective == "elbo":
        decoder *= (1 + split.dim) * (30 if args.gradient == "backprop" else 1)  # with tangents
    weights = (args.latent + max(args.hidden)) * (1024 + 3 * sum(args.hidden))
    check_memory(args, world, split.points, sets, 4 * (1024 + decoder), 4 * weights)


def generator(args, world):
    return torch.Generator(world.device).manual_seed(args.seed + 7919 * world.rank)


def moving(args, draws):
    """How sets are drawn for files and pictures: a point keeps its base point over time."""
    watch = partial(training.watch, "decoding")
    return {"points": args.points, "generator": draws, "continuous": True, "progress": watch}


# --------------------------------------------------------------------------------------- measures
def shared_batches(split, args, world, what):
    """This process's batches of a split, with a line about progress every half minute."""
    batches = data.batches(split, args.batch_size, training=False, workers=1, **world.share)
    return training.watch(what, batches, data.steps(split, args.batch_size, training=False))


def test_trace(args):
    """The exact trace, or --trace for a transformer, which has no shortcut to it."""
    return args.trace if args.decoder == "transformer" else "exact"


@torch.no_grad()
def measure_elbo(model, split, args, world):
    """The mean ELBO of a split's series and its parts, as UNITS says."""
    total = torch.zeros(4, dtype=torch.float64, device=world.device)
    how = {"generator": generator(args, world), "trace": test_trace(args)}
    for batch in shared_batches(split, args, world, "ELBO"):
        parts, points = model.elbo_terms(batch.x, batch.t, batch.mask, **how), count_points(batch)
        log_p, kl = (part.double() for part in parts)
        log_p = log_p / points + split.log_unit
        elbo = log_p - kl / points
        total += torch.stack([elbo, log_p, kl, elbo**2]).sum(1)
    elbo, log_p, kl, square = (world.sum(total) / len(split)).tolist()
    error = (max(square - elbo**2, 0) / max(len(split) - 1, 1)) ** 0.5
    results = {"elbo": elbo, "log_likelihood": log_p, "kl": kl, "standard_error": error}
    return {**results, "trace": test_trace(args)}


@torch.no_grad()
def tolerance_error(model, split, args, world):
    """The largest change of a few series' ELBO per point at a hundredth of the tolerance."""
    few = split.some(CHECKED_SERIES)
    batch = next(data.batches(few, len(few), training=False, device=world.device))
    tight = model.solver | {k: model.solver[k] / 100 for k in ("rtol", "atol")}
    found = []
    for solver in (model.solver, tight):  # with the same draws
        how = {"generator": generator(args, world), "trace": test_trace(args), "solver": solver}
        try:
            found.append(model.elbo(batch.x, batch.t, batch.mask, **how) / count_points(batch))
        except SolverError:
            return None  # unknown: at so small a tolerance there is no solution in this precision
    return (found[0] - found[1]).abs().max().item()


def test_times(trained):
    """Trained times, the middles between them, and a quarter and a half beyond the last."""
    middles = [(a + b) / 2 for a, b in zip(trained, trained[1:])]
    return sorted([*trained, *middles, trained[-1] + 0.25, trained[-1] + 0.5])


def kind_of(t, trained):
    if t in trained:
        return "reconstruction"
    return "interpolation" if trained[0] < t < trained[-1] else f"extrapolation to {t:g}"


@torch.no_grad()
def measure_sets(model, split, args, world):
    """Chamfer distances to the true set at each of test_times: of model, copy and floor."""
    trained, at = args.times, test_times(args.times)
    nearest = [min(range(len(trained)), key=lambda i: abs(trained[i] - t)) for t in at]
    total = torch.zeros(3, len(at), dtype=torch.float64, device=world.device)
    draws = generator(args, world)
    three = at_times(split, [*trained, *at, *at])  # what is given, the truth, one more draw of it
    for batch in shared_batches(three, args, world, "reconstruction"):
        x, truth, again = batch.x.split([len(trained), len(at), len(at)], 1)
        made = model.reconstruct(x, trained, at, **moving(args, draws))
        for k, rival in enumerate((made, x[:, nearest], again)):
            for i in range(len(at)):  # one by one, for their (B, n, n) distances
                total[k, i] += chamfer(rival[:, i], truth[:, i]).double().sum()
    rows = (world.sum(total) / len(split)).T.tolist()
    names = ("t", "kind", "model", "copy", "floor")
    return [dict(zip(names, (t, kind_of(t, trained), *row))) for t, row in zip(at, rows)]


@torch.no_grad()
def measure_own_sets(model, split, args, world):
    """Mean Chamfer distances of model and copy to observed sets, and to those left out."""
    total = torch.zeros(2, 3, dtype=torch.float64, device=world.device)
    draws = generator(args, world)
    for batch in shared_batches(split, args, world, "reconstruction"):
        mask = full_mask(batch)
        batch = batch._replace(mask=mask, t=batch.t.expand(mask.shape[:2]))
        seen = mask.any(-1)
        place, sets = seen.cumsum(1), seen.sum(1, keepdim=True)  # 1 is the first observed set
        inner = seen & (place % 2 == 0) & (place < sets)
        total[0] += sum_distances(model, batch, seen, seen & (sets > 1), draws)
        total[1] += sum_distances(model, batch, seen & ~inner, inner, draws)
    means = {}
    for kind, (mine, copy, sets) in zip(("reconstruction", "interpolation"), world.sum(total)):
        if sets:
            means[kind] = {"model": (mine / sets).item(), "copy": (copy / sets).item()}
    return means


def load_model(option, run, kind):
    """The trained model of a run, of the class `kind`."""
    return training.load_model(option, run, exnode.load, kind, f"a {kind.__name__}")


@torch.no_grad()
def measure_recognition(model, classifier, split, args, world):
    """Shares of sets, turned back, that the classifier labels as the given ones, or rightly."""
    total, draws = torch.zeros(3, dtype=torch.float64, device=world.device), generator(args, world)
    back, digits = -np.pi * split.times, torch.tensor([int(name) for name in split.classes])

    def labels(x):  # from units of half a canvas about its centre to the canvas
        x = data.rotate_clockwise(x.cpu().numpy(), back) / 2 + 0.5
        return classifier(torch.from_numpy(x).to(world.device)).argmax(-1)

    for x, _, label, t, _ in shared_batches(split, args, world, "recognition"):
        made = model.reconstruct(x, t, args.times, **moving(args, draws))
        given, made, true = labels(x), labels(made), digits.to(label.device)[label, None]
        pairs = ((made, given), (made, true), (given, true))
        total += torch.stack([(a == b).double().mean(-1).sum() for a, b in pairs])
    names = ("as_given", "right", "given_right")
    return dict(zip(names, (world.sum(total) / len(split)).tolist()))


def test_metrics(model, split, args, world):
    """ELBO, and Chamfer distances for each time and on average over times of a kind."""
    if args.classifier:
        classifier = load_model("--classifier", args.classifier, exnode.SetClassifier)
    split = split.some(args.test_series)
    metrics = measure_elbo(model, split, args, world)
    metrics["tolerance_error"] = tolerance_error(model, split, args, world)
    metrics |= {"tolerance": {k: model.solver[k] for k in ("rtol", "atol")}, "series": len(split)}
    if is_own(args):
        distances = measure_own_sets(model, split, args, world)
        return metrics | {"units": OWN_UNITS, "chamfer": distances}
    if args.classifier:
        classifier.to(world.device)
        metrics["recognised"] = measure_recognition(model, classifier, split, args, world)
    rows, means = measure_sets(model, split, args, world), {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        means[kind] = {k: sum(r[k] for r in mine) / len(mine) for k in ("model", "copy", "floor")}
    return metrics | {"units": UNITS, "chamfer": means, "at_times": rows}


def show(metrics):
    """The table of a test, on stderr."""
    form = (
        "ELBO {elbo:.4f} ± {standard_error:.4f}: log-likelihood {log_likelihood:.4f}, KL {kl:.1f}"
    )
    training.say(f"test {form.format(**metrics)}; {metrics['units']}")
    if (off := metrics.get("tolerance_error")) is not None:
        training.say(f"at the solver's tolerance, series are off by up to {off:.2g} nats per point")
    for i, (kind, row) in enumerate(metrics["chamfer"].items()):
        if not i:
            training.say(f"{'Chamfer distance':24}" + "".join(f"{name:>11}" for name in row))
        training.say(f"{kind:24}" + "".join(f"{value:11.5g}" for value in row.values()))
    if share := metrics.get("recognised"):
        form = "reconstructions labelled as the given sets {as_given:.3f}, rightly {right:.3f}; "
        training.say((form + "given sets rightly {given_right:.3f}").format(**share))


# --------------------------------------------------------------------------------------- training
def make_loss(args, split):
    """The objective: −ELBO as in UNITS, or the matching error, what z tells, and the KL."""

    def elbo(model, batch):
        found = model.elbo(batch.x, batch.t, batch.mask) / count_points(batch)
        return -found.mean() - split.log_unit

    def matching(model, batch):
        how = {"coupling": args.coupling, "pieces": args.pieces, "times": args.match_times}
        how["moments"] = args.moments
        error, kl = temporal_matching_loss(model, batch.x, batch.t, batch.mask, **how)
        return error + args.kl * (kl / count_points(batch)).mean() / model.dim

    return elbo if args.objective == "elbo" else matching


def start(args, model, train):
    """Weights of --finetune; a new decoder gets the units of the data, but by ELBO of digits."""
    fresh = True
    if args.finetune:
        before = training.read_config(args.finetune)
        fresh = any(before[name] != getattr(args, name) for name in ("decoder", "hidden"))
        new = ("decoder.",) if fresh else ()
        if bool(before.get("moments")) != bool(args.moments):
            new += ("moments.",)
        training.load_best(model, args.finetune, new)
    if fresh and (args.objective == "matching" or is_own(args)):
        x, mask, _ = train.draw(np.arange(min(len(train), 500)))
        x = torch.from_numpy(x if mask is None else x[mask])
        try:
            model.decoder.standardise(x.to(model.decoder.mean.device))
        except ValueError as e:
            raise training.UsageError(f"--data {args.data}: {e}") from None
        if is_own(args) and not args.finetune:
            exnode.start_in_units(model.points[0], x)


def train(args):
    """One run: train, select, test, draw; the contents of its results.json."""
    world = training.connect(args)
    if args.classifier:  # a mistake shows before training
        load_model("--classifier", args.classifier, exnode.SetClassifier)
    with training.directory(args, world, "elbo") as results:
        return results or train_here(args, world)


def train_here(args, world):
    splits = load_series(args)
    check_training_memory(args, world, splits.train)
    check_own(args, splits.train)
    if world.rank == 0:
        training.write_sets(args.out, splits.train)
    valid, steps = splits.valid.some(args.valid_series), data.steps(splits.train, args.batch_size)

    def batches(epoch, start):
        draw = {"seed": args.seed, "epoch": epoch, "start": start, "workers": 1}
        return data.batches(splits.train, args.batch_size, **draw, **world.share)

    def evaluate(model):
        some = itertools.islice(batches(0, 0), RENEWED)
        training.renew_statistics(model, some, lambda m, b: m.encode(b.x, b.t, b.mask))
        metrics = measure_elbo(model, valid, args, world)
        return {f"valid_{name}": metrics[name] for name in ("elbo", "log_likelihood", "kl")}

    begin = partial(start, args, train=splits.train)
    make = partial(build, args, splits.train.dim)
    run = training.begin(args, world, make, begin, steps, INTERVALS)
    model, advice = run.model, "" if args.cuda or args.objective == "matching" else ADVICE
    run.fit(make_loss(args, splits.train), batches, evaluate, best="valid_elbo", advice=advice)
    if world.rank == 0:
        draw_curves(Path(args.out), args)
        draw_samples(Path(args.out), args, model, generator(args, world))
        draw = draw_own_reconstructions if is_own(args) else draw_reconstructions
        draw(Path(args.out), args, model, splits.test, generator(args, world))
    metrics = test_metrics(model, splits.test, args, world)
    show(metrics)
    if world.rank == 0:
        draws = generator(args, world)
        draw_page(Path(args.out) / "view.html", args, model, splits.test, draws, metrics)
    return run.finish(metrics)


# --------------------------------------------------------------------------------------- pictures
def frame(t, trained):
    """The paper's boxes: red between trained times, green beyond, none at them."""
    return {"reconstruction": None, "interpolation": "red"}.get(kind_of(t, trained), "green")


def draw_rows(path, rows, trained, title):
    """Rows (label, times, sets (T, n, d)): of the model, in boxes, if the label is not in grey."""
    middle, limits = window(*(sets for _, _, sets in rows))
    titles = [[f"t = {t:.4g}" for t in times] for _, times, _ in rows]
    grey = [label in ("true", "given") for label, _, _ in rows]
    frames = [[None if g else frame(t, trained) for t in row[1]] for g, row in zip(grey, rows)]
    picture = pictures.point_grid(
        [[as_seen(x, middle) for x in sets] for _, _, sets in rows],
        titles=titles[0] if all(t == titles[0] for t in titles) else titles,
        row_labels=[label for label, _, _ in rows],
        frames=frames,
        title=title,
        colours=["grey" if g else "blue" for g in grey],
        limits=limits,
    )
    pictures.write_png(path, picture)


def draw_moving(path, x, times, trained, title, across=6):
    """An animation of series x (B, T, n, d): a frame for each time."""
    (middle, limits), images = window(x), []
    for k, t in enumerate(times):
        sets = [as_seen(series[k], middle) for series in x]
        rows = [sets[i : i + across] for i in range(0, len(x), across)]
        frames = [[frame(t, trained)] * len(row) for row in rows]
        head = f"{title}, t = {t:.2f}"
        images.append(pictures.point_grid(rows, frames=frames, title=head, limits=limits))
    pictures.write_apng(path, images, [0.1] * (len(images) - 1) + [1.0])


def draw_curves(out, args):
    """curves.png: ELBO, KL and loss, one above the other."""
    line, objective = partial(training.curve, out), args.objective
    units = "the units of the file" if is_own(args) else "pixels"
    held = {"ELBO": line("valid_elbo"), "log-likelihood": line("valid_log_likelihood")}
    panels = [(held, "nats per point", f"held-out series, in {units}")]
    panels += [({"KL": line("valid_kl")}, "nats per series", "held-out series")]
    panels += [({"loss": line("loss")}, objective, f"training by --objective {objective}")]
    images = [pictures.curves(s, "step", y, title, size=(720, 260)) for s, y, title in panels]
    pictures.write_png(out / "curves.png", np.concatenate(images))


def draw_samples(out, args, model, draws):
    """samples.png and moving.png: series from the prior."""
    if is_own(args):
        at, title = usual_times(out), "samples"
        trained = fine = np.unique(np.linspace(at[0], at[-1], 29).round(9)).tolist()
    else:
        trained, at = args.times, test_times(args.times)
        title = "samples; red: between trained times, green: beyond"
        fine = np.linspace(trained[0], trained[-1] + 0.5, 31).round(9).tolist()
    x = draw_series(args, model, out, 6, at, draws)
    rows = [(str(i + 1), at, sets) for i, sets in enumerate(x)]
    draw_rows(out / "samples.png", rows, at if is_own(args) else trained, title)
    x = draw_series(args, model, out, 12, fine, draws)
    draw_moving(out / "moving.png", x, fine, trained, "samples")


def draw_series(args, model, run, count, times, draws):
    """Series from the prior, `(count, T, n, d)`, NaN where there is no point."""
    mask = as_mask(choose_sizes(args, run, count), len(times)).to(draws.device)
    how = {**moving(args, draws), "points": mask.shape[-1], "mask": shown_mask(mask)}
    return with_nan(model.sample(count, times, **how), mask)


@torch.no_grad()
def draw_own_reconstructions(out, args, model, split, draws):
    """reconstructions.png and latent.png of (up to) four of a person's own test series."""
    few = split.some(4)
    batch = next(data.batches(few, len(few), training=False, device=draws.device))
    mask = full_mask(batch)
    z0 = model.encode(batch.x, batch.t, mask).mean
    how = {**moving(args, draws), "points": mask.shape[-1]}
    made = with_nan(model.decode(z0, batch.t, mask=mask, **how), mask)
    truth, t = with_nan(batch.x, mask), batch.t.expand(mask.shape[:2]).tolist()
    rows, known = [], [time for times in t for time in times]
    for i, seen in enumerate(mask.any(-1).cpu().numpy()):
        pick = np.flatnonzero(seen)[spread(seen.sum(), 5)]
        times = [t[i][k] for k in pick]
        rows += [("true", times, truth[i, pick]), ("model", times, made[i, pick])]
    title = "test series, and what the model makes of them"
    draw_rows(out / "reconstructions.png", rows, known, title)
    at = usual_times(out)
    draw_latent(out, model, z0, at, known + at, (rows[0], rows[-2]), how)


def draw_latent(out, model, z0, at, trained, ends, how):
    """latent.png: z₀ on a line between those of two series, whose rows are `ends`."""
    share = torch.linspace(0, 1, 6, device=z0.device)[:, None]
    x = model.decode(torch.lerp(z0[:1], z0[-1:], share), at, **how).cpu().numpy()
    rows = [(f"{a:.1f}", at, sets) for a, sets in zip(share[:, 0].tolist(), x)]
    title = "z0 on the line between those of two test series"
    draw_rows(out / "latent.png", [ends[0], *rows, ends[1]], trained, title)


@torch.no_grad()
def draw_reconstructions(out, args, model, split, draws):
    """reconstructions.png and latent.png: of the first test series of (up to) four classes."""
    trained, at = args.times, test_times(args.times)
    _, first = np.unique(split.labels[split.index], return_index=True)
    first = first if len(first) > 1 else np.arange(len(split))
    truth = at_times(split, at).draw(first[spread(len(first), 4)])[0]
    x = torch.from_numpy(truth[:, [at.index(t) for t in trained]]).to(draws.device)
    z0 = model.encode(x, trained).mean
    x = model.decode(z0, at, **moving(args, draws)).cpu().numpy()
    pairs = [(("true", at, a), ("model", at, b)) for a, b in zip(truth, x)]
    title = "test series, and what the model makes of their sets at times without a box"
    draw_rows(out / "reconstructions.png", [row for pair in pairs for row in pair], trained, title)
    ends = [("true", at, truth[k]) for k in (0, -1)]
    draw_latent(out, model, z0, at, trained, ends, moving(args, draws))


@torch.no_grad()
def draw_page(path, args, model, split, draws, test):
    """Test series, what the model makes of them at any time, and samples, as a page."""
    few, run = split.some(4), args.load or args.out
    if is_own(args):
        batch = next(data.batches(few, len(few), training=False, device=draws.device))
        z0, true = model.encode(batch.x, batch.t, batch.mask).mean, observed_series(batch)
        known, points = usual_times(run), batch.x.shape[-2]
        trained = at = np.unique(np.linspace(known[0], known[-1], 29).round(9)).tolist()
    else:
        trained, points = args.times, args.points
        at = np.linspace(trained[0], trained[-1] + 0.5, 31).round(9).tolist()
        x, truth = (at_times(few, t).draw(np.arange(len(few)))[0] for t in (trained, at))
        z0, true = model.encode(x, trained).mean, [(at, series) for series in truth]
    made = model.decode(z0, at, **moving(args, draws) | {"points": points}).cpu().numpy()
    rows = [(k, "true", *series) for k, series in enumerate(true, 1)]
    rows += [(k, "model", at, sets) for k, sets in enumerate(made, 1)]
    samples = draw_series(args, model, run, 8, at, draws)
    rows += [(k, "sample", at, sets) for k, sets in enumerate(samples, 1)]
    title = f"{Path(args.out).name}: test series of {args.data}, and what the model makes of them"
    pages.series_page(path, rows, trained, run=run, test=test, title=title)


# --------------------------------------------------------------------------------- finished runs
def restore(args):
    """The best model of --load, and where it is."""
    world, model = training.connect(args), load_model("--load", args.load, exnode.TemporalSetVAE)
    return world, model.to(world.device)


def check_output_memory(args, world, series, points, given=0):
    """For `series` of output with so many points a set, while `given` points are encoded."""
    whole = 6 * series * len(args.times) * points  # the output, while it is made
    check_memory(args, world, points, 1, 8 * max(args.hidden), whole + 2048 * given)
    training.make_folder(args.out)


def trained_times(args):
    """Times without a box in pictures: --times of the run, or all in the range of own series."""
    if before := training.read_config(args.load).get("times"):
        return before
    known = usual_times(args.load)
    first, last = known[0], known[-1]
    return sorted({first, last} | {t for t in args.times if first <= t <= last})


def write_series(args, name, x, rows, trained, title):
    """Series x, NaN where there is no point, as NAME.npy, .npz, .png and -moving.png in --out."""
    name = Path(args.out) / name
    write_whole(f"{name}.npy", lambda f: np.save(f, x))
    there = ~np.isnan(x).any(-1)
    arrays = {"x": np.nan_to_num(x), "mask": there, "time": np.array(args.times)}
    if x.ndim == 4:  # as --data and --reconstruct read it
        write_whole(f"{name}.npz", lambda f: np.savez(f, **arrays))
    draw_rows(f"{name}.png", rows, trained, title)
    moving, pick = x if x.ndim == 4 else x[None], spread(len(args.times), 200)
    times = [args.times[k] for k in pick]
    draw_moving(f"{name}-moving.png", moving[:24, pick], times, trained, title)
    training.say(f"{name}.npy {x.shape}, {name}.png and {name}-moving.png")
    given = [(k, *row) for k, row in enumerate((row for row in rows if row[0] == "given"), 1)]
    kind, shown = "model" if given else "sample", moving[:24, pick]
    made = [(k, kind, times, sets) for k, sets in enumerate(shown, 1)]
    pages.series_page(f"{name}.html", given + made, trained, run=args.load, title=title)
    return {"sets": x, "times": args.times, "file": f"{name}.npy"}


def sample(args):
    """--sample: K series from the prior, at --times."""
    world, model = restore(args)
    check_output_memory(args, world, args.sample, int(known_sizes(args, args.load)[0].max()))
    x = draw_series(args, model, args.load, args.sample, args.times, generator(args, world))
    pick = spread(len(args.times))
    at = [args.times[k] for k in pick]
    rows = [(str(i + 1), at, sets[pick]) for i, sets in enumerate(x[:10])]
    name = f"samples-{args.sample}x{x.shape[2]}-seed{args.seed}"
    return write_series(args, name, x, rows, trained_times(args), "samples")


def reconstruct(args):
    """--reconstruct: a person's own series, as the model sees them, at --times."""
    world, model = restore(args)
    one = False
    if Path(args.reconstruct).suffix == ".npy":
        x, one = read_series(args.reconstruct, model.dim)
        made, given, at = reconstruct_array(args, world, model, x)
    else:
        made, given, at = reconstruct_file(args, world, model)
    rows, pick = [], spread(len(args.times))
    for (times, series), sets in zip(given, made):
        some = spread(len(times))
        rows.append(("given", [times[k] for k in some], series[some]))
        rows.append(("model", [args.times[k] for k in pick], sets[pick]))
    name = f"{Path(args.reconstruct).stem}-reconstructed"
    title = "given series, and what the model makes of it"
    return write_series(args, name, made[0] if one else made, rows, at, title)


def reconstruct_array(args, world, model, x):
    """Series x (B, T, n, d) at --at, made anew at --times; the first five; times without a box."""
    at = args.at or np.linspace(0, 1, x.shape[1]).round(9).tolist()
    if len(at) != x.shape[1]:
        raise training.UsageError(f"--at has {len(at)} times for the {x.shape[1]} sets of a series")
    points = args.points or x.shape[2]
    few = max(1, exnode.PIECE // x[0, ..., 0].size)  # series that are encoded at once
    check_output_memory(args, world, len(x), points, x[:few, ..., 0].size)
    made, draws = [], generator(args, world)
    for part in training.watch("series", torch.from_numpy(x).split(few)):
        there, part = ~part.isnan().any(-1), part.nan_to_num().to(world.device)
        how = {"mask": there.to(world.device), **moving(args, draws), "points": points}
        made.append(model.reconstruct(part, at, args.times, **how).cpu())
    return torch.cat(made).numpy(), [(at, series) for series in x[:5]], at


@torch.no_grad()
def reconstruct_file(args, world, model):
    """Series of a file made anew at --times; its first five; times without a box."""
    split = data.load_all(args.reconstruct, args.data, **options.own_data(args))
    if split.times is None or split.dim != model.dim:
        got = f"{split.dim}-D sets" + ("" if split.times is not None else " without times")
        want = f"want series of {model.dim}-D sets"
        raise training.UsageError(f"--reconstruct {args.reconstruct}: {got}: {want}")
    check_times(args.reconstruct, split.times)
    sizes = np.full(len(split), args.points) if args.points else split.sizes
    points, each = int(sizes.max()), split.times.shape[-1] * int(split.sizes.max())
    few = max(1, exnode.PIECE // each)  # series that are encoded at once
    check_output_memory(args, world, len(split), points, few * each)
    made = np.full((len(split), len(args.times), points, model.dim), np.nan, np.float32)
    given, draws, where = {}, generator(args, world), np.arange(len(split))
    parts = np.split(where, range(few, len(split), few))
    for batch, part in zip(data.batches(split, few, training=False, device=world.device), parts):
        z0 = model.encode(batch.x, batch.t, batch.mask).mean
        mask = as_mask(sizes[part], len(args.times)).to(world.device)
        how = {**moving(args, draws), "points": mask.shape[-1], "mask": shown_mask(mask)}
        rows = split.index[part]  # as in the file
        made[rows, :, : mask.shape[-1]] = with_nan(model.decode(z0, args.times, **how), mask)
        given |= {i: series for i, series in zip(rows, observed_series(batch)) if i < 5}
    return made, [given[i] for i in sorted(given)], trained_times(args)


def read_series(path, dim):
    """Series (B, T, n, d) in a file, NaN where there is no point; and whether axis B was added."""

    def wrong(why):
        return training.UsageError(f"--reconstruct {path}: {why}")

    if not Path(path).is_file():
        raise wrong("no such file")
    try:
        x = np.load(path, allow_pickle=False)
    except Exception as e:  # whatever numpy raises for a stranger's header
        raise wrong(str(e).partition("\n")[0] or "empty") from None
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiu":
        raise wrong("not one array of numbers")
    if x.ndim not in (3, 4) or x.shape[-1] != dim or not x.size:
        raise wrong(f"shape {x.shape}, not (T, n, {dim}) or (B, T, n, {dim})")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    odd = np.isinf(x).any(-1) | (np.isnan(x).any(-1) != np.isnan(x).all(-1))
    if odd.any():
        raise wrong(f"point {np.argwhere(odd)[0].tolist()} is infinite, or partly NaN")
    if (empty := np.isnan(x).all((-2, -1))).any():
        raise wrong(f"set {np.argwhere(empty)[0].tolist()} has no points")
    return (x[None] if x.ndim == 3 else x), x.ndim == 3


def evaluate_only(args):
    world, model = restore(args)
    test = load_series(args).test
    if test.dim != model.dim:
        raise training.UsageError(f"--load {args.load}: a model of {model.dim}-D, not {test.dim}-D")
    check_memory(args, world, test.points, 1, 8 * max(args.hidden))
    training.make_folder(args.out)
    found = test_metrics(model, test, args, world)
    show(found)
    if world.rank == 0:
        path, draws = Path(args.out) / "evaluation.html", generator(args, world)
        draw_page(path, args, model, test, draws, found)
    return training.write_evaluation(found, args, world)


def main(argv=None):
    """The results, also printed: of a run, or of what is made from one."""
    args = parse(argv)
    if args.recipe:
        return [main(words) for words in args.recipe][-1]
    if args.sample:
        return sample(args)
    if args.reconstruct is not None:
        return reconstruct(args)
    if args.evaluate:
        return evaluate_only(args)
    return training.several(args, train, "elbo") if args.runs > 1 else train(args)


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
