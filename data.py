"""Where the sets come from: SpatialMNIST, its rotating series, ModelNet, and built-in shapes.

    Sec. 4.2  PointCloud classification   load(task="classify"), modelnet_sets, augment
    Sec. 4.3  SpatialMNIST, ModelNet40    load(task="flow"), spatial_mnist, modelnet_sets
    Table 2   units of PPLL               Split.log_unit (add it to log p / n), Split.noise
    Sec. 4.4  rotating SpatialMNIST       load(task="temporal"), rotate_clockwise, Rotating
    App. C    sizes of sets and batches   POINTS; batches

Shapes: x is `(B, n, d)`, B sets of n points, float32 (`(B, T, n, d)` for series); mask is
`(..., n)`, True where a point exists, or None when all do. y and z point up.

Randomness: every number drawn for a set depends only on (seed, epoch, that set's index), never on
its neighbours in the batch. So one process or eight, any batch size, with or without worker
threads, resumed or not: the same sets. Validation and test sets are one fixed draw, whatever
the seed and epoch.

Departures from the paper
- "Sampled uniformly from active pixels" (Secs. 4.3, 4.4): as in the authors' code, pixels are drawn
  with probability proportional to intensity. Only that reproduces the published units and numbers.
- Sec. 4.4 speaks of 50 points in a series, App. C.3 and the authors' code of 64, our default.
- Sec. 4.4 samples the points after rotating the digit, so anew at each time; the authors' code
  draws them once and carries them along. We follow the text; `resample=False` follows the code.
  The noise there is U[0, 0.2) pixels; ours is U[−0.1, 0.1), so that the series stays centred.
- The noise of 0.001 is in "raw units", which differ from one copy of ModelNet to the next. Here
  every shape is first centred and scaled to radius 1, whatever it was read from.
- The classifier's sets are prepared like the flow's, noise included, as in the authors' code.
- Model selection needs data of its own: a tenth of the training sets is held out for it. Training
  shapes identical to a test shape are left out, and twins within the training data stay together.
- The built-in sets are ours, so that everything runs without a download.
"""

import argparse
import contextlib
import difflib
import errno
import functools
import hashlib
import http.client
import math
import os
import re
import shutil
import stat
import sys
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

POINTS = {"mnist": {"flow": 50, "classify": 100, "temporal": 64}}
POINTS["modelnet"] = {"flow": 512, "classify": 100}  # Sec. 4.2: 100 or 1000
MODELNET40 = (
    *("airplane", "bathtub", "bed", "bench", "bookshelf", "bottle", "bowl", "car", "chair", "cone"),
    *("cup", "curtain", "desk", "door", "dresser", "flower_pot", "glass_box", "guitar", "keyboard"),
    *("lamp", "laptop", "mantel", "monitor", "night_stand", "person", "piano", "plant", "radio"),
    *("range_hood", "sink", "sofa", "stairs", "stool", "table", "tent", "toilet", "tv_stand"),
    *("vase", "wardrobe", "xbox"),
)
MODELNET10 = (
    *("bathtub", "bed", "chair", "desk", "dresser", "monitor", "night_stand", "sofa", "table"),
    "toilet",
)
SIGMA = 0.001  # noise added to a ModelNet shape of radius 1
STORED = 2048  # points kept of each shape in the cache


class DataError(ValueError):
    """Data that is missing or wrong: one line naming the place, the fault and the way out."""


# ------------------------------------------------------------------------------- randomness
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TRAIN, VALID, TEST, ORDER, TWINS, SHAPE = range(6)  # what a stream of random numbers is for


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


def fingerprint(array):
    """63 bits, an int64, that tell the contents of two arrays apart."""
    return int.from_bytes(hashlib.blake2b(array.tobytes(), digest_size=8).digest(), "little") >> 1


def smallest(key, n):
    """For each row of key (B, m), the indices (B, n) of its n smallest entries, in order."""
    pick = np.argpartition(key, n - 1, -1)[:, :n]
    return np.take_along_axis(pick, np.argsort(np.take_along_axis(key, pick, -1), -1), -1)


def weighted_choice(cdf, u):
    """For each row of cdf (B, m), which ends at 1, the indices (B, n) where it first exceeds u."""
    row = np.arange(len(cdf))[:, None]
    found = np.searchsorted((cdf + row).ravel(), (u + row).ravel(), "right")
    return found.reshape(u.shape) - row * cdf.shape[1]


