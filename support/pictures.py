"""Pictures without a plotting library: sets of points, curves and confusion matrices as PNG.

    Fig. 3, 4     samples beside real sets             point_grid
    Fig. 5–8      series over time, boxed in colour    point_grid(frames=...), write_apng
    Sec. 4.2      which class is taken for which       confusion
    training      losses and metrics over epochs       curves

Every picture is an array of pixels `(h, w, 3)`, uint8, for `write_png`; several of one size make
an animation, for `write_apng`. Only numpy, zlib and the standard library are needed.

Shapes: a set is `(n, 2)`, y up, or `(n, 3)`, z up; pixels count from the top left. A `coverage`
`(h, w)` says how much of each pixel is inked, from 0 to 1. All edges are smoothed in one way:
drawn several times larger, then averaged over boxes.
"""

import functools
import itertools
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from support.files import write_whole

COLOURS = {
    "blue": (36, 99, 168),
    "orange": (222, 122, 34),
    "green": (34, 148, 90),
    "red": (206, 48, 56),
    "purple": (124, 86, 172),
    "teal": (20, 148, 164),
    "pink": (206, 92, 150),
    "grey": (112, 118, 130),
}
INK, SOFT, HAIR, PANEL, WHITE = 40, 104, 226, 247, 255  # greys: text, ticks, grid, cell, paper
UNIT, SMALL = 1.75, 1.5  # pixels in a unit of the font's grid: titles, and labels of axes
MARGIN, GAP, LINE = 18, 8, 18  # LINE: pixels from one line of text to the next


# ------------------------------------------------------------------------------- files
def write_png(path: str | Path, pixels: np.ndarray):
    """Write pixels, uint8 (h, w, 3) or grey (h, w), whole or not at all."""
    header, (data,) = _encode([pixels])
    _write(path, [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")])


def write_apng(
    path: str | Path, frames: Sequence[np.ndarray], seconds: float | Sequence[float] = 0.1
):
    """Write an endless animation; `seconds` for which a frame stays, a number or one for each."""
    header, data = _encode(frames)
    seconds = [seconds] * len(data) if np.ndim(seconds) == 0 else list(seconds)
    if len(seconds) != len(data):
        raise ValueError(f"{len(data)} frames but {len(seconds)} seconds")
    if not all(0 < s <= 65 for s in seconds):
        raise ValueError(f"seconds={seconds}: want each above 0 and at most 65")
    chunks, number = [(b"IHDR", header), (b"acTL", struct.pack(">II", len(data), 0))], 0
    for k, (frame, duration) in enumerate(zip(data, seconds)):
        rest = (0, 0, max(round(1000 * duration), 1), 1000, 0, 0)  # left, top, ms / 1000, no blend
        chunks.append((b"fcTL", struct.pack(">I8s2I2H2B", number, header[:8], *rest)))
        still = k == 0  # the first frame is what other readers show, and bears no number
        chunks.append(
            (b"IDAT", frame) if still else (b"fdAT", struct.pack(">I", number + 1) + frame)
        )
        number += 1 if still else 2
    _write(path, [*chunks, (b"IEND", b"")])


def _encode(frames):
    """The header that frames of one size share, and the compressed rows of each."""
    frames = [np.asarray(f) for f in frames]
    if not frames:
        raise ValueError("no frames to write")
    h, w, *channels = shape = frames[0].shape if frames[0].ndim > 1 else (0, 0, 0)
    for f in frames:
        if f.dtype != np.uint8 or not f.size or channels not in ([], [3]):
            raise ValueError(f"pixels are {f.dtype} {f.shape}: want uint8 (h, w, 3) or (h, w)")
        if f.shape != shape:
            raise ValueError(f"frames differ in size: {shape} and {f.shape}")
    header = struct.pack(">IIBBBBB", w, h, 8, 2 if channels else 0, 0, 0, 0)
    rows = [np.pad(f.reshape(h, -1), ((0, 0), (1, 0))) for f in frames]  # 0: no filter
    return header, [zlib.compress(r.tobytes(), 9) for r in rows]


def _write(path, chunks):
    def save(file):
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in chunks:
            crc = zlib.crc32(kind + data)
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc))

    write_whole(path, save)


