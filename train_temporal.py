"""Sets that move in time, Sec. 3.4 and 4.4 of the paper: a VAE over rotating digits.

    python train_temporal.py                               built-in digits, no download
    python train_temporal.py --data mnist --cuda           the paper's recipe
    python train_temporal.py --data mnist --objective matching --prior flow --minutes 30
    python train_temporal.py --finetune runs/temporal --objective matching --kl 0.01 --out runs/two
    python train_temporal.py --fit-prior runs/temporal
    python train_temporal.py --load runs/temporal --prior flow --sample 6 --times 0:1.5:0.05
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
    Eq. 12, 13, sampling at any time       --sample, --reconstruct: support/series_runs.py
    Fig. 5 to 8, pictures of a run         support/series_pictures.py

x is `(B, T, n, d)`: B series of T sets; t is `(T,)`, or `(B, T)` for series with their own times;
mask is `(B, T, n)`, True where a point exists, all False for a set that was not observed.

Departures from the paper
- Weights are selected by the ELBO of held-out series; the test series are read once, at the end.
  Both ELBOs use exact traces (a transformer's, Hutchinson's unbiased one), and at most
  --valid-series and --test-series evenly spaced series: a CPU needs up to a second for each.
  `tolerance_error` beside a test's ELBO is by how many nats per point a series is off at the
  solver's tolerance: the most among CHECKED_SERIES, solved at a hundredth of it.
- `--prior flow` replaces the paper's N(0, I) by a flow that is fitted to posteriors of training
  series once the VAE is trained (beyond/prior.py). Weights are still selected with N(0, I).
- The paper shows pictures only. We measure, too (support/series_scores.py): Chamfer distances of
  reconstructions at trained times, between and beyond them, to an independent draw of the true set
  there. Rivals: a copy of the true set at the nearest trained time, and, as the floor, one more
  draw of the true set. Samples are scored against test sets at each given time; of digits, also by
  how far a series, turned back, is from its first set, beside real series. With `--classifier`, a
  run of `train_cls.py --data mnist`: whether reconstructions, turned back, are read as the sets
  that were given, and how many series of samples have one label at all times, beside real ones.
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
  nearest other set that is seen. There is no second draw of a set, so no floor. Samples are scored
  if all series have the same times.
- "Halved every 50 epochs" is "after half the run", so that any budget has all of it.
"""

import itertools
import sys
from functools import partial
from pathlib import Path

import torch

import data
import exnode
from beyond import prior
from beyond.matching import COUPLINGS, Moments, temporal_matching_loss
from beyond.transformer import deepen
from solvers import SolverError
from support import models, options, series, series_pictures, series_runs, series_scores, training
from support.series import count_points, generator, is_own

UNIT_SERIES = 500  # training series that give a decoder its units
INTERVALS = 2  # of the run, each with half the learning rate of the one before
HIDDEN = {"concatsquash": [512] * 3, "attention": [128] * 3, "transformer": [128] * 4}
CHECKED_SERIES = 8  # test series that are solved once more, at a hundredth of the tolerance
PRIOR_SERIES = 20_000  # training series that a prior is fitted to, at most
RENEWED = 20  # batches that batch normalisation's statistics are computed from anew
ADVICE = "on a CPU, --objective matching trains the decoder without a solver"
UNITS = "nats per point, in pixels: log p / n on half a canvas − 2 ln 14; kl in nats per series"
OWN_UNITS = "nats per point, in the units of the file; kl in nats per series"
MODEL_OPTIONS = (
    "data", "columns", "skip_bad", "noise", "category", "points", "times", "decoder", "hidden",
    "latent", "seed",
)  # fmt: skip
TRAINING = (  # options without a meaning for a finished run
    "objective", "kl", "coupling", "pieces", "match_times", "moments", "gradient", "valid_series",
    "finetune",
)  # fmt: skip


