"""Sets that move in time, Sec. 3.4 and 4.4 of the paper: a VAE over rotating digits.

    python train_temporal.py                               built-in digits, no download
    python train_temporal.py --data mnist --cuda           the paper's recipe
    python train_temporal.py --data mnist --objective matching --minutes 30
    python train_temporal.py --load runs/temporal --sample 6 --times 0:1.5:0.05 --points 500
    python train_temporal.py --load runs/temporal --reconstruct mine.npy --at 0,0.3,0.55,1

    Sec. 4.4, five fixed times             --times; --random-times for other grids
    App. C.3, recipe: 64 points, latent
    128, dopri5 at 1e-3 and 1e-4, Adam
    1e-3, halved every 50 of 100 epochs,
    batches of 128                         the defaults; SCHEDULES["halve"]
    Eq. 11, ELBO                           measure_elbo; --objective elbo
    Eq. 12, 13, sampling at any time       decode
    Fig. 5, 6, samples, red and green      samples.png, moving.png; frame
    Fig. 7, conditional samples            reconstructions.png
    Fig. 8, interpolation of z₀            latent.png

x is `(B, T, n, 2)`: B series of T sets; t is `(T,)`.

Departures from the paper
- Weights are selected by the ELBO of held-out series; the test series are read once, at the end.
  Both ELBOs use exact traces. They are over --valid-series and --test-series evenly spaced series,
  as a likelihood takes seconds of a CPU.
- The paper shows pictures only. We measure, too: reconstructions at trained times, at unseen ones
  between and beyond, against an independent draw of the true set there. Two rivals: to copy the
  nearest trained set, and, as a floor, one more draw of the true set.
- `--objective matching` regresses the decoder on straight paths instead of solving it (flow
  matching). Its error e is that of a velocity; −log p = const + Σ ∫ e² (1 − s)/s ds over all
  coordinates, where training has the weight 1 instead of (1 − s)/s. So Σ e² + KL is the ELBO's
  balance at s = ½, and --kl weighs the KL against it.
- In pictures and files a point keeps its base point y over time (Eq. 13 draws y anew at each time),
  so that it moves continuously; the distribution of the set at each time is the same.
- "Halved every 50 epochs" is "after half the run", so that any budget has all of it.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import data
import training
from exnode import GRADIENTS, TRACES, TemporalSetVAE
from metrics import chamfer
from solvers import SolverError

SCHEDULES = {
    "halve": training.halve(2),
    "cosine": training.cosine,
    "one-cycle": training.one_cycle,
}
HIDDEN = {"concatsquash": [512, 512, 512], "attention": [128, 128, 128]}
DIM, PIECE = 2, 2**15  # of a point; points that are decoded at once
UNITS = "nats per point, in pixels: log p / n on half a canvas − 2 ln 14; kl in nats per series"
TRAINING = (  # options without a meaning for a finished run
    "objective", "random_times", "kl", "lr", "schedule", "ema", "gradient", "trace", "epochs",
    "minutes", "category", "valid_series",
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


def widths(text):
    return [training.number(int, 1)(w) for w in text.split(",")]


def parse(argv=None):
    parser = training.options("Model sets over time.", "temporal", epochs=100, batch_size=128)
    add, number = parser.add_argument, training.number
    add("--objective", choices=("elbo", "matching"), default="elbo", help="matching: no solver")
    add("--decoder", choices=HIDDEN, default="concatsquash", help="field of the decoder's flow")
    help = "trained times, or of the output of --load: a list or start:stop:step"
    add("--times", type=times, default="0,0.25,0.5,0.75,1", help=help)
    help = "train each batch at so many random times within --times; 0: at --times"
    add("--random-times", type=number(int, 0), default=0, metavar="K", help=help)
    add("--points", type=number(int, 1), default=64, help="in each set")
    add("--category", help='digits, such as "1,7"; None: all')
    add("--latent", type=number(int, 1), default=128, help="numbers in z")
    help = "widths of the decoder; None: 512,512,512, or 128,128,128 with attention"
    add("--hidden", type=widths, metavar="W,W,…", help=help)
    add("--kl", type=number(float, 0), default=1.0, help="weight of the KL in matching")
    add("--lr", type=number(float, 0), default=1e-3, help="largest learning rate of Adam")
    add("--schedule", choices=SCHEDULES, default="halve", help="of the learning rate")
    help = "decay of averaged weights, or 0 for none"
    add("--ema", type=number(float, 0), default=0.0, help=help)
    add("--gradient", choices=GRADIENTS, default="adjoint", help="how to differentiate a solve")
    add("--trace", choices=TRACES, default="hutchinson", help="of the ELBO in training")
    add("--valid-series", type=number(int, 1), default=256, help="at most, per validation")
    add("--test-series", type=number(int, 1), default=1000, help="at most, in the test")
    add("--load", metavar="RUN", help="a run directory; its options are the defaults")
    add("--evaluate", action="store_true", help="only test the best weights of --load")
    add("--sample", type=number(int, 1), metavar="K", help="draw K series from --load")
    help = "reconstruct your series (T, n, 2) or (B, T, n, 2) with --load; NaN: no point there"
    add("--reconstruct", metavar="FILE.npy", help=help)
    help = "times of the sets in --reconstruct; None: evenly spaced from 0 to 1"
    add("--at", type=times, help=help)
    args = parser.parse_args(argv)
    if args.load:  # what is not on the command line is as it was in that run
        config = read_config(args.load)
        parser.set_defaults(**config, out=args.load)
        args = parser.parse_args(argv)
        for name in TRAINING:
            if getattr(args, name) != config.get(name, getattr(args, name)):
                parser.error(f"--{name.replace('_', '-')} is for training, not for --load")
    args.hidden = args.hidden or HIDDEN[args.decoder]
    return check(parser, args)


def check(parser, args):
    """The options, if they go together."""
    tasks = [args.evaluate, args.sample is not None, args.reconstruct is not None]
    if sum(tasks) != bool(args.load):
        parser.error("--load RUN goes with one of --evaluate, --sample and --reconstruct")
    if args.load and args.resume:
        parser.error("--resume is for training, not for --load")
    if args.at and args.reconstruct is None:
        parser.error("--at gives the times of --reconstruct")
    if args.ema >= 1:
        parser.error(f"argument --ema: {args.ema:g} is not below 1")
    if args.objective == "elbo" and args.kl != 1:
        parser.error("--kl is for --objective matching: the ELBO has the weight 1")
    if args.random_times > 1001:
        parser.error(f"argument --random-times: {args.random_times} is more than 1001")
    if args.random_times and len(args.times) < 2:
        parser.error("--random-times wants a first and a last of --times")
    return args


def read_config(run):
    config = training.read_json(Path(run) / "config.json")
    if not isinstance(config, dict) or not {"latent", "decoder", "times"} <= config.keys():
        raise training.UsageError(f"--load {run}: not a run of train_temporal.py")
    return config


# ------------------------------------------------------------------------------- series and model
def load_series(args):
    kind = {"task": "temporal", "category": args.category, "points": args.points}
    return data.load(args.data, args.root, seed=args.seed, times=args.times, **kind)


def at_times(split, times):
    """The same series at other times; a time that comes twice has two draws of its set."""
    return replace(split, source=replace(split.source, times=np.array(times, np.float64)))


def some(split, count):
    """At most so many of the series, evenly spaced."""
    pick = np.linspace(0, len(split) - 1, min(count, len(split))).round().astype(np.int64)
    return replace(split, index=split.index[pick])


def random_times(args, epoch, step):
    """Of 1001 times from the first to the last of --times, K different ones, increasing."""
    rng = np.random.default_rng((args.seed, epoch, step))
    pick = np.sort(rng.choice(1001, args.random_times, replace=False))
    return args.times[0] + pick / 1000 * (args.times[-1] - args.times[0])


def build(args):
    kind = {"gradient": args.gradient, "trace": args.trace}
    try:
        return TemporalSetVAE(DIM, args.latent, args.decoder, args.hidden, **kind)
    except ValueError as e:  # widths that the heads of attention do not divide
        raise training.UsageError(f"--hidden: {e}") from None


def check_memory(args, sets, each, whole=0):
    """Refuse what cannot fit: sets in work at once, with `each` floats a point, and the output."""
    pairs = 8 * args.points if args.decoder == "attention" else 0
    need = 4 * (whole + sets * args.points * (each + pairs))
    if args.cuda:
        have = torch.cuda.mem_get_info()[0]
    else:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        size = f"about {need / 2**30:.3g} GiB, and there are {have / 2**30:.3g}"
        raise training.UsageError(f"--points {args.points} with these options needs {size}")


@torch.no_grad()
def decode(model, z0, times, points, generator):
    """Eq. 12, 13: sets `(B, T, points, d)` at any times; a point has one y for all times."""
    z = model.latents(z0, torch.tensor(times, dtype=torch.float64))  # (B, T, latent)
    like = {"device": z.device, "dtype": z.dtype, "generator": generator}
    y = torch.randn(len(z), 1, points, model.dim, **like).expand(-1, len(times), -1, -1)
    sets = max(PIECE // points, 1)  # sets are independent given z
    pieces = zip(y.flatten(0, 1).split(sets), z.flatten(0, 1).split(sets))
    x = torch.cat([model.decoder.decode(y, context=z) for y, z in pieces])
    return x.unflatten(0, (len(z0), len(times)))


def generator(args, world):
    return torch.Generator(world.device).manual_seed(args.seed + 7919 * world.rank)


# --------------------------------------------------------------------------------------- measures
@torch.no_grad()
def exact_elbo(model, x, t, generator):
    """Parts of Eq. 11 per series, log-likelihood and KL, without noise in the trace."""
    trace, model.decoder.trace = model.decoder.trace, "exact"
    try:
        return model.elbo_parts(x, t, generator=generator)
    finally:
        model.decoder.trace = trace


def in_units(split, log_likelihood, kl):
    """The ELBO and its parts from their means over series, as UNITS says."""
    points = len(split.times) * split.points
    log_likelihood = log_likelihood / points + split.log_unit
    elbo = log_likelihood - kl / points
    return {"elbo": elbo, "log_likelihood": log_likelihood, "kl": kl}


def shared_batches(split, args, world):
    share = {"rank": world.rank, "world": world.size, "device": world.device}
    return data.batches(split, args.batch_size, training=False, workers=1, **share)


def measure_elbo(model, split, args, world):
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    draws = generator(args, world)
    for batch in shared_batches(split, args, world):
        total += torch.stack(exact_elbo(model, batch.x, batch.t, draws)).double().sum(1)
    return in_units(split, *(world.sum(total) / len(split)).tolist())


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
    draws, t = generator(args, world), torch.tensor(trained)
    for batch in shared_batches(at_times(split, [*trained, *at, *at]), args, world):
        x, truth, again = batch.x.split([len(trained), len(at), len(at)], 1)
        made = decode(model, model.encode(x, t).mean, at, args.points, draws)
        for k, rival in enumerate((made, x[:, nearest], again)):
            total[k] += chamfer(rival, truth).double().sum(0)
    rows = (world.sum(total) / len(split)).T.tolist()
    names = ("t", "kind", "model", "copy", "floor")
    return [dict(zip(names, (t, kind_of(t, trained), *row))) for t, row in zip(at, rows)]


def test_metrics(model, split, args, world):
    """ELBO, and Chamfer distances by kind of time and for each time."""
    split = some(split, args.test_series)
    metrics, rows = measure_elbo(model, split, args, world), measure_sets(model, split, args, world)
    means = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        means[kind] = {k: sum(r[k] for r in mine) / len(mine) for k in ("model", "copy", "floor")}
    return {**metrics, "units": UNITS, "series": len(split), "chamfer": means, "at_times": rows}


def show(metrics):
    """The table of a test, on stderr."""
    parts = "ELBO {elbo:.4f}, log-likelihood {log_likelihood:.4f}, KL {kl:.1f}".format(**metrics)
    training.say(f"test {parts} ({metrics['units']}; {metrics['series']} series)")
    training.say(f"{'Chamfer distance':24}{'model':>9}{'copy':>9}{'floor':>9}")
    for kind, row in metrics["chamfer"].items():
        training.say(f"{kind:24}{row['model']:9.5f}{row['copy']:9.5f}{row['floor']:9.5f}")


# --------------------------------------------------------------------------------------- training
def make_loss(args, split):
    """The objective: −ELBO as in UNITS, or the matching error per coordinate and its KL."""

    def elbo(model, batch):
        points = batch.x[0, ..., 0].numel()
        return -model.elbo(batch.x, batch.t).mean() / points - split.log_unit

    def matching(model, batch):
        error, kl = model.matching_loss(batch.x, batch.t)
        return error + args.kl * kl.mean() / batch.x[0].numel()

    return elbo if args.objective == "elbo" else matching


def make_batches(args, split, world):
    share = {"rank": world.rank, "world": world.size, "device": world.device, "seed": args.seed}

    def fixed(epoch, start):
        rest = {"epoch": epoch, "start": start, "workers": 1}
        return data.batches(split, args.batch_size, **rest, **share)

    def random(epoch, start):
        for step in range(start, data.steps(split, args.batch_size)):
            here = at_times(split, random_times(args, epoch, step))
            yield next(data.batches(here, args.batch_size, epoch=epoch, start=step, **share))

    return random if args.random_times else fixed


def train(args):
    """One run: train, select, test, draw; the contents of its results.json."""
    world = training.connect(args)
    tangents = 1 + DIM if args.objective == "elbo" else 1
    sets = args.batch_size // world.size * (args.random_times or len(args.times))
    check_memory(args, sets, 2 * tangents * sum(args.hidden))
    if results := training.prepare(args, world):
        training.say(f"{args.out} is complete")
        return results
    splits = load_series(args)
    training.seed(args.seed)
    model = build(args).to(world.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps, schedule = data.steps(splits.train, args.batch_size), SCHEDULES[args.schedule]
    run = training.Run(args, world, model, optimizer, schedule, steps, ema=args.ema)
    valid = some(splits.valid, args.valid_series)

    def evaluate(model):
        metrics = measure_elbo(model, valid, args, world)
        return {f"valid_{name}": value for name, value in metrics.items()}

    batches = make_batches(args, splits.train, world)
    run.fit(make_loss(args, splits.train), batches, evaluate, best="valid_elbo")
    metrics = test_metrics(model, splits.test, args, world)
    results = run.finish(metrics, parameters=sum(p.numel() for p in model.parameters()))
    if world.rank == 0:
        draw_curves(Path(args.out), args)
        draw_run(Path(args.out), args, model, splits.test, generator(args, world))
    return results


# --------------------------------------------------------------------------------------- pictures
def frame(t, trained):
    """The paper's boxes: red between trained times, green beyond, none at them."""
    if t in trained:
        return None
    return "red" if trained[0] < t < trained[-1] else "green"


