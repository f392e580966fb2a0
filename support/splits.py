"""Sets split for training, validation and test, drawn and put into batches.

    App. C    batches of a given size    Split, batches

Shapes: x is `(B, n, d)`, B sets of n points, float32 (`(B, T, n, d)` for series); mask is
`(..., n)`, True where a point exists, or None when all do.

Randomness: every number drawn for a set depends only on (seed, epoch, that set's index), never on
its neighbours in the batch. So one process or eight, any batch size, with or without worker
threads, resumed or not: the same sets. Validation and test sets are one fixed draw, whatever
the seed and epoch.
"""

import difflib
import operator
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from support.reading import DataError
from support.shapes import ORDER, SOME, TRAIN, TWINS, Random

UNLABELLED = ("all",)  # the classes of sets without labels


class Source:
    """Where sets come from: sample(index, n, rng, mask) gives n points of each, `(B, n, d)`."""

    log_unit = 0.0  # what to add to log p / n for the units of Table 2
    times = None  # (T,) of all series, or a row (N, T) each, NaN where a series has ended
    names = context = None  # of each set, where it has its own

    def sizes(self, index, most):
        """Points in each set, or in the largest set of each series."""
        return np.full(len(index), most)

    def noise(self, index, n):
        """Mean σ of the Gaussian noise in the units of the sets; None if none."""

    def draw(self, index, low, high, spare, words):
        """x and mask of sets of `low` to `high` points, and more points of each behind them."""
        blocks = np.split(index, range(512, len(index), 512))  # what fits a processor's cache
        x, mask = zip(*[self._draw(i, low, high, spare, Random(i, *words)) for i in blocks])
        return np.concatenate(x), None if mask[0] is None else np.concatenate(mask)

    def _draw(self, index, low, high, spare, rng):
        if spare:
            mask = np.arange(high + spare) < np.full((len(index), 1), high)
            return self.sample(index, high + spare, rng, mask), mask
        if low == high:
            return self.sample(index, high, rng, None), None
        size = low + (rng.uniform(1) * (high + 1 - low)).astype(np.int64)
        mask = np.arange(high) < size  # (B, n)
        x = self.sample(index, high, rng, mask)
        mask = mask if x.ndim == 3 else np.repeat(mask[:, None], x.shape[1], 1)
        return x * mask[..., None], mask


@dataclass(frozen=True, eq=False)
class Split:
    """Some sets of a source, drawn anew in every epoch of training, else always the same."""

    source: Source
    index: np.ndarray  # of its sets within the source
    labels: np.ndarray  # of all sets of the source
    classes: tuple[str, ...]
    points: int | tuple[int, int]  # in each set, at most; (low, high): a random number of them
    use: int = TRAIN
    spare: int = 0  # more points of a shape behind those of its set, where the mask is False
    find_twins: Callable | None = None  # for all sets of the source

    def __len__(self):
        return len(self.index)

    dim = property(lambda self: self.source.dim)
    log_unit = property(lambda self: self.source.log_unit)  # PPLL = log p / n + log_unit
    sizes = property(lambda self: self.source.sizes(self.index, span(self.points)[1]))
    context = property(lambda self: self._mine(self.source.context))  # (len, c), or None

    def _mine(self, rows):
        return None if rows is None else rows[self.index]

    @property
    def times(self):
        """None; times (T,) of all series; or one row (len, T) each, NaN where one has ended."""
        times = self.source.times
        return times if times is None or times.ndim == 1 else times[self.index]

    @property
    def names(self):
        """What to call each set: its file or its id."""
        names = self.source.names
        return [str(i) if names is None else names[i] for i in self.index]

    @property
    def label_names(self):
        """The label of each set, "" where sets have none."""
        if self.classes == UNLABELLED:
            return [""] * len(self)
        return [self.classes[k] for k in self.labels[self.index]]

    @property
    def twins(self):
        """For each set, whether a training set is of the same shape."""
        every = np.zeros(len(self.labels), bool) if self.find_twins is None else self.find_twins()
        return every[self.index]

    def sizes_by_class(self):
        """For each class, pairs [n, how many sets of n points there are]."""
        label, size = self.labels[self.index], self.sizes
        every = [np.unique(size[label == k], return_counts=True) for k in range(len(self.classes))]
        return {name: np.stack(c, -1).tolist() for name, c in zip(self.classes, every)}

    def noise(self, points=None):
        """Mean σ of the Gaussian noise after scaling, over one draw of each set; None if none."""
        return self.source.noise(self.index, span(points or self.points)[1])

    def some(self, count=None, after=0):
        """At most `count` of its sets by a fixed permutation, whose first `after` are left out."""
        if not after and (not count or count >= len(self)):
            return self
        chosen = np.argsort(Random(self.index, SOME).key)[after:][:count]
        return replace(self, index=self.index[np.sort(chosen)])

    def batch(self, count=None, device="cpu"):
        """At most `count` of its sets, chosen by a fixed permutation, as one Batch."""
        few = self.some(count)
        return next(batches(few, len(few), training=False, device=device))

    def draw(self, where, *, points=None, seed=0, epoch=0):
        """x, mask and label of the sets at positions `where`, as numpy arrays."""
        low, high = span(self.points if points is None else points)
        words = (TRAIN, seed, epoch) if self.use == TRAIN else (self.use,)
        index = self.index[where]
        return *self.source.draw(index, low, high, self.spare, words), self.labels[index]


