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
  they are those of a shape of radius 1, whatever it was read from (support/meshes.py).
- The classifier's sets are prepared like the flow's, noise included, as in the authors' code.
- Model selection needs data of its own: a tenth of the training sets is held out for it. Training
  shapes identical to a test shape are left out, and twins within the training data stay together;
  twins are told by their stored points, so cached files should hold as many points of every shape.
- The built-in sets (support/shapes.py) are ours, so that everything runs without a download.
"""

import argparse
import contextlib
import difflib
import hashlib
import http.client
import math
import operator
import os
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

from support import meshes
from support.meshes import DataError, fingerprint, read_off, say, surface_points  # noqa: F401
from support.shapes import ORDER, SOLIDS, TEST, TRAIN, TWINS, VALID, Random, glyphs, solids

POINTS = {"mnist": {"flow": 50, "classify": 100, "temporal": 64}}
POINTS["modelnet"] = {"flow": 512, "classify": 100}  # Sec. 4.2: 100 or 1000
SIGMA = 0.001  # noise added to a ModelNet shape of radius 1
DIGITS = tuple("0123456789")


# ------------------------------------------------------------------------------- MNIST
MNIST = {  # md5 of the contents: every mirror compresses anew
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
AGAIN = "delete it and fetch it again"


def read_bytes(path):
    """Contents of a file, gunzipped if it is gzip whatever its name says."""
    data = Path(path).read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    unzip, parts = zlib.decompressobj(31), []
    for at in range(0, len(data), 1 << 16):
        try:
            parts.append(unzip.decompress(data[at : at + (1 << 16)]))
        except zlib.error as e:
            raise DataError(f"{path}, offset {at} or later: damaged gzip ({e}); {AGAIN}") from None
        if sum(map(len, parts)) > meshes.LARGEST:
            raise DataError(f"{path}, offset {at}: too large to be of MNIST; {AGAIN}")
    if not unzip.eof or unzip.unused_data:
        end = len(data) - len(unzip.unused_data)
        raise DataError(f"{path}, offset {end}: the gzip file ends early, or more follows; {AGAIN}")
    return b"".join(parts)


def read_idx(path, ndim):
    """The array in an IDX file of unsigned bytes with `ndim` axes, raw or gzipped."""
    data = read_bytes(path)
    magic, *shape = (int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(1 + ndim))
    if magic != 0x800 + ndim:
        raise DataError(
            f"{path}, offset 0: magic number {magic:#x}, not {0x800 + ndim:#x}; {AGAIN}"
        )
    if len(data) != (want := 4 + 4 * ndim + math.prod(shape)):
        raise DataError(
            f"{path}, offset {len(data)}: file ends, but promises {want} bytes; {AGAIN}"
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
        f"no MNIST: {name}[.gz] is not in {', '.join(map(str, folders))}; "
        f"run `python data.py mnist --root {root}` or name its folder with --root"
    )


def read_mnist(root, part):
    """Images (N, 28, 28) and labels (N,) of "train" or "t10k"."""
    paths = [find_mnist(root, n) for n in MNIST if n.startswith(part)]
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{paths[0]}, offset 8: images of {images.shape[1:]} pixels, not (28, 28)")
    if (n := len(images)) != (m := len(labels)):
        raise DataError(f"{n} images in {paths[0]} but {m} labels in {paths[1]}")
    if len(labels) == 0 or labels.max() > 9:
        raise DataError(f"{paths[1]}: labels are not digits 0 to 9")
    if (blank := ~images.any((1, 2))).any():
        raise DataError(f"{paths[0]}: image {blank.argmax()} is blank, so no point can be drawn")
    return images, labels.astype(np.int64)


def smallest(key, n):
    """For each row of key (B, m), the indices (B, n) of its n smallest entries, in order."""
    pick = np.argpartition(key, n - 1, -1)[:, :n]
    return np.take_along_axis(pick, np.argsort(np.take_along_axis(key, pick, -1), -1), -1)


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
            pick[few] = meshes.weighted_choice(cdf / cdf[:, -1:], u[few, :n])
        cell = where[np.take_along_axis(slot, pick, -1)]
        return np.stack([cell % 28, 27 - cell // 28], -1).astype(np.float32)

    return pixels


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


# ------------------------------------------------------------------------------- sources
# A source turns a function (index, n, rng) → (B, n, d), such as spatial_mnist(images) or glyphs,
# into the sets of a task. `log_unit` is what to add to log p / n for the units of Table 2.
@dataclass(frozen=True)
class Flat:
    """Sets on the unit square, from points on a canvas of 28 × 28 pixels plus U[0, noise)²."""

    pixels: Callable
    noise: float
    log_unit: float
    times, dim = None, 2

    def sample(self, index, n, rng, mask):
        return (self.pixels(index, n, rng) + np.float32(self.noise) * rng.uniform(n, 2)) / 28


@dataclass(frozen=True)
class Rotating:
    """Series (B, T, n, 2): digits turned clockwise by θ = πt, in units of half their canvas."""

    pixels: Callable
    times: np.ndarray
    resample: bool
    log_unit, dim = -2 * math.log(14), 2

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
    log_unit, times, dim = 0.0, None, 3

    def sample(self, index, n, rng, mask):
        x = modelnet_sets(self.cloud(index, n, rng), rng, mask)
        return augment(x, rng) if self.augment else x


def stored_cloud(clouds):
    """A function (index, n, rng) → (B, n, 3): n different ones of a cloud's m points (N, m, 3)."""

    def cloud(index, n, rng):
        if n > clouds.shape[1]:
            raise DataError(f"points={n}: of each shape, {clouds.shape[1]} points were loaded")
        pick = smallest(rng.uniform(clouds.shape[1]), n)
        return clouds[index[:, None], pick].astype(np.float32)

    return cloud


