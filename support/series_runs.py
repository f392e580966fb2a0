"""What a finished run on series is for: samples, and a person's own series as the model sees them.

    Eq. 12, samples at any time            --sample: sample
    Eq. 13, a given series at any time     --reconstruct: reconstruct

x is `(B, T, n, d)`, NaN where there is no point, in files and in pictures. A point keeps its base
point y over time there (Eq. 13 draws y anew at each time), so that it moves continuously; the
distribution of the set at each time is the same.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
import exnode
from support import models, options, pages, training
from support.files import write_whole
from support.series import (
    as_mask,
    check_times,
    draw_series,
    generator,
    known_sizes,
    moving,
    observed_series,
    shown_mask,
    spread,
    usual_times,
    with_nan,
)
from support.series_pictures import draw_moving, draw_rows


def restore(args):
    """The best model of --load, with its prior if --prior says so, and where it is."""
    learned = args.prior == "flow" and not args.fit_prior and args.reconstruct is None
    load = partial(models.load, learned_prior=learned)
    kind = exnode.TemporalSetVAE, "a TemporalSetVAE"
    world, model = training.connect(args), training.load_model("--load", args.load, load, *kind)
    return world, model.to(world.device)


def check_memory(args, world, points, sets, each, whole=0):
    """Estimated peak bytes for `sets` sets, with `each` numbers a point, and a whole output."""
    pairs = 8 * points if args.decoder != "concatsquash" else 0
    need = 4 * (whole + sets * points * (each + pairs))
    training.check_memory(need, world, f"sets of {points} points with the other options")


def check_output_memory(args, world, series, points, given=0):
    """For `series` of output with `points` points per set, while `given` points are encoded."""
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
    shown, pick = x if x.ndim == 4 else x[None], spread(len(args.times), 200)
    times = [args.times[k] for k in pick]
    draw_moving(f"{name}-moving.png", shown[:24, pick], times, trained, title)
    training.say(f"{name}.npy {x.shape}, {name}.png and {name}-moving.png")
    given = [(k, *row) for k, row in enumerate((row for row in rows if row[0] == "given"), 1)]
    kind = "model" if given else "sample"
    made = [(k, kind, times, sets) for k, sets in enumerate(shown[:24, pick], 1)]
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