class Splits(NamedTuple):
    train: Split
    valid: Split
    test: Split


def span(points: int | tuple[int, int]) -> tuple[int, int]:
    """(low, high) of a number of points or of a pair of them."""
    pair = points if isinstance(points, tuple | list) else (points, points)
    try:
        low, high = map(operator.index, pair)
    except (TypeError, ValueError):
        low, high = 0, 0
    if not 1 <= low <= high:
        raise DataError(f"points={points!r}: want a number ≥ 1, or a pair low ≤ high of them")
    return low, high


def names_in(category):
    """The names in a category, None for all."""
    if category in (None, "all"):
        return None
    names = category.split(",") if isinstance(category, str) else category
    if not (names := [w.strip() for w in names if w.strip()]):
        raise DataError(f"category {category!r} names none: leave it out for all of them")
    return names


def choose(category, known, what):
    """Those of the known classes that a category names."""
    wanted = names_in(category)
    for w in wanted or ():
        if w not in known:
            near = difflib.get_close_matches(w, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise DataError(f"no category {w!r} in {what}: {hint}")
    return tuple(c for c in known if not wanted or c in wanted)


def hold_out(sets, fraction, seed):
    """Positions (kept, held) of sets, given what identifies each one's contents.

    Identical sets are on the same side.
    """
    twins, group = np.unique(sets, return_inverse=True)
    count = max(round(fraction * len(twins)), 1) if 0 < fraction < 1 else 0
    if not 0 < count < len(twins):
        raise DataError(f"valid={fraction}: cannot hold out that share of {len(twins)} sets")
    chosen = np.argsort(Random(np.arange(len(twins)), TWINS, seed).key)[:count]
    chosen = np.isin(group, chosen)
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def pad(sets) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, n, d), zeros behind the points of each set, and mask (B, n) of a list of (nᵢ, d)."""
    sets = [torch.as_tensor(s) for s in sets]
    shapes = [tuple(s.shape) for s in sets]
    if not sets or any(len(s) != 2 or s[1:] != shapes[0][1:] for s in shapes):
        raise DataError(f"pad: sets of shapes {shapes[:9]}: want a list of (nᵢ, d), all with one d")
    x = torch.nn.utils.rnn.pad_sequence(sets, batch_first=True)
    size = torch.tensor([n for n, _ in shapes])
    return x, torch.arange(x.shape[1]) < size[:, None]


# ------------------------------------------------------------------------------- batches
class Batch(NamedTuple):
    """B sets: x (B, n, d), or (B, T, n, d) at times t (T,) or (B, T); None is what there is not.

    Without a mask all points exist. Where a series has ended, t repeats its last time and the mask
    is False.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    label: torch.Tensor
    t: torch.Tensor | None
    context: torch.Tensor | None


WINDOW = 50  # batches among which sets are sorted by size


def steps(split: Split, batch_size: int, training: bool = True) -> int:
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
        order = _by_size(order, split.sizes, batch_size, (seed, epoch))
    times, context = split.times, split.context

    def share(step):
        return order[step * batch_size : (step + 1) * batch_size][rank::world]

    def prepare(step):
        where = share(step)
        x, mask, label = split.draw(where, points=points, seed=seed, epoch=epoch)
        t = None if times is None else _times_of(times, where, x).astype(np.float32)
        c = None if context is None else context[where]
        return Batch(*(_tensor(array, device) for array in (x, mask, label, t, c)))

    todo = [step for step in range(start, count) if len(share(step))]
    return _ahead(prepare, todo, workers) if workers else map(prepare, todo)


def epochs(split, batch_size, seed, **share):
    """batches(epoch, start) of a training run, prepared by one thread ahead."""

    def of_one(epoch, start):
        draw = {"seed": seed, "epoch": epoch, "start": start, "workers": 1}
        return batches(split, batch_size, **draw, **share)

    return of_one


def _by_size(order, sizes, batch_size, words):
    """The order in batches of sets of similar size, which need little padding.

    Sets are sorted within windows of the shuffled order, then the batches of a window shuffled.
    """
    if len(order) < batch_size or not np.ptp(sizes):
        return order
    whole, windows = len(order) // batch_size * batch_size, []
    for first in range(0, whole, WINDOW * batch_size):
        window = order[first : min(first + WINDOW * batch_size, whole)]
        window = window[np.argsort(sizes[window], kind="stable")].reshape(-1, batch_size)
        windows.append(window[np.argsort(Random(window[:, 0], ORDER, *words, WINDOW).key)])
    return np.concatenate(windows).ravel()


def _times_of(times, where, x):
    """Times (T,), or those of series `where` (B, T), the last one of a series going on."""
    if times.ndim == 1:
        return times
    t = times[where][:, : x.shape[1]]
    return np.where(np.isnan(t), np.nanmax(t, 1, keepdims=True), t)


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