# ------------------------------------------------------------------------------- MNIST
MNIST = {  # md5 of the contents: every mirror compresses anew
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def read_bytes(path):
    """Contents of a file, gunzipped if it is gzip whatever its name says."""
    data = Path(path).read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    unzip, parts, again = zlib.decompressobj(31), [], "delete it and fetch it again"
    for at in range(0, len(data), 1 << 16):
        try:
            parts.append(unzip.decompress(data[at : at + (1 << 16)]))
        except zlib.error as e:
            raise DataError(f"{path}, offset {at} or later: damaged gzip ({e}); {again}") from None
    if not unzip.eof:
        raise DataError(f"{path}, offset {len(data)}: the gzip file ends early; {again}")
    if extra := len(unzip.unused_data):
        raise DataError(f"{path}, offset {len(data) - extra}: more than one gzip file; {again}")
    return b"".join(parts)


def read_idx(path, ndim):
    """The array in an IDX file of unsigned bytes with `ndim` axes, raw or gzipped."""
    data = read_bytes(path)
    magic = int.from_bytes(data[:4], "big")
    if len(data) < 4 or magic != 0x800 + ndim:
        raise DataError(
            f"{path}, offset 0: magic number {magic:#x}, not {0x800 + ndim:#x} of MNIST"
        )
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(ndim))
    want = 4 + 4 * ndim + math.prod(shape)
    if len(data) != want:
        raise DataError(
            f"{path}, offset {len(data)}: file ends, but its header promises {want} bytes"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def find_mnist(root, name):
    """Path of one MNIST file in a common layout: ours, torchvision's, or with a dot in its name."""
    folders = [Path(root) / "mnist", Path(root) / "MNIST" / "raw", Path(root)]
    for folder in folders:
        for file in (name, name + ".gz", name.replace("-idx", ".idx")):
            if (folder / file).is_file():
                return folder / file
    raise DataError(
        f"no MNIST: {name}[.gz] is not in {folders[0]}; "
        f"run `python data.py mnist --root {root}` or name its folder with --root"
    )


def read_mnist(root, part):
    """Images (N, 28, 28) and labels (N,) of "train" or "t10k"."""
    paths = [find_mnist(root, n) for n in MNIST if n.startswith(part)]
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{paths[0]}, offset 8: images of {images.shape[1:]} pixels, not (28, 28)")
    if len(images) != len(labels):
        raise DataError(
            f"{len(images)} images in {paths[0]} but {len(labels)} labels in {paths[1]}"
        )
    if len(labels) == 0 or labels.max() > 9:
        raise DataError(f"{paths[1]}: labels are not digits 0 to 9")
    if (blank := ~images.any((1, 2))).any():
        raise DataError(f"{paths[0]}: image {blank.argmax()} is blank, so no point can be drawn")
    return images, labels.astype(np.int64)


def spatial_mnist(images):
    """A function (index, n, rng) → (B, n, 2): n pixels (col, 27 − row) of each image.

    Without replacement, with probability proportional to intensity w: the n smallest of Eᵢ/wᵢ,
    Eᵢ ~ Exp(1) (Efraimidis and Spirakis). With replacement where fewer than n pixels are active.
    """
    where = np.flatnonzero(images)  # the active pixels of the first image, of the second, ...
    weight, count = images.ravel()[where], (images > 0).sum((1, 2))
    start = np.cumsum(count) - count
    where = (where % 784).astype(np.uint16)

    def pixels(index, n, rng):
        active = np.arange(max(count[index].max(), n))
        slot = np.minimum(start[index, None] + active, len(weight) - 1)  # (B, most active)
        w = np.where(active < count[index, None], weight[slot], np.float32(0))
        u = rng.uniform(len(active))
        with np.errstate(divide="ignore", invalid="ignore"):
            key = -np.log1p(-u) / w
        key[w == 0] = np.inf
        pick = smallest(key, n)
        if len(few := np.flatnonzero(count[index] < n)):
            cdf = np.cumsum(w[few], -1, dtype=np.float64)
            pick[few] = weighted_choice(cdf / cdf[:, -1:], u[few, :n])
        cell = where[np.take_along_axis(slot, pick, -1)]
        return np.stack([cell % 28, 27 - cell // 28], -1).astype(np.float32)

    return pixels


# ------------------------------------------------------------------------------- meshes
TENS = np.array([float(10**k) for k in range(23)])  # all that float64 holds exactly


def token_ends(text):
    """Offsets just past each blank-separated token of `text`, which ends with a blank."""
    gap = np.frombuffer(text, np.uint8) <= 32
    return np.flatnonzero(gap[1:] & ~gap[:-1]) + 1


def read_numbers(text, ends=None):
    """Every number in `text` (blank-separated, and a blank at the end), as float64.

    All digits of a number as one integer, divided by the power of ten that its dot says: the
    correctly rounded value up to 15 digits, several times faster than strtod. Exponents, NaN and
    longer numbers go through numpy's own parser; what that cannot read is a ValueError.
    """
    ends = token_ends(text) if ends is None else ends
    dots = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("."))
    token = np.searchsorted(ends, dots)
    with contextlib.suppress(ValueError):
        digits = np.fromstring(text.replace(b".", b""), np.int64, sep=" ")
        simple = len(digits) == len(ends) and (np.diff(token) > 0).all()
        places = np.zeros(len(ends), np.int64)
        places[token] = ends[token] - dots - 1
        if simple and max(np.abs(digits).max(initial=0) / 1e15, places.max(initial=0) / 23) < 1:
            return digits / TENS[places]
    numbers = np.fromstring(text, sep=" ")
    if len(numbers) != len(ends):
        raise ValueError("two numbers without a blank between them")
    return numbers


def read_off(data, name):
    """Vertices (V, 3) and triangles (F, 3) of an OFF mesh; polygons are fanned from a corner."""
    data = re.sub(rb"#[^\n]*", b"", data) + b"\n"
    head = re.match(rb"\s*OFF\s*(\d+)[ \t]+(\d+)(?:[ \t]+\d+)?[ \t\r]*\n", data)
    if not head:
        raise DataError(f"{name}, line 1: not an OFF mesh: it begins with {data[:20]!r}")
    vertices, faces = int(head[1]), int(head[2])
    ends = token_ends(data[head.end() - 1 :]) + head.end() - 1
    if not vertices or not faces:
        raise DataError(f"{name}, line {data.count(10, 0, head.end())}: the mesh has no faces")
    if len(ends) < 3 * vertices:
        line = data.rstrip().count(10) + 1
        raise DataError(f"{name}, line {line}: ends after {len(ends) // 3} of {vertices} vertices")
    cut = int(ends[3 * vertices - 1])
    text = data[head.end() : cut + 1]
    try:
        v = read_numbers(text, ends[: 3 * vertices] - head.end())
    except ValueError:
        v = np.array([np.nan])
    if not np.isfinite(v).all():
        raise DataError(f"{name}, {_bad_line(text, data.count(10, 0, head.end()) + 1)}")
    f = _uniform_faces(data[cut:], faces, len(ends) - 3 * vertices, vertices)
    if f is None:
        f = _mixed_faces(data[cut:], faces, vertices, name, data.count(10, 0, cut) + 1)
    return v.reshape(-1, 3), f


def _bad_line(text, first=1, columns=None):
    """What is wrong with the first line that is not of finite numbers, `columns` if given."""
    for number, line in enumerate(text.split(b"\n"), first):
        tokens = line.split()
        try:
            fine = all(math.isfinite(float(t)) for t in tokens)
        except ValueError:
            fine = False
        if not fine or (columns and tokens and len(tokens) != columns):
            return f"line {number}: {line.strip()!r} is not {columns or 'all'} numbers"
    return f"line {first}: no numbers in it"


def _uniform_faces(text, faces, tokens, vertices):
    """Triangles of a block whose faces all have the same number of corners, None of any other."""
    if tokens % faces:
        return None
    try:
        f = np.fromstring(text, np.int64, sep=" ").reshape(faces, -1)
    except ValueError:
        return None
    corners = f.shape[1] - 1
    if (
        corners < 3
        or (f[:, 0] != corners).any()
        or f[:, 1:].min() < 0
        or f[:, 1:].max() >= vertices
    ):
        return None
    first, last = f[:, 1:2].repeat(corners - 2, 1), f[:, 3:]
    return np.stack([first, f[:, 2:-1], last], -1).reshape(-1, 3)


def _mixed_faces(text, faces, vertices, name, line):
    """Triangles of a block of any polygons, with or without colours, one to a line."""
    triangles, seen = [], 0
    for number, row in enumerate(text.split(b"\n"), line):
        if not (row := row.split()):
            continue
        line = number
        try:
            corner = [int(c) for c in row[1 : 1 + int(row[0])]]
        except ValueError:
            raise DataError(f"{name}, line {line}: {b' '.join(row)!r} is not a face") from None
        seen += 1
        if seen > faces:
            raise DataError(f"{name}, line {line}: more than the {faces} faces of the header")
        if len(corner) < int(row[0]):
            raise DataError(
                f"{name}, line {line}: ends after {len(corner)} of {int(row[0])} corners"
            )
        if corner and not 0 <= min(corner) <= max(corner) < vertices:
            wrong = next(c for c in corner if not 0 <= c < vertices)
            raise DataError(f"{name}, line {line}: vertex {wrong} of {vertices} is not there")
        triangles += [(corner[0], *corner[i : i + 2]) for i in range(1, len(corner) - 1)]
    if seen < faces:
        raise DataError(f"{name}, line {line}: ends after {seen} of {faces} faces")
    return np.array(triangles, np.int64).reshape(-1, 3)


def surface_points(corners, u, name="mesh"):
    """Points (B, n, 3) uniform on triangles `corners` (B, F, 3, 3), from uniforms u (B, n, 3)."""
    planes = np.ascontiguousarray(corners.transpose(2, 3, 0, 1))  # far faster than rows of three
    (x, y, z), (r, s, t) = planes[1:] - planes[0]
    area = np.sqrt((y * t - z * s) ** 2 + (z * r - x * t) ** 2 + (x * s - y * r) ** 2)
    if not area.any(-1).all():
        raise DataError(f"{name}: the surface has no area")
    cdf = np.cumsum(area, -1, dtype=np.float64)
    face = weighted_choice(cdf / cdf[:, -1:], u[..., 0])
    p, q = u[..., 1], u[..., 2]
    beyond = p + q > 1  # the half of the parallelogram outside the triangle is turned into it
    p, q = np.where(beyond, 1 - p, p), np.where(beyond, 1 - q, q)
    mine = corners[np.arange(len(face))[:, None], face]  # (B, n, 3, 3)
    return np.einsum("bnk,bnki->bni", np.stack([1 - p - q, p, q], -1), mine)


def unit_radius(points):
    """Points (..., n, 3) centred on their mean and scaled: the farthest lies at distance 1."""
    points = points - points.mean(-2, keepdims=True)
    radius = np.sqrt((points**2).sum(-1)).max(-1)
    return points / radius[..., None, None]


# ------------------------------------------------------------------------------- preprocessing
def modelnet_sets(x, rng, mask=None):
    """Sets of shapes for all tasks: x + N(0, 0.001²), one min–max to [0, 1] per set, centred."""
    return unit_box(x + np.float32(SIGMA) * rng.normal(*x.shape[1:]), mask)[0]


def unit_box(x, mask=None):
    """Sets (B, n, d) scaled to [0, 1] by one min and max for all axes, then centred; the scale."""
    there = True if mask is None else mask[..., None]
    low = x.min((-2, -1), keepdims=True, where=there, initial=np.inf)
    scale = x.max((-2, -1), keepdims=True, where=there, initial=-np.inf) - low
    x = (x - low) / scale
    return x - x.mean(-2, keepdims=True, where=there), scale


def augment(x, rng):
    """App. C.1: each set turned about z by U[−0.15π, 0.15π) and scaled per axis by U[0.8, 1.25)."""
    theta = (rng.uniform() - np.float32(0.5)) * np.float32(0.3 * np.pi)
    c, s = np.cos(theta)[:, None], np.sin(theta)[:, None]
    x, y, z = np.moveaxis(x, -1, 0)
    turned = np.stack([c * x - s * y, s * x + c * y, z], -1)
    return turned * (np.float32(0.8) + np.float32(0.45) * rng.uniform(1, 3))


def rotate_clockwise(x, theta):
    """Points x (..., T, n, 2) turned about the origin by angles theta (T,); y points up."""
    c, s = (f(theta).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    return np.stack([c * x[..., 0] + s * x[..., 1], c * x[..., 1] - s * x[..., 0]], -1)


# ------------------------------------------------------------------------------- built-in digits
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


def glyphs(digits, first=0):
    """A function (index, n, rng) → (B, n, 2): points of pen-drawn digits on a canvas of 28 × 28.

    The digit and `first` + index of a set fix the pen and the hand; rng only places the ink.
    """
    ink = np.empty((10, 512, 2), np.float32)  # evenly spaced points along the strokes of each digit
    for digit in range(10):
        pieces = np.concatenate([np.stack([s[:-1], s[1:]], 1) for s in _strokes(digit)])
        a, ab = pieces[:, 0], pieces[:, 1] - pieces[:, 0]
        end = np.cumsum(np.linalg.norm(ab, axis=-1))
        at = (np.arange(512) + 0.5) / 512 * end[-1]
        k = np.searchsorted(end, at)
        ink[digit] = a[k] + ab[k] * (1 - (end[k] - at) / np.linalg.norm(ab, axis=-1)[k])[:, None]

    def pixels(index, n, rng):
        hand = functools.partial(_between, Random(index + first, SHAPE))
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


def _between(rng, low, high):
    """One U[low, high) per set, as a column (B, 1)."""
    return np.float32(low) + np.float32(high - low) * rng.uniform(1)


# ------------------------------------------------------------------------------- built-in solids
def loft(*rings, sides=4, up="z", closed=True):
    """Triangles (B, F, 3, 3) of a skin over rings (x, y, rx, ry, z): boxes, cones, wings.

    A ring is a rectangle (sides=4) or ellipse of half-widths rx, ry about (x, y) at height z; each
    entry is a number or one per set (B,). `up` is the axis that the rings are stacked along.
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
    """The parts where `present` (B,), and a point without area elsewhere."""
    return [part * present[:, None, None, None] for part in parts]


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
            size = Random(index[here] + first, SHAPE)
            parts = SOLIDS[kind](lambda lo, hi, size=size: _between(size, lo, hi)[:, 0])
            v = np.concatenate(parts, 1).reshape(len(here), -1, 3)  # three corners after three
            v -= (v.min(1, keepdims=True) + v.max(1, keepdims=True)) / 2
            v /= np.sqrt(np.einsum("bvi,bvi->bv", v, v).max(1))[:, None, None]
            x[here] = surface_points(v.reshape(len(here), -1, 3, 3), u[here])
        return x

    return cloud


# ------------------------------------------------------------------------------- ModelNet on disk
# A reader (path, category, part) returns the names of the shapes there, "train" or "test", and a
# function that gives `count` points of one of them.
def _mesh_points(data, name, count):
    """Points (count, 3) on the surface of an OFF mesh, seeded by its contents: twins stay twins."""
    v, f = read_off(data, name)
    u = np.random.default_rng([fingerprint(v), fingerprint(f)]).random((1, count, 3))
    return surface_points(v.take(f, 0)[None], u, name)[0]


def _some_points(points, name, count):
    """`count` of the points (k, ≥3) of a cloud, all if there are fewer, seeded by its contents."""
    points = np.ascontiguousarray(points[:, :3], np.float32)
    if not np.isfinite(points).all():
        raise DataError(f"{name}, point {np.isfinite(points).all(1).argmin()}: not a finite number")
    if len(points) == 0 or not np.ptp(points, 0).any():
        raise DataError(f"{name}: no two different points in it")
    return np.random.default_rng(fingerprint(points)).permutation(points)[:count]


def _off_tree(path, category, part):
    names = sorted((path / category / part).glob("[!.]*.off"))
    return names, lambda name, count: _mesh_points(name.read_bytes(), name, count)


@functools.lru_cache(maxsize=1)
def _open_zip(path, _changed):
    """An open zip file and its OFF members by (category, part); names that leave it are refused."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as e:
        raise DataError(f"{path}: not a whole zip file ({e}); fetch it again") from None
    members = {}
    for info in archive.infolist():
        parts = check_member(info, path)
        if len(parts) > 2 and parts[-1].endswith(".off") and not parts[-1].startswith("."):
            members.setdefault(parts[-3:-1], []).append(info.filename)
    return archive, members


def check_member(info, path):
    """The parts of a zip member's name, if it is a plain file or folder inside the archive."""
    parts = tuple(info.filename.replace("\\", "/").split("/"))
    outside = ".." in parts or parts[0] == "" or ":" in parts[0]
    if outside or stat.S_ISLNK(info.external_attr >> 16):
        raise DataError(f"{path}: refused, its member {info.filename!r} would leave the folder")
    return parts


def _off_zip(path, category, part):
    archive, members = _open_zip(path, path.stat().st_mtime_ns)

    def read(name, count):
        try:
            data = archive.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as e:
            raise DataError(f"{path}, member {name}: damaged ({e}); fetch the zip again") from None
        return _mesh_points(data, f"{path}/{name}", count)

    return sorted(members.get((category, part), [])), read


def _resampled(path, category, part):
    """modelnet40_normal_resampled: rows x,y,z,nx,ny,nz; the lists name the official parts."""
    try:
        names = (path / f"modelnet40_{part}.txt").read_text().split()
    except OSError as e:
        raise DataError(f"{path}: no list of the {part} shapes ({e})") from None

    def read(name, count):
        file = path / category / f"{name}.txt"
        try:
            text = file.read_bytes().replace(b",", b" ") + b"\n"
            table = read_numbers(text).reshape(-1, 6)
        except OSError as e:
            raise DataError(f"{file}: {e.strerror}; it is in the list of shapes") from None
        except ValueError:
            raise DataError(f"{file}, {_bad_line(text, columns=6)}") from None
        return _some_points(table, file, count)

    return [n for n in names if n.rpartition("_")[0] == category], read


def _hdf5(path, category, part):
    """modelnet40_ply_hdf5_2048 (a folder) or the authors' ModelNet40_cloud.h5 (one file)."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path} is HDF5: run `pip install h5py` to read it") from None
    if path.is_dir():
        files, keys = sorted(path.glob(f"ply_data_{part}*.h5")), ("data", "label")
    else:
        tag = {"train": "tr", "test": "test"}[part]
        files, keys = [path], (f"{tag}_cloud", f"{tag}_labels")
    names = []
    for file in files:
        try:
            with h5py.File(file) as f:
                labels = f[keys[1]][:].ravel()
        except (OSError, KeyError) as e:
            raise DataError(f"{file}: cannot read {keys[1]!r} ({e}); fetch it again") from None
        names += [(file, int(i)) for i in np.flatnonzero(labels == MODELNET40.index(category))]

    def read(name, count):
        try:
            with h5py.File(name[0]) as f:
                return _some_points(f[keys[0]][name[1]], f"{name[0]}, shape {name[1]}", count)
        except (OSError, KeyError) as e:
            raise DataError(f"{name[0]}: cannot read shape {name[1]} ({e})") from None

    return names, read


READERS = {
    "modelnet40": {
        "ModelNet40": _off_tree,
        "ModelNet40.zip": _off_zip,
        "modelnet40_normal_resampled": _resampled,
        "modelnet40_ply_hdf5_2048": _hdf5,
        "ModelNet40_cloud.h5": _hdf5,
    },
    "modelnet10": {"ModelNet10": _off_tree, "ModelNet10.zip": _off_zip},
}


def modelnet_points(root, name, category, part, points):
    """Shapes (N, m ≥ points, 3) of radius 1: from the cache, else from a copy, which fills it."""
    cache = Path(root) / name / f"{category}_{part}.npz"
    stored = read_cache(cache) if cache.is_file() else None
    if stored is not None and stored.shape[1] >= points:
        return stored
    for file, reader in READERS[name].items():
        path = Path(root) / file
        names, read = reader(path, category, part) if path.exists() else ((), None)
        if names:
            clouds, bar = [], Progress(f"{path}: {category} {part}", len(names))
            for shape in names:
                clouds.append(read(shape, max(STORED, points)))
                bar.show(len(clouds))
            fewest = min(map(len, clouds))
            if fewest < points:
                raise DataError(f"{path}: {fewest} points per shape, but {points} are asked for")
            stored = unit_radius(np.stack([c[:fewest] for c in clouds])).astype(np.float32)
            write_cache(cache, stored)
            return stored
    if stored is not None:
        raise DataError(f"{cache}: {stored.shape[1]} points per shape, but {points} are asked for")
    raise DataError(
        f"no {part} shapes of {category!r}: neither {cache} nor {', '.join(READERS[name])} in "
        f"{root}; run `python data.py {name.removesuffix('40')} --root {root}` or name its folder "
        "with --root"
    )


def read_cache(path):
    """`points` (shapes, m, 3) of an .npz file, never unpickling anything."""
    try:
        with np.load(path, allow_pickle=False) as f:
            points = f["points"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise DataError(f"{path}: no cache of points ({e}); delete it to renew it") from None
    if points.ndim != 3 or points.shape[-1] != 3 or points.dtype.kind != "f":
        raise DataError(f"{path}: points are {points.dtype}{points.shape}, not float(shapes, m, 3)")
    if not (fine := np.isfinite(points).all((1, 2))).all():
        raise DataError(f"{path}: shape {fine.argmin()} is not finite; delete it to renew it")
    return points


def write_cache(path, points):
    """Save `points` under its name in one step; a folder that cannot be written to is no error."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as f:
            np.savez(f, points=points)
        os.replace(part, path)
    except OSError as e:
        if e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise DataError(f"{path}: cannot write the cache: {e.strerror}; make room") from None
        say(f"{path}: not cached ({e.strerror}), so it will be read again next time")
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------- splits and batches
class Batch(NamedTuple):
    """B sets: x (B, n, d), or (B, T, n, d) at times t (T,); mask is None if all points exist."""

    x: torch.Tensor
    mask: torch.Tensor | None
    label: torch.Tensor
    t: torch.Tensor | None


@dataclass(frozen=True)
class Flat:
    """Sets on the unit square, from points on a canvas of 28 × 28 pixels plus U[0, noise)²."""

    pixels: Callable
    noise: float
    log_unit: float
    times, dim, sigma = None, 2, None

    def sample(self, index, n, rng, mask):
        return (self.pixels(index, n, rng) + np.float32(self.noise) * rng.uniform(n, 2)) / 28


@dataclass(frozen=True)
class Rotating:
    """Series (B, T, n, 2): digits turned clockwise by θ = πt, in units of half their canvas."""

    pixels: Callable
    times: np.ndarray
    resample: bool
    log_unit, dim, sigma = -2 * math.log(14), 2, None

    def sample(self, index, n, rng, mask):
        draws = [self.pixels(index, n, rng) for _ in (self.times if self.resample else (0,))]
        x = np.stack(draws, 1)  # (B, T or 1, n, 2)
        x = x - x.mean(-2, keepdims=True, where=True if mask is None else mask[:, None, :, None])
        x = rotate_clockwise(x, np.pi * self.times)
        return (x + np.float32(0.2) * (rng.uniform(*x.shape[1:]) - np.float32(0.5))) / 14


@dataclass(frozen=True)
class Solid:
    """Sets of surface points, prepared as in the paper, and augmented if asked."""

    cloud: Callable
    augment: bool
    log_unit, times, dim, sigma = 0.0, None, 3, SIGMA

    def sample(self, index, n, rng, mask):
        x = modelnet_sets(self.cloud(index, n, rng), rng, mask)
        return augment(x, rng) if self.augment else x


@dataclass(frozen=True, eq=False)
class Split:
    """Some sets of a source, drawn anew in every epoch of training, else always the same."""

    source: Flat | Rotating | Solid
    index: np.ndarray  # of its sets within the source
    labels: np.ndarray  # of all sets of the source
    classes: tuple[str, ...]
    points: int | tuple[int, int]  # in each set; (low, high): a random number of them
    use: int = TRAIN

    def __len__(self):
        return len(self.index)

    dim = property(lambda self: self.source.dim)
    times = property(lambda self: self.source.times)
    log_unit = property(lambda self: self.source.log_unit)  # PPLL = log p / n + log_unit

    def draw(self, where, *, points=None, seed=0, epoch=0):
        """x, mask and label of the sets at positions `where`, as numpy arrays."""
        low, n = span(self.points if points is None else points)
        words = (TRAIN, seed, epoch) if self.use == TRAIN else (self.use,)
        done = []
        for i in range(0, len(where), 512):  # what fits the processor's cache is faster
            index = self.index[where[i : i + 512]]
            rng, mask = Random(index, *words), None
            if low < n:
                size = low + (rng.uniform(1) * (n + 1 - low)).astype(np.int64)
                mask = np.arange(n) < size
            x = self.source.sample(index, n, rng, mask)
            if mask is not None:
                mask = mask if x.ndim == 3 else np.repeat(mask[:, None], x.shape[1], 1)
                x *= mask[..., None]
            done.append((x, mask, self.labels[index]))
        x, mask, label = zip(*done)
        return np.concatenate(x), None if low == n else np.concatenate(mask), np.concatenate(label)

    def noise(self, points=None):
        """Mean σ of the Gaussian noise after scaling, over one draw of each set; None if none."""
        if self.source.sigma is None:
            return None
        n, total = span(self.points if points is None else points)[1], 0.0
        for i in range(0, len(self), 512):
            index = self.index[i : i + 512]
            scale = unit_box(self.source.cloud(index, n, Random(index, TEST)))[1]
            total += float((self.source.sigma / scale).sum())
        return total / len(self)


class Splits(NamedTuple):
    train: Split
    valid: Split
    test: Split


def span(points):
    """(low, high) of a number of points or of a pair of them."""
    low, high = points if isinstance(points, tuple | list) else (points, points)
    if not 1 <= low <= high:
        raise DataError(f"points={points!r}: want a number ≥ 1, or a pair low ≤ high of them")
    return low, high


def hold_out(train, test, fraction, seed):
    """Indices (train, valid) of the training sets, given what identifies each set's contents.

    Those identical to a test set are in neither; identical ones are on the same side.
    """
    keep = np.flatnonzero(~np.isin(train, test))
    if gone := len(train) - len(keep):
        say(f"{gone} training sets identical to a test set are left out")
    twins, group = np.unique(train[keep], return_inverse=True)
    count = max(round(fraction * len(twins)), 1)
    if not 0 < fraction < 1 or count >= len(twins):
        raise DataError(f"valid={fraction}: cannot hold out that share of {len(twins)} sets")
    chosen = np.argsort(Random(np.arange(len(twins)), TWINS, seed).key)[:count]
    chosen = np.isin(group, chosen)
    return keep[~chosen], keep[chosen]


def steps(split, batch_size, training=True):
    """Batches in an epoch; in training the last, incomplete one is left out."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: want at least 1")
    return max(len(split) // batch_size, 1) if training else -(-len(split) // batch_size)


def batches(
    split,
    batch_size,
    *,
    points=None,
    seed=0,
    epoch=0,
    start=0,
    training=True,
    rank=0,
    world=1,
    workers=0,
    device="cpu",
) -> Iterator[Batch]:
    """The batches of one epoch from number `start` on: a pure function of (seed, epoch).

    `batch_size` counts the sets of all `world` processes together; each gets its own share of every
    batch. In training the order is shuffled and the last, incomplete batch is left out. `workers`
    threads prepare batches ahead; the sequence is the same whatever their number.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank}: want 0 ≤ rank < world={world}")
    order, size = np.arange(len(split)), batch_size
    if training:
        if batch_size % world or len(split) < world:
            raise ValueError(f"a batch of {min(batch_size, len(split))} sets for {world} processes")
        order = np.argsort(Random(order, ORDER, seed, epoch).key)
        size = min(batch_size, len(split) - len(split) % world)
    t = None if split.times is None else split.times.astype(np.float32)

    def tensor(array):
        if array is None:
            return None
        array = torch.from_numpy(array)
        array = array.pin_memory() if torch.device(device).type == "cuda" else array
        return array.to(device, non_blocking=True)

    def prepare(step):
        where = order[step * batch_size : step * batch_size + size][rank::world]
        arrays = split.draw(where, points=points, seed=seed, epoch=epoch)
        return Batch(*map(tensor, (*arrays, t)))

    todo = range(start, steps(split, batch_size, training))
    todo = [step for step in todo if step * batch_size + rank < len(split)]
    if workers:
        yield from _ahead(prepare, todo, workers)
    else:
        yield from map(prepare, todo)


def _ahead(prepare, todo, workers):
    """map(prepare, todo), in order, computed by that many threads ahead of the one who asks."""
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque(pool.submit(prepare, step) for step in todo[:workers])
        for step in [*todo[workers:], *[None] * len(waiting)]:
            ready = waiting.popleft().result()
            if step is not None:
                waiting.append(pool.submit(prepare, step))
            yield ready


def choose(names, wanted, what):
    """Those of `names` that are wanted, all if None."""
    for w in wanted or ():
        if w not in names:
            near = difflib.get_close_matches(w, names, 1, 0)
            raise DataError(f"no category {w!r} in {what}: did you mean {near[0]!r}?")
    return tuple(names if wanted is None else [n for n in names if n in wanted])


# ------------------------------------------------------------------------------- load
def load(
    name="synthetic",
    root="data",
    *,
    task="flow",
    category=None,
    points=None,
    seed=0,
    valid=0.1,
    times=(0, 0.25, 0.5, 0.75, 1),
    resample=True,
    augment=None,
) -> Splits:
    """The sets called "synthetic", "mnist", "modelnet" (40) or "modelnet10", for one task.

    task      "flow", "classify" or "temporal", which turns 2-D digits at `times`
    category  name, "several,names", a list, or None for all; of "synthetic" also "digits" (the
              default but for classification) or "shapes"
    points    in a set; (low, high) for ragged sets; None for the paper's
    valid     fraction of the training sets held out, chosen by `seed`
    resample  draw points anew at each time, as the paper says, or carry them along
    augment   turn and scale 3-D training sets; None: to classify 1000 points or more
    """
    if task not in ("flow", "classify", "temporal"):
        raise DataError(f"no task {task!r}: want flow, classify or temporal")
    solid, category = _is_solid(name, task, category), _by_name(category)
    if solid and task == "temporal":
        raise DataError("temporal sets are turned digits: use mnist, or synthetic digits")
    if augment and not solid:
        raise DataError(f"augment is for 3-D shapes, not for the digits of {name!r}")
    points = POINTS["modelnet" if solid else "mnist"][task] if points is None else points
    most = span(points)[1]
    if name == "mnist":
        classes, parts = _mnist_parts(root, category)
    elif name == "synthetic":
        classes, parts = _synthetic_parts(solid, category)
    else:
        classes, parts = _modelnet_parts(root, name, category, most)
    augment = solid and task == "classify" and most >= 1000 if augment is None else augment

    def source(pick, augment=False):
        if solid:
            return Solid(pick, augment)
        if task == "temporal":
            return Rotating(pick, np.asarray(times, np.float64), resample)
        return Flat(pick, 1.0, -2 * math.log(28)) if name == "mnist" else Flat(pick, 0.0, 0.0)

    (pick, labels, identity), (test_pick, test_labels, test_identity) = parts
    index, held = hold_out(identity, test_identity, valid, seed)
    every = np.arange(len(test_labels))
    return Splits(
        Split(source(pick, augment), index, labels, classes, points, TRAIN),
        Split(source(pick), held, labels, classes, points, VALID),
        Split(source(test_pick), every, test_labels, classes, points, TEST),
    )


def _by_name(category):
    """A list of names, or None for all."""
    if category in (None, "all", "digits", "shapes"):
        return None
    return [c.strip() for c in category.split(",")] if isinstance(category, str) else list(category)


def _is_solid(name, task, category):
    """Whether these are 3-D shapes rather than 2-D digits."""
    if name not in ("synthetic", "mnist", "modelnet", "modelnet40", "modelnet10"):
        raise DataError(f"no data called {name!r}: want synthetic, mnist, modelnet or modelnet10")
    if name != "synthetic":
        return name != "mnist"
    if category in (None, "all"):
        return task == "classify"
    return category == "shapes" or not set(_by_name(category) or "0") & set("0123456789")


def _mnist_parts(root, category):
    """Categories; then for the training and the test data: pixels, labels, identities."""
    classes, parts = choose(tuple("0123456789"), category, "MNIST"), []
    for part in ("train", "t10k"):
        images, digits = read_mnist(root, part)
        label = np.array([classes.index(d) if d in classes else -1 for d in "0123456789"])[digits]
        images, label = images[label >= 0], label[label >= 0]
        parts.append((spatial_mnist(images), label, np.array([fingerprint(i) for i in images])))
    return classes, parts


def _synthetic_parts(solid, category):
    names = tuple(SOLIDS) if solid else tuple("0123456789")
    classes, parts = choose(names, category, f"built-in {'shapes' if solid else 'digits'}"), []
    for first, size in ((0, 6000), (6000, 1000)):
        label = np.arange(size) % len(classes)
        kinds = np.array(classes)[label]
        pick = solids(kinds, first) if solid else glyphs(kinds.astype(np.int64), first)
        parts.append((pick, label, np.arange(first, first + size)))
    return classes, parts


def _modelnet_parts(root, name, category, points):
    name = "modelnet40" if name == "modelnet" else name
    classes = choose(MODELNET10 if name == "modelnet10" else MODELNET40, category, name)
    clouds = [
        [modelnet_points(root, name, c, p, points) for c in classes] for p in ("train", "test")
    ]
    stored, parts = min(c.shape[1] for part in clouds for c in part), []
    for part in clouds:
        label = np.repeat(np.arange(len(part)), [len(c) for c in part])
        part = np.concatenate([c[:, :stored] for c in part])
        parts.append((stored_cloud(part), label, np.array([fingerprint(c) for c in part])))
    return classes, parts


def stored_cloud(clouds):
    """A function (index, n, rng) → (B, n, 3): n different ones of a cloud's m points (N, m, 3)."""

    def cloud(index, n, rng):
        pick = smallest(rng.uniform(clouds.shape[1]), n)
        return clouds[index[:, None], pick].astype(np.float32)

    return cloud


# ------------------------------------------------------------------------------- download
URLS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "modelnet": "https://modelnet.cs.princeton.edu/",
    "modelnet10": "https://3dvision.princeton.edu/projects/2014/3DShapeNets/",
}


def say(text):
    print(f"data: {text}", file=sys.stderr, flush=True)


class Progress:
    """A line with the share done and the time left: in place on a terminal, else every 10 s."""

    def __init__(self, label, total, done=0):
        self.label, self.total, self.first = label, total, done
        self.started = self.shown = time.monotonic()

    def show(self, done):
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if self.total and now - self.shown > (0.5 if terminal else 10):
            self.shown = now
            left = (now - self.started) * (self.total - done) / max(done - self.first, 1)
            text = f"data: {self.label}: {done / self.total:.0%}, {left:.0f} s left"
            print(text, end="\033[K\r" if terminal else "\n", file=sys.stderr, flush=True)
        if terminal and done == self.total:
            print(end="\033[K", file=sys.stderr, flush=True)


def fetch(url, path, check, *, timeout=30.0, tries=5, pause=1.0):
    """Download to `path`, which appears only when whole and `check(file)` raises no DataError.

    What has arrived waits in path.part, from where this call, or a later one, goes on.
    """
    part, failures = path.with_name(path.name + ".part"), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    while failures < tries:
        if failures:
            time.sleep(min(pause * 2 ** (failures - 1), 30))
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(url, part, before, timeout)
            check(part)
            return os.replace(part, path)
        except DataError as e:
            part.unlink(missing_ok=True)
            trouble, failures = e, failures + 1
        except (OSError, http.client.HTTPException) as e:
            if getattr(e, "code", 500) < 500 and e.code not in (408, 429):
                raise DataError(f"{url}: {e}; name another address with --url") from None
            if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise DataError(f"{part}: {e.strerror}; once mended, run it again") from None
            grew = part.exists() and part.stat().st_size > before
            trouble, failures = e, 0 if grew else failures + 1
    raise DataError(f"{url}: {trouble}, {tries} times; run the same command again to go on")


def _transfer(url, part, have, timeout):
    """Append what is missing to `part`, or write it anew if the server cannot resume."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        reply = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        return  # nothing comes after `have`: the file is whole, or not this one; the check will say
    with reply:
        if not (reply.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            have = 0
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = Progress(url, total, have)
        with open(part, "ab" if have else "wb") as f:
            while piece := reply.read1(1 << 16):
                f.write(piece)
                f.flush()  # so that even a killed download can be taken up
                have += len(piece)
                bar.show(have)
    if total is not None and have < total:
        raise ConnectionError(f"connection closed at byte {have} of {total}")


def check_mnist(path):
    """Raise a DataError unless a file has the published contents, however compressed."""
    want = MNIST[path.name.removesuffix(".part").removesuffix(".gz")]
    if (got := hashlib.md5(read_bytes(path)).hexdigest()) != want:
        raise DataError(f"{path}: md5 of the contents is {got}, not {want}")


def check_zip(path):
    """Raise a DataError unless every member of a zip file is whole and stays inside it."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                check_member(info, path)
            broken = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError) as e:
        raise DataError(f"{path}: not a whole zip file ({e})") from None
    if broken:
        raise DataError(f"{path}: member {broken} is damaged")


