"""Sets that move in time, Sec. 3.4 and 4.4 of the paper: a VAE over rotating digits.

    python train_temporal.py                               built-in digits, no download
    python train_temporal.py --data mnist --cuda           the paper's recipe
    python train_temporal.py --data mnist --objective matching --minutes 30
    python train_temporal.py --finetune runs/temporal --objective matching --kl 0.01 --out runs/two
    python train_temporal.py --load runs/temporal --sample 6 --times 0:1.5:0.05 --points 500
    python train_temporal.py --load runs/temporal --reconstruct mine.npy --at 0,0.3,0.55,1
    python train_temporal.py --load runs/temporal --evaluate --classifier runs/digits

    Sec. 4.4, five fixed times             --times; --random-times for other grids
    App. C.3, recipe: 64 points, latent
    128, dopri5 at 1e-3 and 1e-4, Adam
    1e-3, batches of 128; authors' code:
    halved every 50 of 100 epochs          the defaults; INTERVALS
    Eq. 11, ELBO                           measure_elbo; --objective elbo
    Eq. 12, 13, sampling at any time       decode
    Fig. 5, 6, samples, red and green      samples.png, moving.png; frame
    Fig. 7, conditional samples            reconstructions.png
    Fig. 8, interpolation of z₀            latent.png

x is `(B, T, n, 2)`: B series of T sets; t is `(T,)`.

Departures from the paper
- Weights are selected by the ELBO of held-out series; the test series are read once, at the end.
  Both ELBOs use exact traces (a transformer's, Hutchinson's unbiased one), and at most
  --valid-series and --test-series evenly spaced series: a CPU needs up to a second for each.
- The paper shows pictures only. We measure, too: Chamfer distances of reconstructions at trained
  times, between and beyond them, to an independent draw of the true set there. Rivals: a copy of
  the true set at the nearest trained time, and, as the floor, one more draw of the true set.
  And whether a classifier of still digits reads reconstructions, turned back, as it reads the sets
  that were given: `--classifier`, a run of `train_cls.py --data mnist`.
- `--objective matching` regresses the decoder on straight paths, in units of the data's deviation,
  instead of solving it: error per coordinate + --kl · KL / coordinates of a series + --moments ·
  error of the characteristic function that z tells (TemporalSetVAE.moment_error). With noise and
  points paired at random (--coupling none) 2.4 · error is about −log p + const (ln(1 + 1/ε) in
  exnode.schedule), so that 0.42 is the ELBO's own weight. Noise assigned to near points leaves less
  to explain: after 375 steps on the built-in digits (one seed, 32 points) the KL was 19 nats and
  rising with 0.043, 4.5 and falling with 0.22.
- In pictures and files a point keeps its base point y over time (Eq. 13 draws y anew at each time),
  so that it moves continuously; the distribution of the set at each time is the same.
- "Halved every 50 epochs" is "after half the run", so that any budget has all of it.
"""

import argparse
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import data
from exnode import DECODERS, GRADIENTS, TRACES, SetClassifier, TemporalSetVAE, normal
from support import pictures, training
from support.metrics import chamfer

