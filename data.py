"""Where the sets come from: SpatialMNIST, its rotating series, ModelNet, and built-in shapes.

    Sec. 4.2  PointCloud classification   load(task="classify"), modelnet_sets, augment
    Sec. 4.3  SpatialMNIST, ModelNet40    load(task="flow"), spatial_mnist, modelnet_sets
    Table 2   units of PPLL               Split.log_unit (add it to log p / n), Split.noise
    Sec. 4.4  rotating SpatialMNIST       load(task="temporal"), rotate_clockwise, Rotating
    App. C    sizes of sets and batches   POINTS; Split, batches (support/splits.py)

Shapes: x is `(B, n, d)`, B sets of n points, float32 (`(B, T, n, d)` for series); mask is
`(..., n)`, True where a point exists, or None when all do. y and z point up.

Departures from the paper
- "Sampled uniformly from active pixels" (Secs. 4.3, 4.4): as in the authors' code, pixels are drawn
  with probability proportional to intensity. Only that reproduces the published units and numbers.
- Sec. 4.4 speaks of 50 points in a series, App. C.3 and the authors' code of 64, our default.
- Sec. 4.4 samples the points after rotating the digit, so anew at each time; the authors' code
  draws them once and carries them along. We follow the text; `resample=False` follows the code.
  The noise there is U[0, 0.2) pixels; ours is U[−0.1, 0.1), so that the series stays centred.
- The noise of 0.001 is in "raw units", which differ from one copy of ModelNet to the next. Here
  they are those of a shape of radius 1, whatever it was read from (support/modelnet.py).
- The classifier's sets are prepared like the flow's, noise included, as in the authors' code.
- Model selection needs data of its own: a tenth of the training sets is held out for it; sets with
  the same stored points stay on one side.
- The official split of ModelNet has test shapes that are also among the training shapes, shifted or
  with other triangles: `Split.twins` marks them, so that results can be given without them.
- The built-in sets (support/shapes.py) and a person's own (support/own_sets.py) are ours.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from support import modelnet, own_sets
from support.meshes import weighted_choice
from support.mnist import read_mnist
from support.reading import DataError, fingerprint, say
from support.shapes import SOLIDS, TEST, TRAIN, VALID, Random, glyphs, solids
from support.splits import (  # noqa: F401
    Batch,
    Source,
    Split,
    Splits,
    batches,
    choose,
    epochs,
    hold_out,
    names_in,
    pad,
    span,
    steps,
)

POINTS = {"mnist": {"flow": 50, "classify": 100, "temporal": 64}}
POINTS["modelnet"] = {"flow": 512, "classify": 100}  # Sec. 4.2: 100 or 1000
SIGMA = 0.001  # noise added to a ModelNet shape of radius 1
DIGITS = tuple("0123456789")


# ------------------------------------------------------------------------------- SpatialMNIST
def smallest(key: np.ndarray, n: int) -> np.ndarray:
    """For each row of key (B, m), the indices (B, n) of its n smallest entries, in order."""
    pick = np.argpartition(key, n - 1, -1)[:, :n]
    return np.take_along_axis(pick, np.argsort(np.take_along_axis(key, pick, -1), -1), -1)


def spatial_mnist(images: np.ndarray) -> Callable:
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


# ------------------------------------------------------------------------------- preprocessing
def modelnet_sets(x: np.ndarray, rng: Random, mask: np.ndarray | None = None) -> np.ndarray:
    """Sets of shapes for all tasks: x + N(0, 0.001²), one min–max to [0, 1] per set, centred."""
    return unit_box(x + np.float32(SIGMA) * rng.normal(*x.shape[1:]), mask)[0]


def unit_box(x: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Sets (B, n, d) scaled to [0, 1] by one min and max for all axes, then centred; the scale."""
    there = True if mask is None else mask[..., None]
    low = x.min((-2, -1), keepdims=True, where=there, initial=np.inf)
    scale = x.max((-2, -1), keepdims=True, where=there, initial=-np.inf) - low
    x = (x - low) / scale
    return x - x.mean(-2, keepdims=True, where=there), scale


def augment(x: np.ndarray, rng: Random) -> np.ndarray:
    """App. C.1: each set turned about z by U[−0.15π, 0.15π) and scaled per axis by U[0.8, 1.25)."""
    theta = (rng.uniform() - np.float32(0.5)) * np.float32(0.3 * np.pi)
    c, s = np.cos(theta)[:, None], np.sin(theta)[:, None]
    x, y, z = np.moveaxis(x, -1, 0)
    turned = np.stack([c * x - s * y, s * x + c * y, z], -1)
    return turned * (np.float32(0.8) + np.float32(0.45) * rng.uniform(1, 3))


