"""Series of sets: their times and masks, and how a run's options say to draw them.

x is `(B, T, n, d)`; t is `(T,)` or `(B, T)`; mask is `(B, T, n)`, True where a point exists, all
False for a set that was not observed. A batch is that of support/splits.py.
"""

import argparse
from dataclasses import replace
from functools import partial

import numpy as np
import torch

import data
from support import training

TIMES, POINTS = [0.0, 0.25, 0.5, 0.75, 1.0], 64  # of the paper's series
FARTHEST = 1000  # time that anyone may ask for


# ------------------------------------------------------------------------------------------ times
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


def check_times(path, known):
    """An error unless times (T,) or (N, T) of series are near 0 and differ in float32."""
    first, last = np.nanmin(known), np.nanmax(known)
    if max(-first, last) > FARTHEST or (np.diff(np.float32(known)) <= 0).any():
        way = "subtract the first, and choose another unit of time"
        within = f"want steps that float32 resolves, from -{FARTHEST} to {FARTHEST}"
        raise training.UsageError(f"{path}: times from {first:g} to {last:g}: {within}: {way}")


def usual_times(run):
    """Five evenly spaced times in the range of a run's own series; TIMES, if it has none."""
    span = (training.read_sets(run) or {}).get("times", TIMES)
    fine = isinstance(span, list) and all(isinstance(t, int | float) for t in span)
    if not fine or not span or not np.abs(span).max() <= FARTHEST:
        raise training.UsageError(f"{run}/sets.json: {str(span)[:40]} are no times")
    return np.unique(np.linspace(span[0], span[-1], 5).round(9)).tolist()


def at_times(split, times):
    """The same series at other times; a time that comes twice has two draws of its set."""
    return replace(split, source=replace(split.source, times=np.array(times, np.float64)))


def tested_times(trained):
    """Trained times, the middles between them, and a quarter and a half beyond the last."""
    middles = [(a + b) / 2 for a, b in zip(trained, trained[1:])]
    return sorted([*trained, *middles, trained[-1] + 0.25, trained[-1] + 0.5])


def kind_of(t, trained):
    if t in trained:
        return "reconstruction"
    return "interpolation" if trained[0] < t < trained[-1] else f"extrapolation to {t:g}"


def spread(count, most=11):
    """At most `most` of `count` positions, evenly spaced, the first and last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


# ------------------------------------------------------------------------------------------ masks
def full_mask(batch):
    """The mask of a batch, also where all points exist."""
    return torch.ones_like(batch.x[..., 0]).bool() if batch.mask is None else batch.mask


def count_points(batch):
    """Points that exist in each series, `(B,)`."""
    return full_mask(batch).sum((1, 2))


def as_mask(sizes, times):
    """The mask `(B, T, n)` of series whose sets have these numbers of points `(B,)`."""
    mask = torch.arange(int(sizes.max())) < torch.from_numpy(sizes)[:, None]
    return mask[:, None].repeat(1, times, 1)


def shown_mask(mask):
    """None for a mask that leaves nothing out."""
    return None if mask.all() else mask


def with_nan(x, mask):
    """x as a numpy array, NaN where there is no point."""
    return x.masked_fill(~mask[..., None], torch.nan).cpu().numpy()


def observed_series(batch):
    """For each series of a batch its observed times, and the sets there, NaN for no point."""
    mask = full_mask(batch)
    x, t = with_nan(batch.x, mask), batch.t.expand(mask.shape[:2])
    seen = mask.any(-1).cpu()
    return [(t[i].cpu()[seen[i]].tolist(), x[i][seen[i].numpy()]) for i in range(len(x))]


# -------------------------------------------------------------------------- what options say
def is_own(args):
    return args.data not in data.NAMES


def generator(args, world):
    return torch.Generator(world.device).manual_seed(args.seed + 7919 * world.rank)


def moving(args, draws):
    """How sets are drawn for files and pictures: a point keeps its base point over time."""
    watch = partial(training.watch, "decoding")
    return {"points": args.points, "generator": draws, "continuous": True, "progress": watch}


def shared_batches(split, args, world, what):
    """This process's batches of a split, with a line about progress every half minute."""
    batches = data.batches(split, args.batch_size, training=False, workers=1, **world.share)
    return training.watch(what, batches, data.steps(split, args.batch_size, training=False))


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


def draw_series(args, model, run, count, times, draws):
    """Series from the prior, `(count, T, n, d)`, NaN where there is no point."""
    mask = as_mask(choose_sizes(args, run, count), len(times)).to(draws.device)
    how = {**moving(args, draws), "points": mask.shape[-1], "mask": shown_mask(mask)}
    return with_nan(model.sample(count, times, **how), mask)