INTERVALS = 2  # of the run, each with half the learning rate of the one before
HIDDEN = {"concatsquash": [512] * 3, "attention": [128] * 3, "transformer": [128] * 4}
DIM, PIECE = 2, 2**15  # of a point; points that are decoded at once
UNITS = "nats per point, in pixels: log p / n on half a canvas − 2 ln 14; kl in nats per series"
FREQUENCIES = 96  # of the moments
MODEL_OPTIONS = ("data", "category", "points", "times", "decoder", "hidden", "latent", "seed")
TRAINING = (  # options without a meaning for a finished run
    "objective", "random_times", "kl", "coupling", "pieces", "match_times", "moments", "gradient",
    "valid_series", "finetune",
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
    if not values or not np.isfinite(values).all() or (np.diff(np.float32(values)) <= 0).any():
        raise argparse.ArgumentTypeError(f"{text!r}: times must be finite and increase")
    return values


def parse(argv=None):
    usual = {"epochs": 100, "batch_size": 128, "every": 800}
    parser = training.options("Model sets over time.", "temporal", **usual)
    add, number = parser.add_argument, training.number
    help = "matching trains the decoder without a solver"
    add("--objective", choices=("elbo", "matching"), default="elbo", help=help)
    help = "start from the best weights of a RUN, whose data and model options are the defaults;"
    help += " with another --decoder or --hidden, from those of the encoder and the latent ODE"
    add("--finetune", metavar="RUN", help=help)
    add("--decoder", choices=DECODERS, default="concatsquash", help="field of the decoder's flow")
    help = "trained times, or of the output of --load: a list or start:stop:step"
    add("--times", type=times, default="0,0.25,0.5,0.75,1", help=help)
    help = "train each batch at so many random times within --times; 0: at --times"
    add("--random-times", type=number(int, 0), default=0, metavar="K", help=help)
    add("--points", type=number(int, 1), default=64, help="in each set")
    add("--category", help='digits, such as "1,7"; None: all')
    add("--latent", type=number(int, 1), default=128, help="numbers in z")
    help = "widths of the decoder; None: 512,512,512, or three of 128, for a transformer four"
    add("--hidden", type=training.widths, metavar="W,W,…", help=help)
    help = "weight of the KL in matching; with --coupling none, 0.42 is the ELBO's own"
    add("--kl", type=number(float, 0), default=0.05, help=help)
    choices = ("swaps", "none")
    add("--coupling", choices=choices, default="swaps", help="of noise to points, for matching")
    help = "also match pieces of so many points by themselves, so that z matters; 0: whole sets"
    add("--pieces", type=number(int, 0), default=0, metavar="K", help=help)
    help = "match at so many of a batch's times, by chance, for larger batches; 0: at all of them"
    add("--match-times", type=number(int, 0), default=0, metavar="K", help=help)
    help = "weight of telling each set's mean cos and sin of ω·x from z, for matching: the encoder"
    help += " learns much sooner; 20 is a start"
    add("--moments", type=number(float, 0), default=0.0, help=help)
    help = "of a solve; None: adjoint for elbo, backprop for matching, where only z is solved"
    add("--gradient", choices=GRADIENTS, help=help)
    help = "of the ELBO in training; in a test too with a transformer, else that is exact"
    add("--trace", choices=TRACES, default="hutchinson", help=help)
    add("--valid-series", type=number(int, 1), default=256, help="at most, per validation")
    add("--test-series", type=number(int, 1), default=1000, help="at most, in the test")
    help = "a run of train_cls.py on upright digits: does it recognise reconstructions?"
    add("--classifier", metavar="RUN", help=help)
    add("--load", metavar="RUN", help="a run directory; its options are the defaults")
    add("--evaluate", action="store_true", help="only test the best weights of --load")
    add("--sample", type=number(int, 1), metavar="K", help="draw K series from --load")
    help = "your series (T, n, 2) or (B, T, n, 2), centred, half a canvas 1, y up; NaN: no point"
    add("--reconstruct", metavar="FILE.npy", help=help)
    help = "times of the sets in --reconstruct; None: evenly spaced from 0 to 1"
    add("--at", type=times, help=help)
    args = parser.parse_args(argv)
    if args.finetune:
        if args.load:
            parser.error("--finetune trains: leave out --load")
        hidden, args = args.hidden, training.parse_as_in(args.finetune, parser, argv, MODEL_OPTIONS)
        if args.decoder != parser.get_default("decoder"):  # that of the run
            args.hidden = hidden
    if args.load:
        args = training.parse_finished(args.load, parser, argv, TRAINING)
    args.hidden = args.hidden or HIDDEN[args.decoder]
    args.gradient = args.gradient or {"elbo": "adjoint", "matching": "backprop"}[args.objective]
    return check(parser, args)


def check(parser, args):
    """The options, if they go together."""
    tasks = [args.evaluate, args.sample is not None, args.reconstruct is not None]
    if sum(tasks) != bool(args.load):
        parser.error("--load RUN goes with one of --evaluate, --sample and --reconstruct")
    if args.at and args.reconstruct is None:
        parser.error("--at gives the times of --reconstruct")
    if args.sample or args.reconstruct:
        names = ("data", "category", "batch_size", "test_series", "classifier")
        training.refuse(parser, args, names, "is for the test series, which nothing reads here")
    if args.objective == "elbo":
        names = ("kl", "coupling", "pieces", "match_times", "moments")
        training.refuse(parser, args, names, "is for --objective matching")
    if args.trace != parser.get_default("trace") and not reads_trace(args):
        parser.error("--trace: without --objective elbo or a transformer, nothing would read it")
    if args.pieces > args.points and not args.load:
        parser.error(f"argument --pieces: {args.pieces} of sets of {args.points} points")
    if args.match_times > (args.random_times or len(args.times)) and not args.load:
        parser.error(f"argument --match-times: {args.match_times} is more than there are")
    if args.random_times > 1001:
        parser.error(f"argument --random-times: {args.random_times} is more than 1001")
    if args.random_times and len(args.times) < 2 and not args.load:
        parser.error("--random-times wants a first and a last of --times")
    return args


def reads_trace(args):
    """Whether --trace matters: in training by the ELBO, or where the exact trace is dear."""
    return args.decoder == "transformer" or (args.objective == "elbo" and not args.load)


# ------------------------------------------------------------------------------- series and model
def load_series(args):
    kind = {"task": "temporal", "category": args.category, "points": args.points}
    return data.load(args.data, args.root, seed=args.seed, times=args.times, **kind)


def at_times(split, times):
    """The same series at other times; a time that comes twice has two draws of its set."""
    return replace(split, source=replace(split.source, times=np.array(times, np.float64)))


def spread(count, most=11):
    """At most so many of `count` positions, evenly spaced, the first and last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def random_times(args, epoch, step):
    """Of 1001 times from the first to the last of --times, K different ones, increasing."""
    rng = np.random.default_rng((args.seed, epoch, step))
    pick = np.sort(rng.choice(1001, args.random_times, replace=False))
    return args.times[0] + pick / 1000 * (args.times[-1] - args.times[0])


def build(args):
    kind = {"gradient": args.gradient, "trace": args.trace}
    kind["frequencies"] = FREQUENCIES if args.moments else 0
    try:
        return TemporalSetVAE(DIM, args.latent, args.decoder, args.hidden, **kind)
    except ValueError as e:  # widths that the heads of attention do not divide
        raise training.UsageError(f"--hidden: {e}") from None


def check_memory(args, world, sets, each, whole=0):
    """About what `sets` take at once, with `each` numbers a point, and a whole output."""
    pairs = 8 * args.points if args.decoder != "concatsquash" else 0
    need = 4 * (whole + sets * args.points * (each + pairs))
    training.check_memory(need, world, f"--points {args.points} with the other options")


def check_training_memory(args, world):
    """What the encoder and one evaluation of the decoder hold; backpropagation holds about 30."""
    sets = args.batch_size // world.size * (args.random_times or len(args.times))
    decoder = sum(args.hidden)
    if args.objective == "elbo":
        decoder *= (1 + DIM) * (30 if args.gradient == "backprop" else 1)  # values and tangents
    check_memory(args, world, sets, 4 * (1024 + decoder))


@torch.no_grad()
def decode(model, z0, times, points, generator):
    """Eq. 12, 13: sets `(B, T, points, d)` at any times; a point has one y for all times."""
    z = model.latents(z0, torch.tensor(times, dtype=torch.float64))  # (B, T, latent)
    y = normal((len(z), 1, points, model.dim), z, generator).expand(-1, len(times), -1, -1)
    sets = max(PIECE // points, 1)  # sets are independent given z
    pieces = zip(y.flatten(0, 1).split(sets), z.flatten(0, 1).split(sets))
    x = torch.cat([model.decoder.decode(y, context=z) for y, z in pieces])
    return x.unflatten(0, (len(z0), len(times)))


def generator(args, world):
    return torch.Generator(world.device).manual_seed(args.seed + 7919 * world.rank)


# --------------------------------------------------------------------------------------- measures
def shared_batches(split, args, world, what):
    """This process's batches of a split, with a line about progress every half minute."""
    batches = data.batches(split, args.batch_size, training=False, workers=1, **world.share)
    return training.watch(what, batches, data.steps(split, args.batch_size, training=False))


@torch.no_grad()
def elbo_parts(model, x, t, generator, trace="exact"):
    """Parts of Eq. 11 per series, log-likelihood and KL, whatever trace training has."""
    before, model.decoder.trace = model.decoder.trace, trace
    try:
        return model.elbo_parts(x, t, generator=generator)
    finally:
        model.decoder.trace = before


def measure_elbo(model, split, args, world):
    """The mean ELBO of a split's series and its parts, as UNITS says."""
    total = torch.zeros(3, dtype=torch.float64, device=world.device)
    draws, points = generator(args, world), len(split.times) * split.points
    trace = args.trace if args.decoder == "transformer" else "exact"
    for batch in shared_batches(split, args, world, "ELBO"):
        parts = elbo_parts(model, batch.x, batch.t, draws, trace)
        log_p, kl = (part.double() for part in parts)
        log_p = log_p / points + split.log_unit
        total += torch.stack([log_p, kl, (log_p - kl / points) ** 2]).sum(1)
    log_p, kl, square = (world.sum(total) / len(split)).tolist()
    elbo = log_p - kl / points
    error = (max(square - elbo**2, 0) / max(len(split) - 1, 1)) ** 0.5
    results = {"elbo": elbo, "log_likelihood": log_p, "kl": kl, "standard_error": error}
    return {**results, "trace": trace}


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
    draws, t = generator(args, world), torch.tensor(trained, dtype=torch.float64)
    three = at_times(split, [*trained, *at, *at])  # what is given, the truth, one more draw of it
    for batch in shared_batches(three, args, world, "reconstruction"):
        x, truth, again = batch.x.split([len(trained), len(at), len(at)], 1)
        made = decode(model, model.encode(x, t).mean, at, args.points, draws)
        for k, rival in enumerate((made, x[:, nearest], again)):
            for i in range(len(at)):  # one by one, for their (B, n, n) distances
                total[k, i] += chamfer(rival[:, i], truth[:, i]).double().sum()
    rows = (world.sum(total) / len(split)).T.tolist()
    names = ("t", "kind", "model", "copy", "floor")
    return [dict(zip(names, (t, kind_of(t, trained), *row))) for t, row in zip(at, rows)]


def read_classifier(run):
    """The best model of a run of train_cls.py on all ten digits."""
    name = training.read_config(run).get("model", "")
    if name not in ("exnode-deepsets", "exnode-attention"):
        raise training.UsageError(f"--classifier {run}: not an exnode model of train_cls.py")
    model = SetClassifier(DIM, 10, field=name.removeprefix("exnode-"))
    training.load_best(model, run)
    return model.eval()


@torch.no_grad()
def measure_recognition(model, classifier, split, args, world):
    """Shares of sets, turned back, that the classifier labels as the given ones, or rightly."""
    total, draws = torch.zeros(3, dtype=torch.float64, device=world.device), generator(args, world)
    back, digits = -np.pi * split.times, torch.tensor([int(name) for name in split.classes])

    def labels(x):  # from units of half a canvas about its centre to the canvas
        x = data.rotate_clockwise(x.cpu().numpy(), back) / 2 + 0.5
        return classifier(torch.from_numpy(x).to(world.device)).argmax(-1)

    for x, _, label, t, _ in shared_batches(split, args, world, "recognition"):
        made = decode(model, model.encode(x, t).mean, args.times, args.points, draws)
        given, made, true = labels(x), labels(made), digits.to(label.device)[label, None]
        pairs = ((made, given), (made, true), (given, true))
        total += torch.stack([(a == b).double().mean(-1).sum() for a, b in pairs])
    names = ("as_given", "right", "given_right")
    return dict(zip(names, (world.sum(total) / len(split)).tolist()))


def test_metrics(model, split, args, world):
    """ELBO, and Chamfer distances for each time and on average over times of a kind."""
    classifier = read_classifier(args.classifier).to(world.device) if args.classifier else None
    split, means = split.some(args.test_series), {}
    metrics, rows = measure_elbo(model, split, args, world), measure_sets(model, split, args, world)
    if classifier:
        metrics["recognised"] = measure_recognition(model, classifier, split, args, world)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        means[kind] = {k: sum(r[k] for r in mine) / len(mine) for k in ("model", "copy", "floor")}
    metrics |= {"units": UNITS, "series": len(split), "chamfer": means, "at_times": rows}
    return {**metrics, "trained_between": bool(args.random_times)}  # then nothing is unseen there


def show(metrics):
    """The table of a test, on stderr."""
    form = (
        "ELBO {elbo:.4f} ± {standard_error:.4f}: log-likelihood {log_likelihood:.4f}, KL {kl:.1f}"
    )
    training.say(f"test {form.format(**metrics)}; {metrics['units']}")
    training.say(f"{'Chamfer distance':24}{'model':>9}{'copy':>9}{'floor':>9}")
    for kind, row in metrics["chamfer"].items():
        training.say(f"{kind:24}{row['model']:9.5f}{row['copy']:9.5f}{row['floor']:9.5f}")
    if share := metrics.get("recognised"):
        form = "reconstructions labelled as the given sets {as_given:.3f}, rightly {right:.3f}; "
        training.say((form + "given sets rightly {given_right:.3f}").format(**share))


# --------------------------------------------------------------------------------------- training
def make_loss(args, split):
    """The objective: −ELBO as in UNITS, or the matching error, what z tells, and the KL."""

    def elbo(model, batch):
        points = batch.x[0, ..., 0].numel()
        return -model.elbo(batch.x, batch.t).mean() / points - split.log_unit

    def matching(model, batch):
        how = {"coupling": args.coupling, "pieces": args.pieces, "times": args.match_times}
        how["moments"] = args.moments
        error, kl = model.matching_loss(batch.x, batch.t, **how)
        return error + args.kl * kl.mean() / batch.x[0].numel()

    return elbo if args.objective == "elbo" else matching


def make_batches(args, split, world):
    share = {**world.share, "seed": args.seed}

    def fixed(epoch, start):
        rest = {"epoch": epoch, "start": start, "workers": 1}
        return data.batches(split, args.batch_size, **rest, **share)

    def random(epoch, start):
        for step in range(start, data.steps(split, args.batch_size)):
            here = at_times(split, random_times(args, epoch, step))
            yield next(data.batches(here, args.batch_size, epoch=epoch, start=step, **share))

    return random if args.random_times else fixed


def start(args, model, train):
    """Weights of --finetune; a new decoder is told the units of the data, for matching."""
    fresh = True
    if args.finetune:
        before = training.read_config(args.finetune)
        fresh = any(before[name] != getattr(args, name) for name in ("decoder", "hidden"))
        new = ("decoder.",) if fresh else ()
        if bool(before.get("moments")) != bool(args.moments):
            new += ("moments.", "frequencies")
        training.load_best(model, args.finetune, new)
    if fresh and args.objective == "matching":
        x = train.draw(np.arange(min(len(train), 500)))[0]
        model.decoder.standardise(torch.from_numpy(x).to(model.decoder.mean.device))


def train(args):
    """One run: train, select, test, draw; the contents of its results.json."""
    world = training.connect(args)
    check_training_memory(args, world)
    if args.classifier:
        read_classifier(args.classifier)  # a mistake shows before training
    if results := training.prepare(args, world):
        training.say(f"{args.out} is complete")
        return results
    splits = load_series(args)
    training.seed(args.seed)
    model = build(args).to(world.device)
    start(args, model, splits.train)
    optimizer = training.OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    steps = data.steps(splits.train, args.batch_size)
    schedule = training.schedule(args.schedule, INTERVALS)
    settings = {"ema": args.ema, "every": args.every}
    run = training.Run(args, world, model, optimizer, schedule, steps, **settings)
    valid = splits.valid.some(args.valid_series)

    def evaluate(model):
        metrics = measure_elbo(model, valid, args, world)
        return {f"valid_{name}": metrics[name] for name in ("elbo", "log_likelihood", "kl")}

    batches = make_batches(args, splits.train, world)
    run.fit(make_loss(args, splits.train), batches, evaluate, best="valid_elbo")
    if world.rank == 0:
        draw_curves(Path(args.out), args.objective)
        draw_samples(Path(args.out), args, model, generator(args, world))
        draw_reconstructions(Path(args.out), args, model, splits.test, generator(args, world))
    metrics = test_metrics(model, splits.test, args, world)
    return run.finish(metrics)


# --------------------------------------------------------------------------------------- pictures
def frame(t, trained):
    """The paper's boxes: red between trained times, green beyond, none at them."""
    return {"reconstruction": None, "interpolation": "red"}.get(kind_of(t, trained), "green")


def window(*sets):
    """(−a, a) that holds all points but a hundredth, with room."""
    size = np.concatenate([np.abs(s).ravel() for s in sets])
    a = 1.2 * float(np.nanquantile(size, 0.99)) or 1.0
    return (-a, a)


def draw_rows(path, rows, trained, title):
    """Rows (label, times, sets (T, n, d)): of the model, in boxes, if the label is not in grey."""
    titles = [[f"t = {t:.4g}" for t in times] for _, times, _ in rows]
    grey = [label in ("true", "given") for label, _, _ in rows]
    frames = [[None if g else frame(t, trained) for t in row[1]] for g, row in zip(grey, rows)]
    picture = pictures.point_grid(
        [[x[~np.isnan(x).any(-1)] for x in sets] for _, _, sets in rows],
        titles=titles[0] if all(t == titles[0] for t in titles) else titles,
        row_labels=[label for label, _, _ in rows],
        frames=frames,
        title=title,
        colours=["grey" if g else "blue" for g in grey],
        limits=window(*(sets for _, _, sets in rows)),
    )
    pictures.write_png(path, picture)


def draw_moving(path, x, times, trained, title, across=6):
    """An animation of series x (B, T, n, d): a frame for each time."""
    limits, images = window(x), []
    for k, t in enumerate(times):
        rows = [list(x[i : i + across, k]) for i in range(0, len(x), across)]
        frames = [[frame(t, trained)] * len(row) for row in rows]
        head = f"{title}, t = {t:.2f}"
        images.append(pictures.point_grid(rows, frames=frames, title=head, limits=limits))
    pictures.write_apng(path, images, [0.1] * (len(images) - 1) + [1.0])


def draw_curves(out, objective):
    """curves.png: ELBO, KL and loss, one above the other."""
    lines = training.read_metrics(out)

    def line(name):
        return tuple(zip(*[(row["step"], row[name]) for row in lines if row[name] is not None]))

    held = {"ELBO": line("valid_elbo"), "log-likelihood": line("valid_log_likelihood")}
    panels = [(held, "nats per point", "held-out series, in pixels")]
    panels += [({"KL": line("valid_kl")}, "nats per series", "held-out series")]
    panels += [({"loss": line("loss")}, objective, f"training by --objective {objective}")]
    images = [pictures.curves(s, "step", y, title, size=(720, 260)) for s, y, title in panels]
    pictures.write_png(out / "curves.png", np.concatenate(images))


def draw_samples(out, args, model, draws):
    """samples.png and moving.png: series from the prior."""
    trained, at = args.times, test_times(args.times)
    z0 = torch.randn(12, args.latent, device=draws.device, generator=draws)
    x = decode(model, z0[:6], at, args.points, draws).cpu().numpy()
    rows = [(str(i + 1), at, sets) for i, sets in enumerate(x)]
    between = "within the trained range" if args.random_times else "between trained times"
    title = f"samples; red: {between}, green: beyond"
    draw_rows(out / "samples.png", rows, trained, title)
    fine = np.linspace(trained[0], trained[-1] + 0.5, 31).round(9).tolist()
    x = decode(model, z0, fine, args.points, draws).cpu().numpy()
    draw_moving(out / "moving.png", x, fine, trained, "samples")


@torch.no_grad()
def draw_reconstructions(out, args, model, split, draws):
    """reconstructions.png and latent.png: of the first test series of (up to) four classes."""
    trained, at = args.times, test_times(args.times)
    _, first = np.unique(split.labels[split.index], return_index=True)
    first = first if len(first) > 1 else np.arange(len(split))
    truth = at_times(split, at).draw(first[spread(len(first), 4)])[0]
    x = torch.from_numpy(truth[:, [at.index(t) for t in trained]]).to(draws.device)
    z0 = model.encode(x, torch.tensor(trained, dtype=torch.float64)).mean
    x = decode(model, z0, at, args.points, draws).cpu().numpy()
    pairs = [(("true", at, a), ("model", at, b)) for a, b in zip(truth, x)]
    title = "test series, and what the model makes of their sets at times without a box"
    draw_rows(out / "reconstructions.png", [row for pair in pairs for row in pair], trained, title)
    share = torch.linspace(0, 1, 6, device=draws.device)[:, None]
    x = decode(model, torch.lerp(z0[:1], z0[-1:], share), at, args.points, draws).cpu().numpy()
    rows = [(f"{a:.1f}", at, sets) for a, sets in zip(share[:, 0].tolist(), x)]
    rows = [("true", at, truth[0]), *rows, ("true", at, truth[-1])]
    draw_rows(out / "latent.png", rows, trained, "z0 on the line between those of two test series")


# --------------------------------------------------------------------------------- finished runs
def restore(args):
    """The best model of --load, and where it is."""
    world, model = training.connect(args), build(args)
    sets = 6 * (args.sample or 1) * len(args.times) * args.points  # the output, while it is made
    check_memory(args, world, 1, 8 * max(args.hidden), sets)
    training.load_best(model, args.load)
    training.make_folder(args.out)
    return world, model.to(world.device).eval()


def write_series(args, name, x, rows, trained, title):
    """Series x as NAME.npy, NAME.png and NAME-moving.png in --out."""
    name = Path(args.out) / name
    training.write(name.with_name(f"{name.name}.npy"), lambda f: np.save(f, x))
    draw_rows(f"{name}.png", rows, trained, title)
    moving, pick = x if x.ndim == 4 else x[None], spread(len(args.times), 200)
    times = [args.times[k] for k in pick]
    draw_moving(f"{name}-moving.png", moving[:24, pick], times, trained, title)
    training.say(f"{name}.npy {x.shape}, {name}.png and {name}-moving.png")
    return {"sets": x, "times": args.times, "file": f"{name}.npy"}


def sample(args):
    """--sample: K series from the prior, at --times."""
    world, model = restore(args)
    draws, pick = generator(args, world), spread(len(args.times))
    z0 = torch.randn(args.sample, args.latent, device=world.device, generator=draws)
    x = decode(model, z0, args.times, args.points, draws).cpu().numpy()
    at = [args.times[k] for k in pick]
    rows = [(str(i + 1), at, sets[pick]) for i, sets in enumerate(x[:10])]
    name = f"samples-{args.sample}x{args.points}-seed{args.seed}"
    return write_series(args, name, x, rows, training.read_config(args.load)["times"], "samples")


def reconstruct(args):
    """--reconstruct: a person's own series, as the model sees them, at --times."""
    x, one = read_series(args.reconstruct)
    at = args.at or np.linspace(0, 1, x.shape[1]).round(9).tolist()
    if len(at) != x.shape[1]:
        raise training.UsageError(f"--at has {len(at)} times for the {x.shape[1]} sets of a series")
    world, model = restore(args)
    seen = torch.from_numpy(x).to(world.device)
    with torch.no_grad():
        t, mask = torch.tensor(at, dtype=torch.float64), ~seen.isnan().any(-1)
        z0 = model.encode(seen.nan_to_num(), t, mask).mean
    made = decode(model, z0, args.times, args.points, generator(args, world)).cpu().numpy()
    rows, given, pick = [], spread(len(at)), spread(len(args.times))
    for series, sets in zip(x[:5], made):
        rows.append(("given", [at[k] for k in given], series[given]))
        rows.append(("model", [args.times[k] for k in pick], sets[pick]))
    name = f"{Path(args.reconstruct).stem}-reconstructed"
    title = "given series, and what the model makes of it"
    return write_series(args, name, made[0] if one else made, rows, at, title)


def read_series(path):
    """Series (B, T, n, 2) in a file, NaN where there is no point; and whether axis B was added."""

    def wrong(why):
        return training.UsageError(f"--reconstruct {path}: {why}")

    try:
        x = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise wrong(str(e).partition("\n")[0] or "empty") from None
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiu":
        raise wrong("not one array of numbers")
    if x.ndim not in (3, 4) or x.shape[-1] != DIM or not x.size:
        raise wrong(f"shape {x.shape}, not (T, n, {DIM}) or (B, T, n, {DIM})")
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
    test = test_metrics(model, load_series(args).test, args, world)
    return training.write_evaluation(test, args, world)


def main(argv=None):
    """The results, also printed: of a run, or of what is made from one."""
    args = parse(argv)
    if args.sample:
        return sample(args)
    if args.reconstruct is not None:
        return reconstruct(args)
    results = evaluate_only(args) if args.evaluate else train(args)
    show(results["test"])
    return results


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