# --------------------------------------------------------------------------------------- options
def parse(argv=None):
    usual = {"epochs": 100, "batch_size": 128, "every": 800}
    parser = options.shared("Model sets over time.", "temporal", **usual)
    number = options.number
    add = parser.group("data")
    help = "Trained times, or with --load those of the output: a list or start:stop:step; if not"
    help += " given, 0,0.25,0.5,0.75,1. Your own series have theirs in the file."
    add("--times", type=series.times, help=help)
    help = "Number of points in each set; if not given, 64, or all those of your own series."
    add("--points", type=number(int, 1, below=10**10), help=help)
    add("--category", help='Digits or labels to read, such as "1,7"; if not given, all.')
    help = "Largest number of held-out series in an evaluation."
    add("--valid-series", type=number(int, 1), default=256, help=help)
    help = "Largest number of series in the test."
    add("--test-series", type=number(int, 1), default=1000, help=help)
    help = "Leave out the first K test series, which earlier tests have read."
    add("--after", type=number(int, 0, below=10**9), default=0, metavar="K", help=help)
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
    help += " More layers of a transformer begin as the identity."
    add("--finetune", type=options.path, metavar="RUN", help=help)
    help = "Prior of z: normal, the paper's, or a flow that is fitted after training; if not given,"
    help += " that of the run, or normal."
    add("--prior", choices=("normal", "flow"), help=help)
    help = "Factor of the posterior's deviations with a prior that is fitted; if not given, 1."
    add("--width", type=number(float, 0.01, below=100), help=help)
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
    help = "Fit a prior to the training series of a finished RUN, for --prior flow with --load RUN."
    add("--fit-prior", type=options.path, metavar="RUN", help=help)
    add("--evaluate", action="store_true", help="Only test the best weights of --load RUN.")
    add("--sample", type=number(int, 1), metavar="K", help="Draw K series from --load RUN.")
    help = "Reconstruct your series: a file as for --data, with times, or a .npy file of (T, n, d)"
    help += " or (B, T, n, d), NaN for a point that is not there. Digits are centred, in units of"
    help += " half a canvas, y up."
    add("--reconstruct", type=options.path, metavar="FILE", help=help)
    help = "Times of the sets in a .npy file; if not given, evenly spaced from 0 to 1."
    add("--at", type=series.times, help=help)
    args = parser.parse_args(argv)
    if args.recipe is not None:
        return options.repeat(parser, args, argv)
    finished = args.load or args.fit_prior
    if args.finetune and finished:
        parser.error("--finetune trains: leave out --load and --fit-prior")
    if args.load and args.fit_prior:
        parser.error("--fit-prior RUN names its run: leave out --load")
    if options.goes_on(args) and not finished:
        args = options.parse_as_in(args.out, parser, argv)
    elif args.finetune:
        hidden, args = args.hidden, options.parse_as_in(args.finetune, parser, argv, MODEL_OPTIONS)
        if args.decoder != parser.get_default("decoder"):  # that of the run
            args.hidden = hidden
    if finished:
        args = options.parse_finished(finished, parser, argv, TRAINING)
        args.load = finished
        names = ("decoder", "hidden", "latent")
        options.refuse(parser, args, names, "is not that of the model in --load RUN")
    args.hidden = args.hidden or HIDDEN[args.decoder]
    args.gradient = args.gradient or {"elbo": "adjoint", "matching": "backprop"}[args.objective]
    return check(parser, args)


def check(parser, args):
    """The options, if they go together."""
    tasks = [args.evaluate, args.sample, args.reconstruct, args.fit_prior]
    if sum(task not in (None, False) for task in tasks) != bool(args.load):
        parser.error("--load RUN goes with one of --evaluate, --sample and --reconstruct")
    if args.at and Path(args.reconstruct or "").suffix != ".npy":
        parser.error("--at gives the times of --reconstruct FILE.npy; other files have their own")
    if args.fit_prior:
        names = ("points", "times", "category", "seed", "prior", "trace")
        names += ("test_series", "after", "out")
        options.refuse(parser, args, names, "is that of the run: leave it out")
    if args.reconstruct is not None:
        options.refuse(parser, args, ("prior",), "is for samples and the ELBO")
    if not args.fit_prior and (args.load or args.prior != "flow"):
        options.refuse(parser, args, ("width",), "is for a prior that is fitted: --prior flow")
    if args.sample or args.reconstruct is not None:
        names = ("data", "category", "batch_size", "test_series", "after", "classifier", "noise")
        options.refuse(parser, args, names, "is for the test series, which nothing reads here")
        args.times = args.times or series.usual_times(args.load)
    elif is_own(args):
        names, why = ("times", "classifier"), "is for turning digits: own series have their times"
        options.refuse(parser, args, names, why)
        args.times = args.classifier = None
    else:
        args.times, args.points = args.times or series.TIMES, args.points or series.POINTS
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
def load_series(args):
    kind = {"task": "temporal", "category": args.category, "points": args.points}
    kind |= {"seed": args.seed, "times": args.times or series.TIMES, **options.own_data(args)}
    splits = data.load(args.data, args.root, **kind)
    series.check_times(args.data, splits.train.source.times)
    if args.after >= len(splits.test):
        raise training.UsageError(f"--after {args.after}: of {len(splits.test)} test series")
    return splits