def window(*sets):
    """(−a, a) that holds all points but a thousandth."""
    size = np.concatenate([np.abs(s).ravel() for s in sets])
    a = 1.05 * float(np.nanquantile(size, 0.999)) or 1.0
    return (-a, a)


def there(points):
    """The points (n, d) that exist."""
    return points[~np.isnan(points).any(-1)]


def draw_rows(path, rows, trained, title, plain=()):
    """Rows (label, times, sets (T, n, d)), boxed but for those numbered in `plain`, in grey."""
    import pictures  # only where it draws

    times = [[f"t = {t:g}" for t in row[1]] for row in rows]
    same = all(t == times[0] for t in times)
    frames = [[None if i in plain else frame(t, trained) for t in r[1]] for i, r in enumerate(rows)]
    picture = pictures.point_grid(
        [[there(x) for x in sets] for _, _, sets in rows],
        titles=times[0] if same else times,
        row_labels=[label for label, _, _ in rows],
        frames=frames,
        title=title,
        colours=["grey" if i in plain else "blue" for i in range(len(rows))],
        limits=window(*(sets for _, _, sets in rows)),
    )
    pictures.write_png(path, picture)


def draw_moving(path, x, times, trained, title, across=6):
    """An animation of series x (B, T, n, d): a frame for each time."""
    import pictures

    limits, images = window(x), []
    for k, t in enumerate(times):
        rows = [list(x[i : i + across, k]) for i in range(0, len(x), across)]
        frames = [[frame(t, trained)] * len(row) for row in rows]
        head = f"{title}, t = {t:.2f}"
        images.append(pictures.point_grid(rows, frames=frames, title=head, limits=limits))
    hold = [0.1] * (len(images) - 1) + [1.0]
    pictures.write_apng(path, images, hold)