# ------------------------------------------------------------------------------- ink
def _blank(height, width):
    return np.full((height, width, 3), WHITE, np.float32)


def _finish(canvas):
    return np.rint(canvas).astype(np.uint8)


def _colour(name):
    if name not in COLOURS:
        raise ValueError(f"no colour {name!r}: there are {', '.join(COLOURS)}")
    return np.array(COLOURS[name], np.float32)


def _blend(canvas, top, left, coverage, colour):
    """Ink of a colour where there is coverage; what lies outside the canvas is cut off."""
    up, before = max(-top, 0), max(-left, 0)
    h, w = np.maximum(np.add(coverage.shape, (top, left)), 0)
    part = canvas[max(top, 0) : h, max(left, 0) : w]
    coverage = coverage[up : up + part.shape[0], before : before + part.shape[1], None]
    part += coverage * (np.float32(colour) - part)


def _shrink(large, times):
    """Mean over boxes of times × times pixels."""
    rows = sum(large[i::times].astype(np.uint16) for i in range(times))
    return sum(rows[:, j::times] for j in range(times)) / np.float32(times * times)


def _disc(radius):
    """Offsets (i, j) of the pixels whose centres lie within `radius` of the middle one's."""
    i, j = np.mgrid[-int(radius) : int(radius) + 1, -int(radius) : int(radius) + 1]
    return i[near := np.hypot(i, j) <= radius], j[near]


def _stroke(lines, shape, width, times=4):
    """Coverage (h, w) = `shape` by a round pen of `width` along polylines (k, 2) of (x, y)."""
    pad = math.ceil(width * times)
    large = np.zeros((shape[0] * times + 2 * pad, shape[1] * times + 2 * pad), bool)
    for line in lines:
        line = np.asarray(line, np.float64) * times + pad
        far = np.cumsum([0, *np.abs(np.diff(line, axis=0)).max(1)])
        walk = np.linspace(0, far[-1], math.ceil(far[-1]) + 1)  # at most one pixel apart
        x, y = (np.interp(walk, far, line[:, k]).astype(np.int64) for k in (0, 1))
        room = (x >= pad) & (x < large.shape[1] - pad) & (y >= pad) & (y < large.shape[0] - pad)
        large[y[room], x[room]] = True
    y, x = np.nonzero(large)
    for i, j in zip(*_disc(width * times / 2)):
        large[y + i, x + j] = True
    return _shrink(large[pad:-pad, pad:-pad], times)


# ------------------------------------------------------------------------------- letters
# A glyph and its strokes: xy pairs of digits on a grid with the baseline at y = 2, small letters
# up to 6 and capitals up to 8. After ~ they are not corners but controls of a smooth curve.
FONT = """\
! 0804 02  " 0806 2826  # 1812 3832 0646 0444  $ ~4748080545420203 2921  ' 0806  ( ~29070321
% 0258 ~180806262818 ~443432525444  & ~420608383604024245  ) ~09272301  * 2824 0745 0547
+ 2723 0545  , 1201  - 0535  . 02  / 0139  0 ~050848420205  1 062822  2 ~0708484502 0242
3 ~0708484515 ~1545420203  4 32380444  5 480805 ~0506464202 ~220203  6 ~38080242460604  7 084812
8 ~280805454828 ~250502424525  9 ~12424808044446  : 05 02  ; 15 1201  < 470543  = 0646 0444
> 074503  ? ~070848452524 22  @ ~51010868634346 ~454626234345  A 022842 1434
B 0208 ~082848452505 ~052545422202  C ~474808024243  D 0208 ~081848421202  E 48080242 0535
F 480802 0535  G ~474808024245 4525  H 0208 4842 0545  I 0802  J ~3834320203  K 0802 4804 1542
L 080242  M 0208346862  N 02084248  O ~050252580805  P 0208 ~082848452505  Q ~050252580805 3351
R 0208 ~082848452505 2542  S ~4748080545420203  T 0848 2822  U ~080402424448  V 082248
W 0812375268  X 0842 0248  Y 0825 4825 2522  Z 08480242  [ 19090111  \\ 0931  ] 09191101
^ 062846  _ 0141  ` 0817  a ~0506363432 ~341404023233  b 0802 ~040636320204  c ~353606023233
d 3832 ~343606023234  e 0434 ~343606023233  f ~28181412 0626  g ~343606023234 ~3632300001
h 0802 ~0406363432  i 0602 08  j ~16121000 18  k 0802 3603 1432  l ~08040212
m 0602 ~0406262422 ~2426464442  n 0602 ~0406363432  o ~040636320204  p 0600 ~040636320204
q 3630 ~343606023234  r 0602 ~040626  s ~3536060434320203  t ~18141222 0626  u ~0604023234 3632
v 062246  w 0612365266  x 0632 0236  y 0622 4610  z 06360232  { ~29191505 ~05151121  | 0901
} ~09191525 ~25151101  ~ ~040626244446  µ ~0604023234 3632 0200  ² ~0809292706 0626  − 0545
± 2824 0646 0242  × 0642 0246  → 0555 375533  … 02 22 42  □ 0208484202"""
GLYPHS = {" ": ""} | dict(item.split(" ", 1) for item in FONT.replace("\n", "  ").split("  "))


