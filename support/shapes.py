"""The built-in sets, so that everything runs without a download: pen-drawn digits and furniture.

Not in the paper: the digits stand in for SpatialMNIST, the solids for ModelNet.

Shapes: a source is a function (index, n, rng) → `(B, n, d)`, n points of each of the B sets at
`index`; triangles are `(B, F, 3, 3)`: set, face, corner, axis. What is drawn once per set is a
column `(B, 1)`. y (of digits) and z (of solids) point up.
"""

import math

import numpy as np

from support.meshes import surface_points

# ------------------------------------------------------------------------------- randomness
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TRAIN, VALID, TEST, ORDER, TWINS, SHAPE, SOME = range(7)  # what a stream of random numbers is for


def mix(z):
    """The finaliser of splitmix64: scrambles the 64 bits of each entry, in place, one to one."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


class Random:
    """A stream of random numbers per set: number k of call c for set i is hash(words, i, c, k)."""

    def __init__(self, index, *words):
        self.key = mix(np.array(index, np.uint64, ndmin=1) * GOLDEN)
        self.calls = 0
        for word in words:
            self.key = mix(self.key ^ mix(np.array([int(word) % 2**64], np.uint64) + GOLDEN))

    def uniform(self, *shape):
        """U[0, 1) of shape (sets, *shape), float32: two 24-bit numbers from each 64-bit hash."""
        count = math.prod(shape)
        pairs = -(-count // 2)
        self.calls += 1
        k = mix((np.arange(pairs, dtype=np.uint64) + np.uint64(self.calls << 32)) * GOLDEN)
        bits = mix(self.key[:, None] ^ k).view(np.uint32)[:, :count] >> np.uint32(8)
        return (bits.astype(np.float32) * np.float32(2**-24)).reshape(-1, *shape)

    def normal(self, *shape):
        """N(0, 1) of shape (sets, *shape), by Box and Muller."""
        u, v = np.moveaxis(self.uniform(2, *shape), 1, 0)
        return np.sqrt(-2 * np.log1p(-u)) * np.cos(np.float32(2 * np.pi) * v)


def hand_of(index):
    """A function (low, high) → one U[low, high) per set, as a column: the same at each draw."""
    rng = Random(index, SHAPE)
    return lambda low, high: np.float32(low) + np.float32(high - low) * rng.uniform(1)


# ------------------------------------------------------------------------------- digits
def _arc(x, y, rx, ry, start, stop):
    a = np.radians(np.linspace(start, stop, 40))
    return np.stack([x + rx * np.cos(a), y + ry * np.sin(a)], -1)


def _strokes(digit):
    """The pen strokes of a digit on [0, 1]², each a polyline (k, 2); y points up."""
    strokes = {
        0: [[_arc(0.5, 0.5, 0.27, 0.4, 90, 450)]],
        1: [[[(0.34, 0.74), (0.53, 0.9), (0.53, 0.1)]]],
        2: [[_arc(0.49, 0.67, 0.25, 0.23, 165, -35), [(0.24, 0.1), (0.78, 0.1)]]],
        3: [[_arc(0.47, 0.7, 0.23, 0.2, 150, -90), _arc(0.47, 0.3, 0.27, 0.2, 90, -150)]],
        4: [[[(0.58, 0.9), (0.2, 0.36), (0.82, 0.36)]], [[(0.63, 0.62), (0.63, 0.1)]]],
        5: [[[(0.73, 0.9), (0.33, 0.9), (0.29, 0.54)], _arc(0.47, 0.34, 0.27, 0.24, 125, -145)]],
        6: [[_arc(0.74, 0.34, 0.5, 0.56, 105, 180), _arc(0.5, 0.31, 0.26, 0.21, 180, 540)]],
        7: [[[(0.24, 0.9), (0.78, 0.9), (0.42, 0.1)]]],
        8: [[_arc(0.5, 0.7, 0.2, 0.19, -90, 270)], [_arc(0.5, 0.3, 0.26, 0.21, 90, 450)]],
        9: [[_arc(0.5, 0.69, 0.25, 0.21, 0, 360), [(0.75, 0.69), (0.66, 0.1)]]],
    }
    return [np.concatenate(pieces) for pieces in strokes[digit]]


def _ink(strokes):
    """512 points (512, 2), evenly spaced along the strokes."""
    pieces = np.concatenate([np.stack([s[:-1], s[1:]], 1) for s in strokes])
    a, ab = pieces[:, 0], pieces[:, 1] - pieces[:, 0]
    length = np.linalg.norm(ab, axis=-1)
    end = np.cumsum(length)
    at = (np.arange(512) + 0.5) / 512 * end[-1]
    k = np.searchsorted(end, at)
    return a[k] + ab[k] * (1 - (end[k] - at) / length[k])[:, None]


def glyphs(digits, first=0):
    """A function (index, n, rng) → (B, n, 2): points of pen-drawn digits on a canvas of 28 × 28.

    The digit and `first` + index of a set fix the pen and the hand; rng only places the ink.
    """
    ink = np.stack([_ink(_strokes(digit)) for digit in range(10)]).astype(np.float32)

    def pixels(index, n, rng):
        hand = hand_of(index + first)
        pick = (rng.uniform(n) * 512).astype(np.int64)
        x, y = np.moveaxis(ink[digits[index][:, None], pick] - np.float32(0.5), -1, 0)
        x = x + hand(0.0, 0.035) * np.sin(hand(4, 8) * y + hand(0, 6.28))  # an unsteady line
        y = y + hand(0.0, 0.035) * np.sin(hand(4, 8) * x + hand(0, 6.28))
        x, y = hand(0.7, 1.05) * x + hand(-0.1, 0.35) * y, hand(0.8, 1.02) * y
        a = hand(-0.15, 0.15)
        x, y = np.cos(a) * x - np.sin(a) * y, np.sin(a) * x + np.cos(a) * y
        r, a = hand(0.012, 0.045) * np.sqrt(rng.uniform(n)), 6.2832 * rng.uniform(n)
        x = x + r * np.cos(a) + hand(0.47, 0.53)
        y = y + r * np.sin(a) + hand(0.47, 0.53)
        return 28 * np.stack([x, y], -1)

    return pixels


# ------------------------------------------------------------------------------- solids
def loft(*rings, sides=4, up="z", closed=True):
    """Triangles (B, F, 3, 3) of a skin over rings (x, y, rx, ry, z): boxes, cones, wings.

    A ring is a rectangle (sides=4) or ellipse of half-widths rx, ry about (x, y) at height z; each
    entry is a number or a column. `up` is the axis that the rings are stacked along.
    """
    rings = [(*r[:2], 0, 0, r[4]) for r in rings[:1] if closed] + list(rings)
    rings += [(*r[:2], 0, 0, r[4]) for r in rings[-1:] if closed]
    entries = np.stack(np.broadcast_arrays(*[e for ring in rings for e in ring]))
    x, y, rx, ry, z = np.moveaxis(entries.reshape(len(rings), 5, -1, 1), 1, 0)
    angle = 2 * np.pi * (np.arange(sides, dtype=np.float32) + 0.5) / sides
    round_ = 1 / np.cos(np.pi / 4) if sides == 4 else 1  # so that a rectangle has its half-widths
    points = (x + round_ * rx * np.cos(angle), y + round_ * ry * np.sin(angle), z + 0 * angle)
    v = np.stack([points[i] for i in {"z": (0, 1, 2), "y": (0, 2, 1), "x": (2, 1, 0)}[up]], -1)
    a, b = v[:-1], v[1:]  # (rings − 1, B, sides, 3)
    c, d = np.roll(b, -1, -2), np.roll(a, -1, -2)
    faces = np.stack([np.stack([a, b, c], -2), np.stack([a, c, d], -2)])
    return np.moveaxis(faces, 2, 0).reshape(v.shape[1], -1, 3, 3).astype(np.float32)


def _box(x, y, rx, ry, low, high):
    return loft((x, y, rx, ry, low), (x, y, rx, ry, high))


def _legs(w, d, r, top, splay=0.0):
    feet = [(i * (w + splay), j * (d + splay), r, r, 0) for i in (-1, 1) for j in (-1, 1)]
    tops = [(i * w, j * d, r, r, top) for i in (-1, 1) for j in (-1, 1)]
    return [loft(foot, top) for foot, top in zip(feet, tops)]


def _maybe(present, parts):
    """The parts where `present` (B, 1), and a point without area elsewhere."""
    return [part * present[..., None, None] for part in parts]


def _airplane(r):
    long, fat, span, chord = r(0.9, 1.1), r(0.09, 0.16), r(0.8, 1.15), r(0.16, 0.26)
    sweep, root, tail, fin = r(0.1, 0.55), r(-0.05, 0.2), r(0.3, 0.45), r(0.25, 0.4)
    body = [(1, 0.05), (0.93, 0.55), (0.75, 1), (-0.35, 1), (-0.8, 0.5), (-1, 0.15)]
    parts = [loft(*[(0, 0, f * fat, f * fat, y * long) for y, f in body], sides=12, up="y")]
    engines = r(0, 1) < 0.7
    for side in (-1, 1):
        tip, end = root - sweep, side * span
        parts.append(loft((0, root, 0.03, chord, 0), (0.08, tip, 0.01, 0.35 * chord, end), up="x"))
        back = (0.02, -0.85 * long, 0.02, 0.1, 0), (0.05, -0.95 * long, 0.01, 0.06, side * tail)
        parts.append(loft(*back, up="x"))
        x, y = 0.4 * end, root - 0.4 * sweep + chord * 0.6
        jet = [(x, -0.06, r, r, y + dy) for dy, r in ((-0.14, 0.03), (0, 0.055), (0.1, 0.05))]
        parts += _maybe(engines, [loft(*jet, sides=12, up="y")])
    y = -0.82 * long
    return [*parts, loft((0, y, 0.015, 0.14, 0), (0, y - 0.14, 0.01, 0.07, fat + fin))]


def _bookshelf(r):
    w, d, h, t = r(0.4, 0.75), r(0.18, 0.3), r(1.2, 2.0), 0.02
    parts = [_box(side * w, 0, t, d, 0, h) for side in (-1, 1)]
    shelves = np.floor(r(3, 6))  # besides the lowest one
    for k in range(6):
        z = h * np.minimum(k / shelves, 1)
        parts += _maybe(k <= shelves, [_box(0, 0, w, d, z - t, z + t)])
    return parts


def _chair(r):
    w, d, h, t = r(0.4, 0.55), r(0.38, 0.5), r(0.7, 1.0), r(0.03, 0.07)
    back, lean, top, leg = r(0.7, 1.2), r(0.0, 0.3), r(0.75, 1.05), r(0.025, 0.06)
    parts = [_box(0, 0, w, d, h, h + 2 * t), *_legs(w - leg, d - leg, leg, h, r(0.0, 0.12))]
    parts.append(loft((0, d, w, 0.03, h), (0, d + lean, top * w, 0.03, h + back)))
    arms = [_box(side * w, -0.6 * d, 0.03, 0.03, h, h + 0.4) for side in (-1, 1)]
    arms += [_box(side * w, 0.1 * d, 0.05, 0.95 * d, h + 0.4, h + 0.45) for side in (-1, 1)]
    return parts + _maybe(r(0, 1) < 0.4, arms)


def _lamp(r):
    base, pole, h, shade = r(0.25, 0.45), r(0.02, 0.04), r(1.1, 1.9), r(0.35, 0.6)
    parts = [loft((0, 0, base, base, 0), (0, 0, 0.8 * base, 0.8 * base, 0.08), sides=12)]
    parts.append(loft((0, 0, pole, pole, 0), (0, 0, pole, pole, h), sides=12))
    tall, narrow = r(0.35, 0.6), shade * r(0.35, 0.8)
    rings = (0, 0, shade, shade, h - 0.3 * tall), (0, 0, narrow, narrow, h + 0.7 * tall)
    return [*parts, loft(*rings, sides=12, closed=False)]


def _table(r):
    w, d, h, t = r(0.6, 1.1), r(0.4, 0.7), r(0.6, 0.9), r(0.02, 0.05)
    leg = r(0.03, 0.07)
    parts = [_box(0, 0, w, d, h, h + 2 * t), *_legs(w - 0.1, d - 0.1, leg, h, r(-0.05, 0.08))]
    return parts + _maybe(r(0, 1) < 0.4, [_box(0, 0, w - 0.1, d - 0.1, 0.3 * h, 0.3 * h + t)])


def _vase(r):
    h, belly, wave, phase, lip = r(1.2, 2), r(0.35, 0.6), r(0.2, 0.6), r(3.5, 5.5), r(0.0, 0.2)
    z = np.linspace(0, 1, 17)
    radius = [belly * (1 - wave * (0.5 + 0.5 * np.cos(phase * k + 2.2))) + lip * k**6 for k in z]
    rings = [(0, 0, rad, rad, k * h) for rad, k in zip(radius, z)]
    return [loft((0, 0, 0, 0, 0 * h), *rings, sides=12, closed=False)]


SOLIDS = {f.__name__[1:]: f for f in (_airplane, _bookshelf, _chair, _lamp, _table, _vase)}


def solids(kinds, first=0):
    """A function (index, n, rng) → (B, n, 3): surface points of built-in shapes of radius 1."""

    def cloud(index, n, rng):
        x, u = np.empty((len(index), n, 3), np.float32), rng.uniform(n, 3)
        for kind in np.unique(kinds[index]):
            here = np.flatnonzero(kinds[index] == kind)
            parts = SOLIDS[kind](hand_of(index[here] + first))
            v = np.concatenate(parts, 1).reshape(len(here), -1, 3)  # three corners after three
            v -= (v.min(1, keepdims=True) + v.max(1, keepdims=True)) / 2
            v /= np.sqrt(np.einsum("bvi,bvi->bv", v, v).max(1))[:, None, None]
            x[here] = surface_points(v.reshape(len(here), -1, 3, 3), u[here])
        return x

    return cloud