def draw_curves(out, args):
    """curves.png: ELBO, loss and KL, one above the other."""
    import pictures

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def line(name):
        pairs = [(row["epoch"], row[name]) for row in lines if row[name] is not None]
        return tuple(zip(*pairs))

    panels = [
        ({"ELBO": line("valid_elbo"), "log-likelihood": line("valid_log_likelihood")},
         "nats per point", "held-out series, in pixels"),
        ({"KL": line("valid_kl")}, "nats per series", "held-out series"),
        ({"loss": line("loss")}, args.objective, "training"),
    ]  # fmt: skip
    kind = {"size": (720, 260), "x_label": "epoch"}
    images = [pictures.curves(s, y_label=y, title=name, **kind) for s, y, name in panels]
    pictures.write_png(out / "curves.png", np.concatenate(images))


@torch.no_grad()
def draw_run(out, args, model, split, draws):
    """samples.png, moving.png, reconstructions.png and latent.png."""
    trained, at = args.times, test_times(args.times)
    z0 = torch.randn(12, args.latent, device=draws.device, generator=draws)
    x = decode(model, z0[:6], at, args.points, draws).cpu().numpy()
    title = "samples; red: between trained times, green: beyond"
    draw_rows(out / "samples.png", [(str(i + 1), at, s) for i, s in enumerate(x)], trained, title)
    fine = np.linspace(trained[0], trained[-1] + 0.5, 31).tolist()
    x = decode(model, z0, fine, args.points, draws).cpu().numpy()
    draw_moving(out / "moving.png", x, fine, trained, "samples")

    picks = [
        int(np.flatnonzero(split.labels[split.index] == k)[0]) for k in range(len(split.classes))
    ]
    truth, _, _ = at_times(split, at).draw(np.array(picks[:4]))
    seen = torch.from_numpy(truth[:, [at.index(t) for t in trained]]).to(draws.device)
    z0 = model.encode(seen, torch.tensor(trained)).mean
    x = decode(model, z0, at, args.points, draws).cpu().numpy()
    rows = [row for k in range(len(x)) for row in (("true", at, truth[k]), ("model", at, x[k]))]
    title = "reconstructions of test series from their sets without a box"
    plain = range(0, len(rows), 2)
    draw_rows(out / "reconstructions.png", rows, trained, title, plain)

    share = torch.linspace(0, 1, 6, device=draws.device)[:, None]
    x = decode(model, torch.lerp(z0[:1], z0[-1:], share), at, args.points, draws).cpu().numpy()
    rows = [(f"{a:.1f}", at, sets) for a, sets in zip(share[:, 0].tolist(), x)]
    rows = [("true", at, truth[0]), *rows, ("true", at, truth[-1])]
    title = "z₀ on the line between those of two test series"
    draw_rows(out / "latent.png", rows, trained, title, (0, len(rows) - 1))