def check_own(args, split):
    """An error where options do not fit a person's own training series."""
    if args.match_times > (most := split.times.shape[-1]):
        raise training.UsageError(f"--match-times {args.match_times}: series have up to {most}")
    for batch in data.batches(split, args.batch_size, training=False) if args.pieces else ():
        if batch.mask is not None or args.pieces > batch.x.shape[-2]:
            why = f"sets must all have as many points, at least {args.pieces}"
            raise training.UsageError(f"--pieces {args.pieces}: {why}: give --points")


def build(args, dim):
    try:
        model = models.build(vars(args), dim)
    except ValueError as e:  # widths that the heads of attention do not divide
        raise training.UsageError(f"--hidden: {e}") from None
    if args.moments and not args.load:
        model.moments = Moments(args.latent, dim=dim)
    return model


def check_training_memory(args, world, split):
    """What the encoder and one evaluation of the decoder hold; backpropagation holds about 30."""
    sets = min(args.batch_size, len(split)) // world.size * split.times.shape[-1]
    decoder = sum(args.hidden)
    if args.objective == "elbo":
        decoder *= (1 + split.dim) * (30 if args.gradient == "backprop" else 1)  # with tangents
    weights = (args.latent + max(args.hidden)) * (1024 + 3 * sum(args.hidden))
    peak = (split.points, sets, 4 * (1024 + decoder), 4 * weights)
    series_runs.check_memory(args, world, *peak)


# --------------------------------------------------------------------------------------- measures
def test_trace(args):
    """The exact trace, or --trace for a transformer, which has no shortcut to it."""
    return args.trace if args.decoder == "transformer" else "exact"


@torch.no_grad()
def measure_elbo(model, split, args, world):
    """The mean ELBO of a split's series and its parts, as UNITS says."""
    total = torch.zeros(4, dtype=torch.float64, device=world.device)
    how = {"generator": generator(args, world), "trace": test_trace(args)}
    for batch in series.shared_batches(split, args, world, "ELBO"):
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


def load_classifier(args):
    """The classifier of still digits in --classifier, or None."""
    if not args.classifier:
        return None
    kind = exnode.SetClassifier, "a SetClassifier"
    model = training.load_model("--classifier", args.classifier, exnode.load, *kind)
    if (found := (model.in_dim, model.head[-1].out_features)) != (2, 10):
        fault = "{}-D sets in {} classes, not 2-D digits in 10".format(*found)
        raise training.UsageError(f"--classifier {args.classifier}: {fault}")
    return model


def test_metrics(model, split, args, world):
    """ELBO; Chamfer distances of reconstructions at each time and by kind of time; samples."""
    classifier, split = load_classifier(args), split.some(args.test_series, args.after)
    metrics = measure_elbo(model, split, args, world)
    metrics["tolerance_error"] = tolerance_error(model, split, args, world)
    metrics |= {"tolerance": {k: model.solver[k] for k in ("rtol", "atol")}, "series": len(split)}
    metrics |= {"prior": args.prior or "normal", "units": OWN_UNITS if is_own(args) else UNITS}
    if classifier:
        classifier.to(world.device)
        found = series_scores.recognition(model, classifier, split, args, world)
        metrics["recognised"] = found
    if is_own(args):
        metrics["chamfer"] = series_scores.own_distances(model, split, args, world)
    else:
        rows = series_scores.distances_at_times(model, split, args, world)
        metrics |= {"chamfer": series_scores.mean_by_kind(rows), "at_times": rows}
    if scores := series_scores.score_samples(model, split, args, world, classifier):
        metrics["samples"] = scores
    return metrics


