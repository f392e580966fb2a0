"""A page to turn sets in and to play their time: one HTML file, without network or packages.

    Fig. 3, 4    samples beside real sets, and their way from noise to data    kind, frames of x
    Fig. 5–8     series over time, in the paper's red and green boxes          times, boxes
    Sec. 4.2     test sets with true and predicted labels                      label, predicted

`write` embeds the sets in view.html, which draws them. Each coordinate is an integer of 16 bits:
x = centre + half · (8 q / 65534 − 4), where centre and half are those of the section's window, and
q = 65535 stands for a point that is not drawn. What is left out is said beside the set.

Shapes: a set is `(n, d)`; over time `(F, n, d)`, a frame for each time, where points that are not
there are NaN. y is up in 2-D, z in 3-D; of more than three axes the first three are drawn.
"""

import base64
import functools
import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.files import write_whole

REACH = 4  # half-widths of the window from its centre to the farthest point that is drawn
LEVELS = 65534  # the largest q of a coordinate
MOST_SETS, MOST_FRAMES, MOST_POINTS = 200, 200, 20_000  # of a page, of a set, of a frame
MOST_NUMBERS = 6_000_000  # of all sets: a page of 16 MB


@dataclass
class Cloud:
    """A set of points, or a set over time, and what the page says of it."""

    x: np.ndarray  # (n, d) or (F, n, d)
    name: str = ""
    kind: str = ""  # "real" and "given" are grey, others in colour; each can be hidden
    section: str = ""  # a heading; the sets under it share window, camera and times
    label: str | None = None
    predicted: str | None = None
    log_density: float | None = None  # nats per point
    times: Sequence[float] | None = None  # of the frames; None: from 0 to 1
    boxes: Sequence[str | None] | None = None  # of the frames: None, "red" or "green"


def write(
    path: str | Path,
    sets: Iterable[Cloud | np.ndarray],
    *,
    title: str,
    about: str = "",
    results: dict | None = None,
    curves: Sequence[dict] = (),
):
    """Write the page of some sets, with the numbers of results.json and lines of metrics.jsonl."""
    sets = list(sets)
    clouds = [s if isinstance(s, Cloud) else Cloud(s) for s in sets[:MOST_SETS]]
    points = [_read(cloud, f"set {i}") for i, cloud in enumerate(clouds)]
    share = MOST_NUMBERS / max(1, sum(x.size for x in points))
    keys = [(cloud.section, x.shape[-1]) for cloud, x in zip(clouds, points)]
    sections, shown = {key: None for key in keys}, [None] * len(clouds)
    for key in sections:
        members = [i for i, k in enumerate(keys) if k == key]
        window, times = _window([points[i] for i in members]), _union(clouds, points, members)
        centre, half = (4 * window[0]).tolist(), 4 * min(window[1], np.finfo(float).max / 4)
        named = {"name": key[0], "dim": key[1], "centre": centre, "half": half}
        sections[key] = {**named, "times": times.tolist()}
        for i in members:
            shown[i] = _describe(clouds[i], points[i], window, times, share)
            shown[i]["section"] = list(sections).index(key)
    page = {"title": title, "about": about, "results": results or {}, "curves": curves}
    page |= {"sections": list(sections.values()), "sets": shown, "left_out": len(sets) - len(shown)}
    page["end"] = any(x.shape[0] > 1 and c.times is None for c, x in zip(clouds, points))
    embedded = json.dumps(_plain(page), allow_nan=False).replace("<", "\\u003c")
    head, tail = Path(__file__).with_name("view.html").read_text("utf-8").split("{{data}}")
    text = head.replace("{{title}}", html.escape(title)) + embedded + tail
    write_whole(path, lambda f: f.write(text.encode("utf-8", "replace")))


