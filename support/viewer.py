"""A page to turn sets in and to play their time: one HTML file, without network or packages.

    Fig. 3, 4    samples beside real sets; their way from noise to data    kind, frames in x
    Fig. 5–8     series over time, in the paper's red and green boxes      times, boxes
    Sec. 4.2     test sets with true and predicted labels                  label, predicted

`write` embeds the sets in view.html, which draws them. A coordinate is an integer q of 16 bits:
x = centre + half · (8 q / 65534 − 4), with the centre and half-width of its section's window, and
q = 65535 where a point is not drawn. The page says beside a set what it leaves out.

Shapes: a set is `(n, d)`, or `(F, n, d)` over time, with NaN for a point at times when there is
none. y is up in 2-D, z in 3-D; of more than three axes the first three are drawn.
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

REACH, LEVELS = 4, 65534  # half-widths from the centre to the farthest point drawn; the largest q
GIVEN = ("real", "given", "true")  # kinds that are not of a model: drawn in grey
MOST_SETS, MOST_POINTS, MOST_NUMBERS = 200, 20_000, 6_000_000  # page, set, page: up to 16 MB


@dataclass
class Cloud:
    """A set of points, or a set over time, and what the page says of it."""

    x: np.ndarray  # (n, d) or (F, n, d)
    name: str = ""
    kind: str = ""  # grey if in GIVEN, else blue; each kind can be hidden
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
    shown = [s if isinstance(s, Cloud) else Cloud(s) for s in sets[:MOST_SETS]]
    shown = [(cloud, *_read(cloud, f"set {i}")) for i, cloud in enumerate(shown)]
    share, sections = MOST_NUMBERS / max(1, sum(x.size for _, x, _ in shown)), {}
    for cloud, x, times in shown:
        sections.setdefault((cloud.section, x.shape[-1]), []).append((cloud, x, times))
    page = {"about": about, "results": results or {}, "curves": curves, "given": GIVEN}
    page |= {"sections": [_section(*key, clouds, share) for key, clouds in sections.items()]}
    page |= {"end": any(c.times is None for c, x, _ in shown if len(x) > 1), "all": len(sets)}
    embedded = json.dumps(_plain(page), allow_nan=False).replace("<", "\\u003c")
    head, tail = Path(__file__).with_name("view.html").read_text("utf-8").split("{{data}}")
    text = head.replace("{{title}}", html.escape(title)) + embedded + tail
    write_whole(path, lambda f: f.write(text.encode("utf-8", "replace")))


def _read(cloud, where):
    """The frames (F, n, d ≤ 3) of a cloud, in a precision that holds any of them; their times."""
    try:
        x = np.asarray(cloud.x)
        x = x if x.dtype == np.float32 else x.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{where} is not an array of numbers: {e}") from None
    if x.ndim not in (2, 3) or not x.shape[-1] or len(x) < x.ndim - 2:
        raise ValueError(f"{where} has shape {x.shape}: want (n, d), or (F, n, d) with F > 0")
    x = (x if x.ndim == 3 else x[None])[..., :3]
    times = np.linspace(0, 1, len(x)) if cloud.times is None else np.array(cloud.times, np.float64)
    if times.shape != x.shape[:1] or not np.isfinite(times).all():
        raise ValueError(f"{where}: times {cloud.times}: want {len(x)} finite numbers")
    boxes = [None] * len(x) if cloud.boxes is None else list(cloud.boxes)
    if len(boxes) != len(x) or not {*boxes} <= {None, "red", "green"}:
        raise ValueError(f"{where}: boxes {boxes}: want {len(x)} of None, 'red' and 'green'")
    return x, times.round(9)


def _section(name, dim, clouds, share):
    """The window of some sets, the times at which any of them has a frame, and the sets."""
    ends = [x[-1:] if cloud.times is None else x for cloud, x, _ in clouds]  # data, without noise
    window = _window([x for _, x, _ in clouds], ends)
    moving = [times for _, x, times in clouds if len(x) > 1]
    union = np.unique(np.concatenate(moving)) if moving else np.zeros(1)
    return {
        **{"name": name, "dim": dim, "times": union if moving else []},
        **{"centre": 4 * window[0], "half": 4 * min(window[1], np.finfo(np.float64).max / 4)},
        "sets": [_describe(*cloud, window, union, share) for cloud in clouds],
    }


def _window(frames, ends):
    """Centre and half-width that show nearly all points of nearly all sets; both divided by 4.

    By 4, so that no difference of two coordinates overflows. Neither a few points far outside nor a
    set that is far larger than most, as from a model that diverged, make the others small. What is
    before the ends, such as noise, may reach to twice the half-width.
    """
    frames, ends = (
        [x[np.isfinite(x).all(-1)].astype(np.float64) / 4 for x in s] for s in (frames, ends)
    )
    points = [p for p in frames if len(p)] or [np.zeros((1, frames[0].shape[-1]))]
    middles = [np.quantile(p, (0.05, 0.95), axis=0).sum(0) / 2 for p in points]
    centre = np.median(middles, axis=0)
    sizes = [_half_width([p for p in s if len(p)] or points, centre) for s in (frames, ends)]
    return centre, min(sizes[0], max(sizes[0] / 2, sizes[1])) or 0.25


def _half_width(sets, centre):
    """Half the side of a window about `centre` that shows nearly all points of these sets."""
    radii = [functools.reduce(np.hypot, (p - centre).T, 0) for p in sets]
    with np.errstate(over="ignore"):
        pairs = [np.quantile(r, (0.5, 0.99)) for r in radii]
        sizes = [4 * some if 0 < 50 * some < most else most for some, most in pairs]
        return float(1.05 * min(max(sizes), 3 * np.median(sizes)))


def _describe(cloud, x, times, window, union, share):
    """What the page needs of a set: its words, its frame at each time, its points."""
    n, axes = x.shape[1], np.shape(cloud.x)[-1]
    keep = min(n, MOST_POINTS, max(1, int(n * share)))
    absent = np.isnan(x).all(-1) if len(x) > 1 else False  # for a part of the time
    infinite = (~np.isfinite(x).all(-1) & ~absent).any(0)
    if keep < n:  # at random: points may lie in an order
        x = x[:, np.sort(np.random.default_rng(0).choice(n, keep, replace=False))]
    q, far = _quantise(x, *window)
    notes = [f"axes 1–3 of {axes}"] * (axes > 3) + [f"{keep:,} of {n:,} points"] * (keep < n)
    notes += [f"{k:,} {why}" for k, why in ((infinite.sum(), "not finite"), (far, "too far")) if k]
    words = {name: getattr(cloud, name) for name in ("name", "kind", "label", "predicted")}
    return {
        **{name: None if word is None else str(word) for name, word in words.items()},
        **{"log_density": cloud.log_density, "note": ", ".join(notes), "points": keep},
        **{"times": None if cloud.times is None and len(x) == 1 else times, "boxes": cloud.boxes},
        "frame": np.abs(union[:, None] - times).argmin(1),  # the nearest, at each time
        "data": base64.b64encode(q.tobytes()).decode(),
    }


def _quantise(x, centre, half):
    """The integers q, little-endian, and how many points are too far out for them."""
    with np.errstate(over="ignore"):
        v = (x.astype(np.float64) / 4 - centre) / half
    near = (np.abs(v) <= REACH).all(-1)
    q = np.where(near[..., None], np.rint((v + REACH) * (LEVELS / (2 * REACH))), LEVELS + 1)
    return q.astype("<u2"), (np.isfinite(x).all(-1) & ~near).any(0).sum()


def _plain(value):
    """A value as JSON can hold it: as text where it is NaN, infinite or of another type."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite and isinstance(value, (int, float, str, type(None))) else str(value)