# --------------------------------------------------------------------------------------- training
def make_loss(args, split):
    """The objective: −ELBO as in UNITS, or the matching error, that of the moments, and the KL."""

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
        known, transformer = before["hidden"], args.decoder == "transformer"
        longer = transformer and args.hidden[: len(known)] == known  # or as long
        fresh = before["decoder"] != args.decoder or not (longer or args.hidden == known)
        new = ["decoder."] if fresh else ["decoder." + n for n in deepen(model.decoder, len(known))]
        if bool(before.get("moments")) != bool(args.moments):
            new.append("moments.")
        training.load_best(model, args.finetune, new)
    if fresh and (args.objective == "matching" or is_own(args)):
        batch = train.batch(UNIT_SERIES)
        x = batch.x if batch.mask is None else batch.x[batch.mask]
        try:
            model.decoder.standardise(x.to(model.decoder.mean.device))
        except ValueError as e:
            raise training.UsageError(f"--data {args.data}: {e}") from None
        if is_own(args) and not args.finetune:
            models.start_in_units(model.points[0], x)


def train(args, world):
    """One run: train, select, test, draw; the contents of its results.json."""
    load_classifier(args)  # a mistake shows before training
    splits = load_series(args)
    check_training_memory(args, world, splits.train)
    if is_own(args):
        check_own(args, splits.train)
    if world.rank == 0:
        training.write_sets(args.out, splits.train)
    valid, steps = splits.valid.some(args.valid_series), data.steps(splits.train, args.batch_size)

    batches = data.epochs(splits.train, args.batch_size, args.seed, **world.share)

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
    if args.prior == "flow":
        fit_prior(args, model, splits, world)
    if world.rank == 0:
        series_pictures.draw_run(args, model, splits.test, generator(args, world))
    metrics = test_metrics(model, splits.test, args, world)
    series_scores.show(metrics)
    if world.rank == 0:
        draws = generator(args, world)
        page = Path(args.out) / "view.html"
        series_pictures.draw_page(page, args, model, splits.test, draws, metrics)
    return run.finish(metrics)


def fit_prior(args, model, splits, world):
    """Give the model a prior that is fitted to its posteriors: prior.pt in --out."""
    if world.rank == 0:
        found = []
        for split, most in ((splits.train, PRIOR_SERIES), (splits.valid, PRIOR_SERIES // 10)):
            some = split.some(most)
            batches = data.batches(some, args.batch_size, training=False, device=world.device)
            total = data.steps(some, args.batch_size, training=False)
            mean, std = prior.posteriors(model, training.watch("encoding", batches, total))
            found.append(exnode.Posterior(mean, std * (args.width or 1)))
        flow = prior.fit(*found, args.seed, partial(training.watch, "prior"))
        state = prior.as_state(flow, model, args.width or 1)
        training.write_checkpoint(Path(args.out) / "prior.pt", state)
    world.wait()
    models.attach_prior(args.out, model)


# --------------------------------------------------------------------------------- finished runs
def fit_prior_only(args):
    world, model = series_runs.restore(args)
    splits = load_series(args)
    check_dim(args, splits.test, model)
    fit_prior(args, model, splits, world)
    training.say(f"{Path(args.out) / 'prior.pt'} is for --load {args.load} --prior flow")
    return model


def evaluate_only(args):
    world, model = series_runs.restore(args)
    test = load_series(args).test
    check_dim(args, test, model)
    series_runs.check_memory(args, world, test.points, 1, 8 * max(args.hidden))
    training.make_folder(args.out)
    found = test_metrics(model, test, args, world)
    series_scores.show(found)
    if world.rank == 0:
        page, draws = Path(args.out) / "evaluation.html", generator(args, world)
        series_pictures.draw_page(page, args, model, test, draws, found)
    return training.write_evaluation(found, args, world)


def check_dim(args, split, model):
    if split.dim != model.dim:
        got = f"a model of {model.dim}-D, not {split.dim}-D"
        raise training.UsageError(f"--load {args.load}: {got}")


def main(argv=None):
    """The results, also printed: of a run, or of what is made from one."""
    args = parse(argv)
    if args.recipe:
        return [main(words) for words in args.recipe][-1]
    if args.fit_prior:
        return fit_prior_only(args)
    if args.sample:
        return series_runs.sample(args)
    if args.reconstruct is not None:
        return series_runs.reconstruct(args)
    if args.evaluate:
        return evaluate_only(args)
    return training.in_directory(args, train, "elbo")


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