# ------------------------------------------------------------------------------- splits
@dataclass(frozen=True, eq=False)
class Split:
    """Some sets of a source, drawn anew in every epoch of training, else always the same."""

    source: Flat | Rotating | Solid
    index: np.ndarray  # of its sets within the source
    labels: np.ndarray  # of all sets of the source
    classes: tuple[str, ...]
    points: int | tuple[int, int]  # in each set; (low, high): a random number of them
    use: int = TRAIN
    spare: int = 0  # more points of a shape behind those of its set, where the mask is False

    def __len__(self):
        return len(self.index)

    dim = property(lambda self: self.source.dim)
    times = property(lambda self: self.source.times)
    log_unit = property(lambda self: self.source.log_unit)  # PPLL = log p / n + log_unit

    def some(self, count=None):
        """At most so many of its sets, evenly spaced: classes may come one after the other."""
        count = min(count or len(self), len(self))
        return replace(self, index=self.index[np.arange(count) * len(self) // count])

    def draw(self, where, *, points=None, seed=0, epoch=0):
        """x, mask and label of the sets at positions `where`, as numpy arrays."""
        low, high = span(self.points if points is None else points)
        words = (TRAIN, seed, epoch) if self.use == TRAIN else (self.use,)
        index = self.index[where]
        blocks = np.split(index, range(512, len(index), 512))  # what fits a processor's cache
        x, mask = zip(*[self._draw(i, low, high, Random(i, *words)) for i in blocks])
        mask = None if mask[0] is None else np.concatenate(mask)
        return np.concatenate(x), mask, self.labels[index]

    def _draw(self, index, low, high, rng):
        if self.spare:
            mask = np.arange(high + self.spare) < np.full((len(index), 1), high)
            return self.source.sample(index, high + self.spare, rng, mask), mask
        if low == high:
            return self.source.sample(index, high, rng, None), None
        size = low + (rng.uniform(1) * (high + 1 - low)).astype(np.int64)
        mask = np.arange(high) < size  # (B, n)
        x = self.source.sample(index, high, rng, mask)
        mask = mask if x.ndim == 3 else np.repeat(mask[:, None], x.shape[1], 1)
        return x * mask[..., None], mask

    def noise(self, points=None):
        """Mean σ of the Gaussian noise after scaling, over one draw of each set; None if none."""
        if not isinstance(self.source, Solid):
            return None
        n = span(self.points if points is None else points)[1]
        blocks = np.split(self.index, range(512, len(self), 512))
        scale = [unit_box(self.source.cloud(i, n, Random(i, TEST)))[1] for i in blocks]
        return float(np.mean(SIGMA / np.concatenate(scale), dtype=np.float64))


class Splits(NamedTuple):
    train: Split
    valid: Split
    test: Split


def span(points):
    """(low, high) of a number of points or of a pair of them."""
    pair = points if isinstance(points, tuple | list) else (points, points)
    try:
        low, high = map(operator.index, pair)
    except (TypeError, ValueError):
        low, high = 0, 0
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
    count = max(round(fraction * len(twins)), 1) if 0 < fraction < 1 else 0
    if not 0 < count < len(twins):
        raise DataError(f"valid={fraction}: cannot hold out that share of {len(twins)} sets")
    chosen = np.argsort(Random(np.arange(len(twins)), TWINS, seed).key)[:count]
    chosen = np.isin(group, chosen)
    return keep[~chosen], keep[chosen]


# ------------------------------------------------------------------------------- batches
class Batch(NamedTuple):
    """B sets: x (B, n, d), or (B, T, n, d) at times t (T,); mask is None if all points exist."""

    x: torch.Tensor
    mask: torch.Tensor | None
    label: torch.Tensor
    t: torch.Tensor | None


def steps(split, batch_size, training=True):
    """Batches in an epoch; in training the last, incomplete one is left out."""
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size}: want at least 1")
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
    count, order = steps(split, batch_size, training), np.arange(len(split))
    if not 0 <= rank < world:
        raise DataError(f"rank={rank}: want 0 ≤ rank < world={world}")
    if not 0 <= start <= count:
        raise DataError(f"start={start}: the epoch has {count} batches")
    if training:
        if batch_size % world or len(split) < world:
            raise DataError(f"a batch of {min(batch_size, len(split))} sets for {world} processes")
        order = np.argsort(Random(order, ORDER, seed, epoch).key)[: len(order) // world * world]

    def share(step):
        return order[step * batch_size : (step + 1) * batch_size][rank::world]

    def prepare(step):
        x, mask, label = split.draw(share(step), points=points, seed=seed, epoch=epoch)
        t = None if split.times is None else split.times.astype(np.float32)
        return Batch(*(_tensor(array, device) for array in (x, mask, label, t)))

    todo = [step for step in range(start, count) if len(share(step))]
    return _ahead(prepare, todo, workers) if workers else map(prepare, todo)


def _tensor(array, device):
    if array is None:
        return None
    tensor = torch.from_numpy(array)
    tensor = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def _ahead(prepare, todo, workers):
    """map(prepare, todo), in order, computed by that many threads ahead of the one who asks."""
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        for step in todo:
            waiting.append(pool.submit(prepare, step))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ------------------------------------------------------------------------------- load
CLASSES = {"digits": DIGITS, "shapes": tuple(SOLIDS), "mnist": DIGITS}
CLASSES |= {"modelnet40": meshes.MODELNET40, "modelnet10": meshes.MODELNET10}


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
    spare=0,
) -> Splits:
    """The sets called "synthetic", "mnist", "modelnet" (40) or "modelnet10", for one task.

    task      "flow", "classify" or "temporal", which turns 2-D digits at `times`
    category  name, "several,names", a list, or None for all; of "synthetic" also "digits" (the
              default but for classification) or "shapes"
    points    in a set; (low, high) for ragged sets; None for the paper's
    valid     fraction of the training sets held out, chosen by `seed`
    resample  draw points anew at each time, as the paper says, or carry them along
    augment   turn and scale 3-D training sets; None: to classify 1000 points or more
    spare     more points of each training set's shape, in the units of the set (`Split.spare`)
    """
    kind, classes = _kind(name, task, category)
    solid = kind not in ("digits", "mnist")
    points = POINTS["modelnet" if solid else "mnist"][task] if points is None else points
    most = span(points)[1]
    if augment is None:
        augment = solid and task == "classify" and most >= 1000
    if augment and not solid:
        raise DataError(f"augment is for 3-D shapes, not for the digits of {name!r}")
    if spare and (kind == "mnist" or task == "temporal" or span(points)[0] < most):
        why = "bright pixels come first, and times and ragged sets have none"
        raise DataError(f"spare={spare}: for 3-D shapes and built-in digits only: {why}")

    def split(part, index, use):
        pick, labels, _ = part
        if solid:
            source = Solid(pick, augment and use == TRAIN)
        elif task == "temporal":
            source = Rotating(pick, _grid(times), resample)
        else:
            source = Flat(pick, *((1.0, -2 * math.log(28)) if kind == "mnist" else (0.0, 0.0)))
        return Split(source, index, labels, classes, points, use, spare if use == TRAIN else 0)

    train, test = _parts(kind, root, classes, most + spare)
    index, held = hold_out(train[2], test[2], valid, seed)
    every = np.arange(len(test[1]))
    return Splits(split(train, index, TRAIN), split(train, held, VALID), split(test, every, TEST))


def _kind(name, task, category):
    """Which of CLASSES a name stands for, and those of its classes that are wanted."""
    if task not in ("flow", "classify", "temporal"):
        raise DataError(f"no task {task!r}: want flow, classify or temporal")
    if name not in ("synthetic", "mnist", "modelnet", "modelnet40", "modelnet10"):
        raise DataError(f"no data called {name!r}: want synthetic, mnist, modelnet or modelnet10")
    kind = {"modelnet": "modelnet40"}.get(name, name)
    wanted = category.split(",") if isinstance(category, str) else category
    wanted = None if category in (None, "all") else [w.strip() for w in wanted if w.strip()]
    if wanted == []:
        raise DataError(f"category {category!r} names none: leave it out for all of them")
    if name == "synthetic":
        kind = "shapes" if task == "classify" else "digits"
        if wanted in (["digits"], ["shapes"]):
            kind, wanted = wanted[0], None
        elif wanted:
            kind = "digits" if set(wanted) & set(DIGITS) else "shapes"
    if task == "temporal" and kind not in ("digits", "mnist"):
        raise DataError("temporal sets are turned digits: use mnist, or synthetic digits")
    known = CLASSES[kind]
    for w in wanted or ():
        if w not in known:
            near = difflib.get_close_matches(w, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise DataError(f"no category {w!r} in {kind}: {hint}")
    return kind, tuple(c for c in known if not wanted or c in wanted)


def _grid(times):
    times = np.asarray(times, np.float64)
    if times.ndim != 1 or not len(times) or not np.isfinite(times).all():
        raise DataError(f"times={times.tolist()}: want a list of numbers")
    return times


def _parts(kind, root, classes, points):
    """For the training and for the test data: points of sets, their labels, their identities."""
    if kind == "mnist":
        return [_mnist_part(classes, *read_mnist(root, part)) for part in ("train", "t10k")]
    if kind in ("digits", "shapes"):
        return [_built_in_part(kind, classes, *sets) for sets in ((0, 6000), (6000, 1000))]
    read = [
        [meshes.modelnet_points(root, kind, c, part, points) for c in classes]
        for part in ("train", "test")
    ]
    stored = min(c.shape[1] for part in read for c in part)
    return [_modelnet_part(part, stored) for part in read]


def _mnist_part(classes, images, digits):
    label = np.array([classes.index(d) if d in classes else -1 for d in DIGITS])[digits]
    images, label = images[label >= 0], label[label >= 0]
    return spatial_mnist(images), label, np.array([fingerprint(i) for i in images])


def _built_in_part(kind, classes, first, size):
    label = np.arange(size) % len(classes)
    names = np.array(classes)[label]
    pick = solids(names, first) if kind == "shapes" else glyphs(names.astype(np.int64), first)
    return pick, label, np.arange(first, first + size)


def _modelnet_part(clouds, stored):
    label = np.repeat(np.arange(len(clouds)), [len(c) for c in clouds])
    clouds = np.concatenate([c[:, :stored] for c in clouds])
    return stored_cloud(clouds), label, np.array([fingerprint(c) for c in clouds])


# ------------------------------------------------------------------------------- download
SOURCES = {  # address, and files under --root
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", [f"mnist/{n}.gz" for n in MNIST]),
    "modelnet": ("https://modelnet.cs.princeton.edu/", ["ModelNet40.zip"]),
    "modelnet10": ("https://3dvision.princeton.edu/projects/2014/3DShapeNets/", ["ModelNet10.zip"]),
}
NETWORK = (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException)
TIMEOUT, TRIES = 30.0, 5  # seconds to wait for a server; failures in a row before giving up


def fetch(url, path, check):
    """Download to `path`, which appears only when whole and `check(file)` raises no DataError.

    What has arrived waits in path.part, from where this call, or a later one, goes on.
    """
    part, failures = path.with_name(path.name + ".part"), 0
    while failures < TRIES:
        if failures:
            time.sleep(min(2 ** (failures - 1), 30))
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(url, part, before)
            check(part)
            return os.replace(part, path)
        except DataError as e:
            part.unlink(missing_ok=True)
            trouble, failures = e, failures + 1
        except NETWORK as e:
            if 400 <= getattr(e, "code", 500) < 500 and e.code not in (408, 429):
                raise DataError(f"{url}: {e}; name another address with --url") from None
            grew = part.exists() and part.stat().st_size > before
            trouble, failures = e, 0 if grew else failures + 1
        except OSError as e:
            raise DataError(f"{part}: {e.strerror}; once mended, run it again") from None
    raise DataError(f"{url}: {trouble}, {TRIES} times; run the same command again to go on")


def _transfer(url, part, have):
    """Append what is missing to `part`, or write it anew if the server cannot resume."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        return  # nothing comes after `have`: the file is whole, or not this one; the check will say
    with reply:
        if not (reply.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            have = 0
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = meshes.Progress(url, total, have)
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


@contextlib.contextmanager
def alone(folder):
    """Keep a second download out of `folder`, where the system can lock one."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"{folder}: another download into it is under way") from None
    finally:
        if fcntl:
            os.close(lock)


def download(args):
    """Fetch what is missing or damaged of `args.data`."""
    base, files = SOURCES[args.data]
    base, check = args.url or base, check_mnist if args.data == "mnist" else meshes.check_zip
    paths = [Path(args.root) / file for file in files]
    with alone(paths[0].parent):
        for path in paths:
            try:
                whole = path.exists() and check(path) is None
            except DataError as e:
                say(f"{e}; fetching it again")
                whole = False
            if not whole:
                url = f"{base.rstrip('/')}/{path.name}"
                say(f"{url} → {path}")
                fetch(url, path, check)
            say(f"{path} is there and whole")
            if args.unpack and not (folder := path.with_suffix("")).exists():
                meshes.unpack(path, folder)
                say(f"{folder} is unpacked")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description="Download data: MNIST (12 MB), ModelNet40 (2 GB) or ModelNet10 (0.5 GB). "
        "Run it again to go on with what is missing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", choices=SOURCES, help="what to download")
    parser.add_argument("--root", default="data", help="folder to download into")
    parser.add_argument("--url", help="address of the folder with the files; None: the publisher's")
    unpack = "unpack ModelNet's zip, though it can be read as it is"
    parser.add_argument("--unpack", action="store_true", help=unpack)
    args = parser.parse_args(argv)
    if args.unpack and args.data == "mnist":
        parser.error("--unpack is for ModelNet: MNIST is read as it comes")
    return args


def main(argv=None):
    """Exit code of the command line: 0 done, 2 wrong usage or data, 130 interrupted."""
    args = parse(argv)
    try:
        download(args)
    except (ValueError, OSError) as e:
        say(e)
        return 2
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