def _bend(points):
    """The quadratic B-spline that runs from the first to the last of its controls."""
    knots = np.concatenate([points[:1], (points[1:-2] + points[2:-1]) / 2, points[-1:]])
    t = np.linspace(0, 1, 9)[:, None]
    arcs = zip(knots[:-1], points[1:-1], knots[1:])
    return np.concatenate([(1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c for a, b, c in arcs])


@functools.cache
def _glyph(char, unit):
    """Coverage (10 units, advance) of one character."""
    lines = []
    for code in GLYPHS[char].split():
        at = np.array([*code.removeprefix("~")], np.float64).reshape(-1, 2)
        lines.append(_bend(at) if code.startswith("~") else at)
    right = max((line[:, 0].max() for line in lines), default=0.7)
    lines = [(line * (1, -1) + (0.9, 9.5)) * unit for line in lines]
    return _stroke(lines, (round(10 * unit), round((right + 1.8) * unit)), 0.85 * unit, times=8)


def text(string, unit=UNIT, width=math.inf):
    """Coverage (10 units, w) of a line of text; of its beginning, if it is wider than `width`."""
    glyphs = [_glyph(c if c in GLYPHS else "□", unit) for c in string or " "]
    if sum(g.shape[1] for g in glyphs) > width:
        dots = _glyph("…", unit)
        while glyphs and sum(g.shape[1] for g in [*glyphs, dots]) > width:
            glyphs.pop()
        glyphs.append(dots)
    return np.concatenate(glyphs, 1)


def _put(canvas, string, x, y, across=0.5, down=0.5, *, grey=INK, unit=UNIT, turn=False, width=1e9):
    """Write a line so that (x, y) is at the fractions `across` and `down` of its box."""
    ink = text(string or "", unit, width)
    ink = np.rot90(ink) if turn else ink
    _blend(canvas, round(y - down * ink.shape[0]), round(x - across * ink.shape[1]), ink, grey)


def _put_title(canvas, title, left):
    """Write the title of a picture; returns where what is below it begins."""
    _put(canvas, title, left, MARGIN, 0, 0.2, width=canvas.shape[1] - left - MARGIN)
    return MARGIN + (LINE + GAP if title else 0)


# ------------------------------------------------------------------------------- point sets
def point_grid(
    rows,
    titles=None,
    row_labels=None,
    frames=None,
    *,
    title="",
    colours=None,
    limits=None,
    cell=112,
    dot=None,
    view=(-30, 25),
):
    """Rows of sets (n, 2) or (n, 3), or None for an empty cell; what is nearer is darker.

    titles      above the columns; or for each row a list, above its sets
    row_labels  left of the rows
    frames      for each row a list: None, or the colour of the box around that set
    title       above everything
    colours     of the rows
    limits      (low, high) of what a cell shows, across and up; points beyond are not drawn. None:
                all are, in one scale for the 2-D sets and one for the 3-D sets
    cell, dot   pixels of a cell's side and of a point's radius (None: by the number of points)
    view        (azimuth, elevation) in degrees from which 3-D sets are seen
    """
    rows = _check(rows)
    if cell < 24 or not 0 < (dot or 1) <= cell / 4:
        raise ValueError(f"cell={cell}, dot={dot}: want a cell ≥ 24 and a dot in (0, cell / 4]")
    titles, frames = _table(titles, rows, "titles"), _table(frames, rows, "frames")
    labels = _match(row_labels, len(rows), "row_labels")
    colours = [_colour(c or "blue") for c in _match(colours, len(rows), "colours")]
    sets = [s for row in rows for s in row if s is not None]
    windows = {dim: _window(sets, dim, limits, view) for dim in (2, 3)}
    left = MARGIN + max(text(s).shape[1] + GAP if s else 0 for s in labels)
    top, right = MARGIN + (LINE + GAP if title else 0), left + max(map(len, rows)) * (cell + GAP)
    bottom = top + LINE * sum(map(any, titles)) + len(rows) * (cell + GAP)
    canvas = _blank(bottom - GAP + MARGIN, right - GAP + MARGIN)
    _put_title(canvas, title, left)
    for i, row in enumerate(rows):
        top += LINE * any(titles[i])
        _put(canvas, labels[i], left - GAP, top + cell / 2, 1)
        for j, points in enumerate(row):
            x = left + j * (cell + GAP)
            _put(canvas, titles[i][j], x + cell / 2, top - LINE / 2 - 1, width=cell + GAP - 2)
            panel = canvas[top : top + cell, x : x + cell]
            if points is not None:
                middle, half = windows[points.shape[1]]
                _draw((look(points, view) - middle) / half, panel, dot, colours[i])
            if frames[i][j]:
                inner, panel[:] = panel[3:-3, 3:-3].copy(), _colour(frames[i][j])
                panel[3:-3, 3:-3] = inner
        top += cell + GAP
    return _finish(canvas)


def _check(rows):
    rows = [[None if s is None else np.asarray(s, np.float64) for s in row] for row in rows]
    if not any(rows):
        raise ValueError("an empty grid: rows holds no set")
    for i, j in ((i, j) for i, row in enumerate(rows) for j, s in enumerate(row) if s is not None):
        shape = (s := rows[i][j]).shape
        if s.ndim != 2 or shape[1] not in (2, 3):
            raise ValueError(f"rows[{i}][{j}] has shape {shape}: want (n, 2) or (n, 3)")
        if not (ok := np.isfinite(s).all(1)).all():
            raise ValueError(f"rows[{i}][{j}]: point {ok.argmin()} is not finite: {s[ok.argmin()]}")
    return rows


def _match(values, count, name):
    if values is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, not {count}")
    return [None] * count if values is None else list(values)


def _table(values, rows, name):
    """An entry for each cell; a flat list is for the first row."""
    if values is not None and any(isinstance(v, str) for v in values):
        values = [values, *[None] * (len(rows) - 1)]
    values = zip(_match(values, len(rows), name), rows)
    return [_match(v, len(row), f"{name}[{i}]") for i, (v, row) in enumerate(values)]


def as_seen(points):
    """The points of a set (n, d) that are not NaN, in two or three axes; None if there are none."""
    points = points[~np.isnan(points).any(-1), :3]
    points = np.pad(points, ((0, 0), (0, 1))) if points.shape[-1] == 1 else points
    return points if len(points) else None


def look(points, view):
    """(right, up) of points (..., 2); (right, up, towards the viewer) of points (..., 3)."""
    if points.shape[-1] == 2:
        return points
    (a, e), (x, y, z) = np.radians(view), np.moveaxis(points, -1, 0)
    right, back = x * np.cos(a) - y * np.sin(a), x * np.sin(a) + y * np.cos(a)
    up, near = z * np.cos(e) + back * np.sin(e), z * np.sin(e) - back * np.cos(e)
    return np.stack([right, up, near], -1)


def _window(sets, dim, limits, view):
    """Middle (dim,) and half the width of what is to be seen of the sets (n, dim) among these."""
    if limits is not None:
        low, high = limits
        if not low < high:
            raise ValueError(f"limits={limits}: want (low, high) with low < high")
        return look(np.full(dim, (low + high) / 2), view), (high - low) / 2
    sets = [look(s, view) for s in sets if len(s) and s.shape[1] == dim] or [np.zeros((1, dim))]
    low, high = np.min([s.min(0) for s in sets], 0), np.max([s.max(0) for s in sets], 0)
    return (low + high) / 2, (high - low)[:2].max() / 2 or 1.0


def _draw(seen, panel, radius, colour, times=4):
    """Fill a panel (cell, cell, 3) with the dots in [−1, 1]², from the farthest to the nearest."""
    cell, radius = len(panel), radius or len(panel) * 0.075 / max(len(seen), 16) ** 0.3
    seen = seen[(np.abs(seen[:, :2]) <= 1 + 1e-9).all(1)]
    seen = seen[np.argsort(seen[:, 2], kind="stable")] if seen.shape[1] == 3 else seen
    room = cell / 2 - radius - 4  # from the centre of the cell to that of the outermost dot
    at = (cell / 2 + room * seen[:, :2] * (1, -1)) * times  # (n, 2): x, y in large pixels
    i, j = _disc(radius * times + 1)
    x, y = np.floor(at[:, :1]).astype(np.int32) + j, np.floor(at[:, 1:]).astype(np.int32) + i
    u, v = (x + 0.5 - at[:, :1]) / (radius * times), (y + 0.5 - at[:, 1:]) / (radius * times)
    dot = u * u + v * v <= 1  # (n, pixels of a disc)
    level = np.zeros((cell * times, cell * times), np.uint8)  # 0 where there is no dot
    level[y[dot], x[dot]] = _tones(seen, u, v, dot)  # of the dots in a pixel the last one stays
    covered = _shrink(level > 0, times)
    mean = np.rint(_shrink(level, times) / np.maximum(covered, 0.01) / 8).astype(np.uint8)
    panel[:] = PANEL + covered[..., None] * (_ramp(colour)[mean] - PANEL)


def _tones(seen, u, v, dot):
    """Tones 1 to 255 within the dots: of 3-D sets by depth, and like balls lit from above left."""
    if seen.shape[1] == 2 or not len(seen):
        return 128
    depth = (seen[:, 2:] - seen[0, 2]) / max(seen[-1, 2] - seen[0, 2], 1e-9)
    light = np.sqrt(np.maximum(1 - u * u - v * v, 0)) - 0.55 * u - 0.75 * v
    return np.clip(60 + 255 * depth - 85 * light, 1, 255)[dot]


def _ramp(colour):
    """The colours of 33 tones, from the farthest to the nearest: few, so that files are small."""
    stops = np.stack([colour + 0.75 * (WHITE - colour), colour, 0.45 * colour])
    return np.stack([np.interp(np.arange(33), [0, 16, 32], c) for c in stops.T], 1)


# ------------------------------------------------------------------------------- curves
def curves(series, x_label="", y_label="", title="", *, log_y=False, size=(720, 420)):
    """Lines {name: (x, y)} over common axes, in `size` (w, h) pixels; gaps where y is not finite.

    A value between two gaps is a dot, and so is every value of a series of at most 25.
    """
    series = {name: _line(name, *xy, log_y) for name, xy in series.items()}
    ok = [np.isfinite(y) for _, y in series.values()]
    if not any(k.any() for k in ok):
        raise ValueError("no curves: there is no finite value in any series")
    xs, ys = (np.concatenate([v[k] for v, k in zip(of, ok)]) for of in zip(*series.values()))
    x_ticks = ticks(xs.min(), xs.max(), least=1 if (xs % 1 == 0).all() else 0)
    y_ticks = ticks(ys.min(), ys.max(), log=log_y)
    widest = max(text(n, SMALL).shape[1] for n in tick_names(y_ticks, log_y))
    left, right = MARGIN + widest + GAP + (LINE + 4) * bool(y_label), size[0] - MARGIN - GAP
    canvas = _blank(*size[::-1])
    top = _legend(canvas, _put_title(canvas, title, left), left, series)
    bottom = size[1] - MARGIN - LINE * (1 + bool(x_label))
    if min(bottom - top, right - left) < 40:
        raise ValueError(f"size={size}: too small for the axes and {len(series)} names")
    _put(canvas, x_label, (left + right) / 2, size[1] - MARGIN + 4, down=1)
    _put(canvas, y_label, MARGIN - 4, (top + bottom) / 2, across=0, turn=True)
    _axes(canvas, (left, top, right, bottom), x_ticks, y_ticks, log_y)
    for (x, y), colour in zip(series.values(), itertools.cycle(COLOURS)):
        at = place(x, x_ticks, left, right), place(y, y_ticks, bottom, top, log_y)
        _trace(canvas, np.stack(at, 1) + 0.5, _colour(colour))
    return _finish(canvas)


def _line(name, x, y, log_y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"series {name!r}: x {x.shape} and y {y.shape} want one common length")
    if not (ok := np.isfinite(x)).all():
        raise ValueError(f"series {name!r}: x[{ok.argmin()}] is not finite")
    if log_y and (y <= 0).any():
        raise ValueError(f"series {name!r}: {y[y <= 0][0]} has no place on a logarithmic axis")
    return x, y


def ticks(low, high, most=7, *, log=False, least=0):
    """At most 1 + `most` round numbers from one ≤ low to one ≥ high, `least` or more apart."""
    if log:
        return _log_ticks(low, high if low < high else 2 * low, most)
    if high - low <= 1e-9 * abs(high):  # one value: room on both sides
        room = max(abs(high) / 10, least) or 1
        low, high = low - room, high + room
    power = 10.0 ** math.floor(math.log10(max((high - low) / most, least)))
    for step in (k * power for k in (1, 2, 2.5, 5, 10, 20, 50)):
        if step >= least and not (least and step % least):
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            if last - first <= most:
                break
    return step * np.arange(first, last + 1)


def _log_ticks(low, high, most):
    a, b = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = np.outer(10.0 ** np.arange(a - 1, b + 2), (1, 2, 5)).ravel()  # a and b are rounded
    fine = fine[np.searchsorted(fine, low, "right") - 1 : np.searchsorted(fine, high) + 1]
    step = -(-(b - a) // most)
    return fine if len(fine) <= most + 1 else 10.0 ** np.arange(a, b + step, step)


def tick_names(values, log=False):
    """What to write at ticks: a comma after thousands, and the same decimals for all."""
    names = [f"{v:.10g}" for v in values]
    if not log and not any("e" in n for n in names):
        decimals = max(len(n.partition(".")[2]) for n in names)
        names = [f"{v:,.{decimals}f}" for v in values]
    return [n.replace("-", "−") for n in names]


def place(values, marks, start, end, log=False):
    """The map, linear in values or their logarithm, of marks[0] to start and marks[-1] to end."""
    values, low, high = (np.log10(v) if log else v for v in (values, marks[0], marks[-1]))
    return start + (values - low) / (high - low) * (end - start)


def _legend(canvas, top, left, names):
    """Names in the colours of their lines, from left to right; returns where they end."""
    x, y = left, top + 4
    for name, colour in zip(names, itertools.cycle(COLOURS)):
        width = 22 + text(name, SMALL).shape[1]
        if left < x and x + width > canvas.shape[1] - MARGIN:
            x, y = left, y + LINE
        _blend(canvas, y - 2, x, _stroke([[(2, 2), (16, 2)]], (4, 18), 2.5), _colour(colour))
        _put(canvas, name, x + 22, y, 0, unit=SMALL)
        x += width + 2 * GAP
    return y + LINE


def _axes(canvas, box, x_ticks, y_ticks, log_y):
    left, top, right, bottom = box
    heights = np.rint(place(y_ticks, y_ticks, bottom, top, log_y)).astype(int)
    for y, name in zip(heights, tick_names(y_ticks, log_y)):
        canvas[y, left : right + 1] = SOFT if y == bottom else HAIR
        _put(canvas, name, left - GAP, y, 1, grey=SOFT, unit=SMALL)
    for x, name in zip(place(x_ticks, x_ticks, left, right), tick_names(x_ticks)):
        canvas[bottom : bottom + 5, round(x)] = SOFT
        _put(canvas, name, x, bottom + 6, down=0, grey=SOFT, unit=SMALL)


def _trace(canvas, at, colour):
    """A line through the points (n, 2) that are finite, and dots where it would not be seen."""
    ok = np.isfinite(at).all(1)
    runs = [run[ok[run]] for run in np.split(np.arange(len(at)), np.flatnonzero(~ok))]
    alone = [run for run in runs if len(run) == 1] if len(at) > 25 else [ok]
    dots = [point[None] for run in alone for point in at[run]]
    pieces = [at[run[k : k + 1001]] for run in runs for k in range(0, len(run), 1000)]
    for lines, width in ((pieces, 2.2), (dots, 6)):
        if lines:
            _blend(canvas, 0, 0, _stroke(lines, canvas.shape, width), colour)


# ------------------------------------------------------------------------------- confusion
def confusion(matrix: Sequence, names: Sequence[str], title: str = "") -> np.ndarray:
    """Counts (true, predicted) as shares of their row: hits blue, mistakes red, both by √share."""
    counts = np.asarray(matrix, np.float64)
    if counts.ndim != 2 or len(set(counts.shape)) > 1 or not counts.size:
        raise ValueError(f"matrix has shape {counts.shape}: want (classes, classes)")
    if len(names) != len(counts):
        raise ValueError(f"{len(names)} names for {len(counts)} classes")
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError("matrix holds a count that is negative or not finite")
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1e-300)
    cell = int(np.clip(480 / len(names), 15, 64))
    widest, side = max(text(n, SMALL).shape[1] for n in names), cell * len(names)
    turn = widest > cell - 4
    left, above = MARGIN + LINE + widest + GAP, widest + 2 if turn else LINE
    top = MARGIN + (LINE + GAP if title else 0) + LINE + above
    canvas = _blank(top + side + 2 * MARGIN + GAP, left + max(side, 400) + MARGIN)
    _put_title(canvas, title, left)
    _put(canvas, "predicted", left + side / 2, top - above - 2, down=1)
    _put(canvas, "true", MARGIN, top + side / 2, across=0.2, turn=True)
    _squares(canvas, top, left, share, cell)
    for k, name in enumerate(names):
        at = (k + 0.5) * cell
        _put(canvas, name, left - GAP / 2, top + at, 1, grey=SOFT, unit=SMALL)
        _put(canvas, name, left + at, top - 2, down=1, grey=SOFT, unit=SMALL, turn=turn)
    _key(canvas, top + side + MARGIN, left)
    return _finish(canvas)


def _shade(share, colour):
    return WHITE + np.sqrt(share)[..., None] * (_colour(colour) - WHITE)


def _squares(canvas, top, left, share, cell):
    """The squares of a matrix of shares, with their percentage where there is room for it."""
    hit = np.eye(len(share), dtype=bool)[..., None]
    shade = np.where(hit, _shade(share, "blue"), _shade(share, "red"))
    side = cell * len(share)
    part = canvas[top : top + side + 1, left : left + side + 1]
    part[:-1, :-1] = shade.repeat(cell, 0).repeat(cell, 1)
    part[::cell] = part[:, ::cell] = HAIR
    for i, j in np.argwhere((share >= 0.005) & (cell >= 28)):
        grey = WHITE if share[i, j] > 0.3 else INK
        at = (j + 0.5) * cell, (i + 0.5) * cell
        _put(part, f"{100 * share[i, j]:.0f}", *at, grey=grey, unit=SMALL)


def _key(canvas, top, left):
    """What the shades of a confusion matrix mean."""
    _put(canvas, "% of true class", left, top + 6, 0, grey=SOFT, unit=SMALL)
    x = left + text("% of true class", SMALL).shape[1] + GAP
    for share in (0.01, 0.05, 0.2, 0.5, 1.0):
        canvas[top : top + 12, x : x + 10] = _shade(np.array(share), "blue")
        canvas[top : top + 12, x + 10 : x + 20] = _shade(np.array(share), "red")
        _put(canvas, f"{100 * share:g}", x + 25, top + 6, 0, grey=SOFT, unit=SMALL)
        x += 54