def _read(cloud, where):
    """The frames (F, n, d ≤ 3) of a cloud, in a precision that holds any coordinate."""
    try:
        x = np.asarray(cloud.x)
        x = x if x.dtype == np.float32 else x.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{where}: no numbers: {e}") from None
    if x.ndim not in (2, 3) or not x.shape[-1] or not x.shape[0] >= x.ndim - 2:
        raise ValueError(f"{where} has shape {x.shape}: want (n, d), or (F, n, d) with F > 0")
    x = (x if x.ndim == 3 else x[None])[..., :3]
    for name, values in (("times", cloud.times), ("boxes", cloud.boxes)):
        if values is not None and len(values) != len(x):
            raise ValueError(f"{where}: {len(values)} {name} for {len(x)} frames")
    if not all(math.isfinite(t) for t in _times(cloud, x)):
        raise ValueError(f"{where}: times={list(cloud.times)}: want finite numbers")
    if wrong := [box for box in cloud.boxes or () if box not in (None, "red", "green")]:
        raise ValueError(f"{where}: box {wrong[0]!r}: want None, 'red' or 'green'")
    return x


def _times(cloud, x):
    return np.linspace(0, 1, len(x)) if cloud.times is None else np.asarray(cloud.times, np.float64)


def _union(clouds, points, members):
    """The times of a section at which any of its sets has a frame; none if nothing moves."""
    moving = [_times(clouds[i], points[i]) for i in members if len(points[i]) > 1]
    return np.unique(np.concatenate(moving).round(9)) if moving else np.zeros(0)


def _window(points):
    """Centre and half-width that show nearly all points of nearly all sets, as quarters.

    A quarter of a coordinate, so that no difference of two of them overflows. A set that is far
    larger than most, as one of a model that diverged, does not make the others small.
    """
    finite = [x[np.isfinite(x).all(-1)].astype(np.float64) / 4 for x in points]
    finite = [p for p in finite if len(p)]
    if not finite:
        return np.zeros(points[0].shape[-1]), 0.25
    middles = [np.quantile(p, (0.005, 0.995), axis=0) for p in finite]
    centre = np.median([low / 2 + high / 2 for low, high in middles], axis=0)
    sizes = [np.quantile(functools.reduce(np.hypot, (p - centre).T), 0.99) for p in finite]
    with np.errstate(over="ignore"):
        half = 1.05 * min(max(sizes), 3 * np.median(sizes))
    return centre, float(half) or 0.25


def _describe(cloud, x, window, times, share):
    """What the page needs of a set: its words, its frame at each time, its points."""
    of, (frames, n, _) = np.shape(cloud.x)[-1], x.shape
    notes = [f"axes 1–3 of {of}"] if of > 3 else []
    pick = np.unique(np.linspace(0, frames - 1, min(frames, MOST_FRAMES)).round().astype(int))
    if len(pick) < frames:
        notes.append(f"{len(pick)} of {frames} frames")
    finite = np.isfinite(x).all((0, -1)).sum()
    keep = min(n, MOST_POINTS, max(1, int(n * share)))
    if keep < n:  # at random: points may lie in an order
        x = x[:, np.sort(np.random.default_rng(0).choice(n, keep, replace=False))]
        notes.append(f"{keep:,} of {n:,} points drawn")
    if finite < n:
        notes.append(f"{n - finite:,} not finite")
    q, far = _quantise(x[pick], *window)
    if far:
        notes.append(f"{far:,} too far out to draw")
    own = _times(cloud, x)[pick]
    return {
        **{name: None if (v := getattr(cloud, name)) is None else str(v) for name in WORDS},
        "log_density": cloud.log_density,
        "times": own if len(own) > 1 or cloud.times is not None else None,
        "boxes": None if cloud.boxes is None else [cloud.boxes[k] for k in pick],
        "pick": np.abs(times[:, None] - own).argmin(1) if len(own) > 1 else [0] * len(times),
        "points": x.shape[1],
        "note": ", ".join(notes),
        "data": base64.b64encode(q.tobytes()).decode(),
    }


WORDS = ("name", "kind", "label", "predicted")


def _quantise(x, centre, half):
    """The integers q, little-endian, and how many points are too far out for them."""
    with np.errstate(over="ignore"):
        v = (x.astype(np.float64) / 4 - centre) / half
    near = (np.abs(v) <= REACH).all(-1)
    q = np.where(near[..., None], np.rint((v + REACH) * (LEVELS / (2 * REACH))), LEVELS + 1)
    return q.astype("<u2"), int((np.isfinite(x).all(-1) & ~near).any(0).sum())


def _plain(value):
    """A value as JSON can hold it: NaN and infinity, and whatever is no number, as text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