# --------------------------------------------------------------------------------- finished runs
def restore(args):
    """The best model of --load, and where it is."""
    world, path = training.connect(args), Path(args.load) / "best.pt"
    state, model = training.read_checkpoint(path), build(args)
    training.load_weights(model, state, path)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise training.UsageError(f"--out {args.out}: {e.strerror}") from None
    return world, model.to(world.device).eval()


def evaluate_only(args):
    world, model = restore(args)
    metrics = test_metrics(model, load_series(args).test, args, world)
    show(metrics)
    return {"test": metrics}


def sample(args):
    """--sample: K series from the prior, at --times."""
    check_memory(args, 1, 4 * max(args.hidden), 6 * args.sample * len(args.times) * args.points)
    world, model = restore(args)
    draws = generator(args, world)
    z0 = torch.randn(args.sample, args.latent, device=world.device, generator=draws)
    x = decode(model, z0, args.times, args.points, draws).cpu().numpy()
    pick = spread(len(args.times))
    at = [args.times[k] for k in pick]
    rows = [(str(i + 1), at, sets[pick]) for i, sets in enumerate(x[:10])]
    trained = read_config(args.load)["times"]
    return keep(args, "sampled", x, x[:24], rows, trained, f"samples from {Path(args.load).name}")


def reconstruct(args):
    """--reconstruct: a person's own series, as the model sees them, at --times."""
    x, one = read_series(args.reconstruct)
    at = args.at or np.linspace(0, 1, x.shape[1]).tolist()
    if len(at) != x.shape[1]:
        raise training.UsageError(f"--at has {len(at)} times for the {x.shape[1]} sets of a series")
    check_memory(args, 1, 4 * max(args.hidden), 6 * len(x) * len(args.times) * args.points)
    world, model = restore(args)
    here = torch.from_numpy(x).to(world.device)
    mask = ~here.isnan().any(-1)
    with torch.no_grad():
        z0 = model.encode(here.nan_to_num(), torch.tensor(at, dtype=torch.float64), mask).mean
    made = decode(model, z0, args.times, args.points, generator(args, world)).cpu().numpy()
    rows, given, pick = [], spread(len(at)), spread(len(args.times))
    for series, sets in zip(x[:5], made[:5]):
        rows.append(("given", [at[k] for k in given], series[given]))
        rows.append(("model", [args.times[k] for k in pick], sets[pick]))
    title = f"{Path(args.reconstruct).name}; red: between given times, green: beyond"
    return keep(args, "reconstructed", made[0] if one else made, made[:24], rows, at, title)