def rotate_clockwise(x: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Points x (..., T, n, 2) turned about the origin by angles theta (T,); y points up."""
    c, s = (f(theta).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    return np.stack([c * x[..., 0] + s * x[..., 1], c * x[..., 1] - s * x[..., 0]], -1)


# ------------------------------------------------------------------------------- sources
# A source turns a function (index, n, rng) → (B, n, d), such as spatial_mnist(images) or glyphs,
# into the sets of a task. `log_unit` is what to add to log p / n for the units of Table 2.
@dataclass(frozen=True)
class Flat(Source):
    """Sets on the unit square, from points on a canvas of 28 × 28 pixels plus U[0, width)²."""

    pixels: Callable
    width: float = 0.0
    log_unit: float = 0.0
    dim = 2

    def sample(self, index, n, rng, mask):
        return (self.pixels(index, n, rng) + np.float32(self.width) * rng.uniform(n, 2)) / 28


@dataclass(frozen=True)
class Rotating(Source):
    """Series (B, T, n, 2): digits turned clockwise by θ = πt, in units of half their canvas."""

    pixels: Callable
    times: np.ndarray
    resample: bool = True
    log_unit, dim = -2 * math.log(14), 2

    def sample(self, index, n, rng, mask):
        draws = [self.pixels(index, n, rng) for _ in (self.times if self.resample else (0,))]
        x = np.stack(draws, 1)  # (B, T or 1, n, 2)
        x = x - x.mean(-2, keepdims=True, where=True if mask is None else mask[:, None, :, None])
        x = rotate_clockwise(x, np.pi * self.times)
        return (x + np.float32(0.2) * (rng.uniform(*x.shape[1:]) - np.float32(0.5))) / 14


@dataclass(frozen=True)
class Solid(Source):
    """Sets of surface points, prepared as in the paper, and augmented if asked."""

    cloud: Callable
    augment: bool = False
    dim = 3

    def sample(self, index, n, rng, mask):
        x = modelnet_sets(self.cloud(index, n, rng), rng, mask)
        return augment(x, rng) if self.augment else x

    def noise(self, index, n):
        blocks = np.split(index, range(512, len(index), 512))
        scale = [unit_box(self.cloud(i, n, Random(i, TEST)))[1] for i in blocks]
        return float(np.mean(SIGMA / np.concatenate(scale), dtype=np.float64))


@dataclass(frozen=True)
class AsModelnet(Source):
    """A person's own clouds, prepared as those of ModelNet are."""

    own: own_sets.OwnSets
    dim = 3
    names = property(lambda self: self.own.names)
    context = property(lambda self: self.own.context)

    def sizes(self, index, most):
        return self.own.sizes(index, most)

    def draw(self, index, low, high, spare, words):
        x, mask = self.own.draw(index, low, high, spare, words)
        for i in range(len(x)):
            here = slice(None) if mask is None else mask[i]
            x[i, here] = modelnet.unit_radius(x[i, here][None], self.names[index[i]])[0]
        return modelnet_sets(x, Random(index, *words), mask), mask


def stored_cloud(clouds: np.ndarray) -> Callable:
    """A function (index, n, rng) → (B, n, 3): n different ones of a cloud's m points (N, m, 3)."""

    def cloud(index, n, rng):
        if n > clouds.shape[1]:
            raise DataError(f"points={n}: of each shape, {clouds.shape[1]} points were loaded")
        pick = smallest(rng.uniform(clouds.shape[1]), n)
        return clouds[index[:, None], pick].astype(np.float32)

    return cloud


# ------------------------------------------------------------------------------- load
CLASSES = {"digits": DIGITS, "shapes": tuple(SOLIDS), "mnist": DIGITS}
CLASSES |= {"modelnet40": modelnet.MODELNET40, "modelnet10": modelnet.MODELNET10}


def load(
    name: str = "synthetic",
    root: str = "data",
    *,
    task: str = "flow",
    category: str | list[str] | None = None,
    points: int | tuple[int, int] | None = None,
    seed: int = 0,
    valid: float = 0.1,
    times: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
    resample: bool = True,
    augment: bool | None = None,
    spare: int = 0,
    **own,
) -> Splits:
    """The sets called "synthetic", "mnist", "modelnet" (40) or "modelnet10", or at a path.

    task      "flow", "classify" or "temporal", which turns 2-D digits at `times`
    category  name, "several,names", a list, or None for all; of "synthetic" also "digits" (the
              default but for classification) or "shapes"
    points    in a set; (low, high) for ragged sets; None for the paper's, or all of a person's own
    valid     fraction of the training sets held out, chosen by `seed`
    resample  draw points anew at each time, as the paper says, or carry them along
    augment   turn and scale 3-D training sets; None: to classify 1000 points or more
    spare     more points of each training set's shape, in the units of the set (`Split.spare`)
    own       columns, skip_bad and noise, for a path (support/own_sets.py)
    """
    if task not in ("flow", "classify", "temporal"):
        raise DataError(f"no task {task!r}: want flow, classify or temporal")
    if name not in NAMES:
        if spare or augment:
            raise DataError(f"{name}: spare and augment are for ModelNet and the built-in sets")
        return own_sets.load(name, task, category, points, seed, valid, **own)
    if any(own.values()):
        raise DataError(f"{', '.join(own)}: for the path of a file or folder, not for {name!r}")
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
        if solid:
            source = Solid(part.pick, augment and use == TRAIN)
        elif task == "temporal":
            source = Rotating(part.pick, _grid(times), resample)
        else:
            source = Flat(part.pick, *((1.0, -2 * math.log(28)) if kind == "mnist" else ()))
        more = (spare, None) if use == TRAIN else (0, part.twins)
        return Split(source, index, part.labels, classes, points, use, *more)

    train, test = _parts(kind, root, classes, most + spare)
    index, held = hold_out(train.ids, valid, seed)
    every = np.arange(len(test.labels))
    return Splits(split(train, index, TRAIN), split(train, held, VALID), split(test, every, TEST))


def load_all(path: str, like: str, *, points: int | None = None, **own) -> Split:
    """All sets at a path as one split, to score them by a model of the sets called `like`.

    Clouds are prepared as ModelNet's are, if those are called for; all else stays as in the file.
    """
    split = own_sets.load_all(path, points=points, **own)
    if like not in ("modelnet", "modelnet40", "modelnet10"):
        return split
    if split.dim != 3:
        raise DataError(f"{path}: points in {split.dim}-D, not in 3-D as those of {like}")
    return replace(split, source=AsModelnet(split.source))


NAMES = ("synthetic", "mnist", "modelnet", "modelnet40", "modelnet10")


def class_names(name: str, task: str = "flow", category: str | None = None) -> tuple[str, ...]:
    """The classes of the sets called `name`."""
    return _kind(name, task, category)[1]


def _kind(name, task, category):
    """Which of CLASSES a name stands for, and those of its classes that are wanted."""
    kind = {"modelnet": "modelnet40"}.get(name, name)
    wanted = names_in(category)
    if name == "synthetic":
        kind = "shapes" if task == "classify" else "digits"
        if wanted in (["digits"], ["shapes"]):
            kind, category = wanted[0], None
        elif wanted:
            kind = "digits" if set(wanted) & set(DIGITS) else "shapes"
    if task == "temporal" and kind not in ("digits", "mnist"):
        raise DataError("temporal sets are turned digits: use mnist, or synthetic digits")
    return kind, choose(category, CLASSES[kind], kind)


def _grid(times):
    times = np.asarray(times, np.float64)
    if times.ndim != 1 or not len(times) or not np.isfinite(times).all():
        raise DataError(f"times={times.tolist()}: want a list of numbers")
    return times


class Part(NamedTuple):
    """The training or the test sets of a source: their points, labels and identities."""

    pick: Callable
    labels: np.ndarray
    ids: np.ndarray
    twins: Callable | None = None


def _parts(kind, root, classes, points):
    """The training and the test sets of some classes."""
    if kind == "mnist":
        return [_mnist_part(classes, *read_mnist(root, part)) for part in ("train", "t10k")]
    if kind in ("digits", "shapes"):
        return [_built_in_part(kind, classes, *sets) for sets in ((0, 6000), (6000, 1000))]
    train, test = (
        [modelnet.modelnet_points(root, kind, c, part, points) for c in classes]
        for part in ("train", "test")
    )
    stored = min(c.shape[1] for c in train + test)

    @cache
    def twins():
        every = np.concatenate([modelnet.find_twins(*pair) for pair in zip(train, test)])
        say(f"{every.sum()} of {len(every)} test shapes are among the training shapes, too")
        return every

    return _modelnet_part(train, stored), _modelnet_part(test, stored, twins)


def _mnist_part(classes, images, digits):
    label = np.array([classes.index(d) if d in classes else -1 for d in DIGITS])[digits]
    images, label = images[label >= 0], label[label >= 0]
    return Part(spatial_mnist(images), label, np.array([fingerprint(i) for i in images]))


def _built_in_part(kind, classes, first, size):
    label = np.arange(size) % len(classes)
    names = np.array(classes)[label]
    pick = solids(names, first) if kind == "shapes" else glyphs(names.astype(np.int64), first)
    return Part(pick, label, np.arange(first, first + size))


def _modelnet_part(clouds, stored, twins=None):
    label = np.repeat(np.arange(len(clouds)), [len(c) for c in clouds])
    clouds = np.concatenate([c[:, :stored] for c in clouds])
    return Part(stored_cloud(clouds), label, np.array([fingerprint(c) for c in clouds]), twins)


if __name__ == "__main__":
    from support.download import main

    sys.exit(main())