def unpack(path, folder):
    """Unpack a zip file with one folder in it as `folder`, which appears only when whole."""
    check_zip(path)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(part)
        os.replace(part / folder.name, folder)
    except OSError as e:
        raise DataError(f"{folder}: cannot unpack {path}: {e.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description="Download data: MNIST (12 MB), ModelNet40 (2 GB) or ModelNet10 (0.5 GB). "
        "Run it again to go on with what is missing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", choices=URLS, help="what to download")
    parser.add_argument("--root", default="data", help="folder to download into")
    parser.add_argument("--url", help="address of the folder with the files; None: the publisher's")
    parser.add_argument("--timeout", type=float, default=30, help="seconds to wait for a server")
    parser.add_argument("--tries", type=int, default=5, help="failures in a row before giving up")
    parser.add_argument(
        "--unpack",
        action="store_true",
        help="unpack ModelNet's zip, though it can be read as it is",
    )
    args = parser.parse_args(argv)
    if args.unpack and args.data == "mnist":
        parser.error("--unpack is for ModelNet: MNIST is read as it comes")
    if args.tries < 1 or args.timeout <= 0:
        parser.error(f"want --tries ≥ 1 and --timeout > 0, not {args.tries} and {args.timeout:g}")
    return args


def download(args):
    """Fetch what is missing or damaged of `args.data`."""
    root, base = Path(args.root), (args.url or URLS[args.data]).rstrip("/") + "/"
    files, check = [root / "mnist" / f"{name}.gz" for name in MNIST], check_mnist
    if args.data != "mnist":
        name = "ModelNet10.zip" if args.data == "modelnet10" else "ModelNet40.zip"
        files, check = [root / name], check_zip
    for path in files:
        try:
            whole = path.exists() and check(path) is None
        except DataError as e:
            say(f"{e}; fetching it again")
            whole = False
        if not whole:
            say(f"{base}{path.name} → {path}")
            fetch(base + path.name, path, check, timeout=args.timeout, tries=args.tries)
        say(f"{path} is there and whole")
        if args.unpack and not (folder := path.with_suffix("")).exists():
            unpack(path, folder)
            say(f"{folder} is unpacked")


def main(argv=None):
    """Exit code of the command line: 0 done, 2 wrong usage or data, 130 interrupted."""
    args = parse(argv)
    try:
        download(args)
    except (DataError, OSError) as e:
        say(e)
        return 2
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