def read_series(path):
    """Series (B, T, n, 2) in a file, NaN where there is no point, and whether it has no axis B."""

    def wrong(why):
        return training.UsageError(f"--reconstruct {path}: {why}")

    try:
        x = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise wrong(str(e).splitlines()[0] if str(e) else "empty") from None
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiu":
        raise wrong("not one array of numbers")
    one, x = x.ndim == 3, (x[None] if x.ndim == 3 else x).astype(np.float32)
    if x.ndim != 4 or x.shape[-1] != DIM or not x.size:
        shape = x.shape[1:] if one else x.shape
        raise wrong(f"shape {shape}, not (T, n, {DIM}) or (B, T, n, {DIM})")
    gone = np.isnan(x)
    if np.isinf(x).any() or (gone.any(-1) != gone.all(-1)).any():
        at = np.argwhere(np.isinf(x).any(-1) | (gone.any(-1) != gone.all(-1)))[0]
        raise wrong(f"point {at[one:].tolist()} is infinite, or only partly NaN")
    if (empty := gone.all((-2, -1))).any():
        raise wrong(f"set {np.argwhere(empty)[0][one:].tolist()} has no points")
    return x, one


def spread(count, most=11):
    """At most so many of `count` positions, evenly spaced, the first and last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def keep(args, name, array, moving, rows, trained, title):
    """NAME.npy, NAME.png and NAME-moving.png in --out."""
    out = Path(args.out)
    training.write(out / f"{name}.npy", lambda f: np.save(f, array))
    draw_rows(
        out / f"{name}.png",
        rows,
        trained,
        title,
        [i for i, r in enumerate(rows) if r[0] == "given"],
    )
    draw_moving(out / f"{name}-moving.png", moving, args.times, trained, title)
    files = [str(out / f"{name}{end}") for end in (".npy", ".png", "-moving.png")]
    training.say(f"{array.shape} in {', '.join(files)}")
    return {"files": files, "times": args.times}


def main(argv=None):
    """The results, also printed: of a run, or of what is made from one."""
    args = parse(argv)
    try:
        if args.evaluate:
            return evaluate_only(args)
        if args.sample:
            return sample(args)
        if args.reconstruct is not None:
            return reconstruct(args)
        results = train(args)
    except SolverError as e:
        raise training.TrainingError(f"{e}; checkpoints are in {args.out}") from None
    show(results["test"])
    return results


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
