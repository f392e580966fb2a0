"""A person's own sets and series, ragged and labelled: what is behind data.load(PATH).

support/own_files.py says what a file or folder may look like.

`noise` is the σ of Gaussian noise added to every draw, training or not: without it, the density of
coordinates that are rounded, or of points that repeat, has no bound. Densities are in the units of
the file.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from support import reading
from support.files import write_whole
from support.own_files import MESH_POINTS, PARTS, READERS, Bad, read_columns, read_folder, word
from support.reading import DataError, fingerprint, say
from support.shapes import TEST, TRAIN, VALID, Random
from support.splits import UNLABELLED, Source, Split, Splits, choose, hold_out, span


# ------------------------------------------------------------------------------- the sets
@dataclass(frozen=True, eq=False)
class OwnSets(Source):
    """N sets, or series of several: points[start[f] : start[f + 1]] are those of set f."""

    points: np.ndarray  # (P, d)
    start: np.ndarray  # (F + 1,)
    labels: np.ndarray  # of the N sets or series
    classes: tuple[str, ...]
    part: np.ndarray  # "train", "valid", "test" or "" for each
    names: list[str] = None
    context: np.ndarray | None = None  # (N, c)
    times: np.ndarray | None = None
    frames: np.ndarray | None = None  # (N, T) numbers f of a series' sets, −1 where it has none
    sigma: float = 0.0

    dim = property(lambda self: self.points.shape[1])

    def __len__(self):
        return len(self.names)

    def sizes(self, index, most=None):
        size = np.append(np.diff(self.start), 0)  # the last is that of set −1, which is none
        size = size[: len(self)] if self.frames is None else size[self.frames].max(1)
        size = size[index]
        return size if most is None else np.minimum(size, most)

    def noise(self, index, n):
        return self.sigma or None

    def ids(self):
        """What identifies the contents of each set."""
        each = [fingerprint(self.points[a:b]) for a, b in zip(self.start, self.start[1:])]
        if self.frames is None:
            return np.array(each)
        each = np.array([*each, 0])
        return np.array([fingerprint(each[row]) for row in self.frames])

    def only(self, classes):
        """The sets of these classes."""
        if classes == self.classes:
            return self
        keep = np.flatnonzero(np.isin(self.labels, [self.classes.index(c) for c in classes]))
        label = np.array([classes.index(self.classes[k]) for k in self.labels[keep]])
        frames = keep[:, None] if self.frames is None else self.frames[keep]
        order = frames[frames >= 0]
        new = np.full(frames.shape, -1)
        new[frames >= 0] = np.arange(len(order))
        size = np.diff(self.start)[order]
        rows = np.repeat(self.start[order] - (np.cumsum(size) - size), size) + np.arange(size.sum())
        return replace(
            self,
            points=self.points[rows],
            start=np.cumsum([0, *size]),
            names=[self.names[i] for i in keep],
            labels=label,
            classes=classes,
            part=self.part[keep],
            context=None if self.context is None else self.context[keep],
            times=self.times if self.times is None or self.times.ndim == 1 else self.times[keep],
            frames=None if self.frames is None else new,
        )

    def draw(self, index, low, high, spare, words):
        """x (B, n, d) or (B, T, n, d) of at most `high` points a set, and mask, None if all are."""
        frames = index[:, None] if self.frames is None else self.frames[index]
        frames = frames[:, : (frames >= 0).any(0).sum()]  # the longest of these series
        x, mask = self._draw(frames.ravel(), high, Random(np.maximum(frames.ravel(), 0), *words))
        if self.frames is not None:
            x, mask = (a.reshape(*frames.shape, *a.shape[1:]) for a in (x, mask))
        return x, None if mask.all() else mask

    def _draw(self, frames, most, rng):
        size = np.where(frames < 0, 0, np.diff(self.start)[frames])
        width = int(min(size.max(), most))
        noise = np.float32(self.sigma) * _normal(rng, width, self.dim) if self.sigma else 0
        pick = np.broadcast_to(np.arange(width), (len(frames), width))
        if len(large := np.flatnonzero(size > most)):
            key = rng.uniform(int(size.max()))[large]
            key[np.arange(key.shape[1]) >= size[large, None]] = np.inf
            pick = pick.copy()
            pick[large] = np.argpartition(key, most - 1, -1)[:, :most]
        mask = np.arange(width) < np.minimum(size, most)[:, None]
        x = self.points[np.where(mask, self.start[frames][:, None] + pick, 0)] + noise
        return np.where(mask[..., None], x, np.float32(0)), mask


def _normal(rng, n, d):
    """N(0, 1) of shape (B, n, d); the numbers of a point do not depend on n."""
    u, v = rng.uniform(n * d), rng.uniform(n * d)
    return (np.sqrt(-2 * np.log1p(-u)) * np.cos(np.float32(2 * np.pi) * v)).reshape(-1, n, d)


# ------------------------------------------------------------------------------- splits
def load(path, task, category, points, seed, valid, **options):
    """Splits of the sets at a path: theirs, or 80, 10 and 10 %."""
    if points is not None and span(points)[0] < span(points)[1]:
        raise DataError(f"points={points}: want one number, for sets have sizes of their own")
    source = read(path, points=points, **options)
    if (task == "temporal") != (source.times is not None):
        fault = "has no times, as series have" if task == "temporal" else "holds series, with times"
        raise DataError(f"{path}: {fault}: only train_temporal.py is for those")
    source = source.only(choose(category, source.classes, path))
    parts = _parts(source, path, seed, valid)
    return Splits(*(_split(source, *part, points) for part in zip(parts, (TRAIN, VALID, TEST))))


def _parts(source, path, seed, valid):
    """Indices of training, validation and test sets; test sets do not depend on the seed."""
    ids, split = source.ids(), source.part
    train, held, test = (np.flatnonzero(split == part) for part in ("train", "valid", "test"))
    train = train if split.any() else np.arange(len(source))
    if len(np.unique(ids[train])) < 3 - (len(held) > 0) - (len(test) > 0):
        fault = f"{len(train)} sets cannot be split into training, validation and test sets"
        raise DataError(f"{path}: {fault}: give more different sets, or name the splits yourself")
    if not len(test):
        kept, chosen = hold_out(ids[train], 0.1, 0)
        train, test, valid = train[kept], train[chosen], valid if len(held) else valid / 0.9
    if not len(held):
        kept, chosen = hold_out(ids[train], valid, seed)
        train, held = train[kept], train[chosen]
    if same := np.isin(ids[test], ids[train]).sum():
        say(f"{path}: {same} of {len(test)} test sets are identical to a training set")
    return train, held, test


def load_all(path, *, points=None, **options) -> Split:
    """All sets at a path as one split that is always drawn the same: to score them.

    Sets of similar size follow each other; `index` says where each one stands in the file.
    """
    source = read(path, points=points, **options)
    return _split(source, np.arange(len(source)), TEST, points)


def _split(source, index, use, points):
    points = points or int(source.sizes(np.arange(len(source))).max())
    if use != TRAIN:  # sets of similar size together save work in batches
        index = index[np.argsort(source.sizes(index, points), kind="stable")]
    return Split(source, index, source.labels, source.classes, points, use)


def save(path, splits, seed=0):
    """Write one draw of every set of three splits as an .npz file that `load` reads."""
    draws = [split.draw(np.arange(len(split)), seed=seed) for split in splits]
    arrays = {}
    for part, split, (x, mask, label) in zip(("train", "valid", "test"), splits, draws):
        mask = np.ones(x.shape[:-1], bool) if mask is None else mask
        arrays |= {f"{part}_x": x, f"{part}_mask": mask}
        arrays[f"{part}_label"] = np.array(split.classes)[label]
        if split.times is not None:
            arrays[f"{part}_time"] = split.times
    write_whole(path, lambda file: np.savez(file, **arrays))


def write_ply(path, points):
    """Points (n, 3) as a binary PLY file."""
    head = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(points)}\n"
    head += "".join(f"property float {axis}\n" for axis in "xyz") + "end_header\n"
    body = np.asarray(points, "<f4").tobytes()
    write_whole(path, lambda file: file.write(head.encode() + body))


# ------------------------------------------------------------------------------- reading
def read(path, *, points=None, columns=None, skip_bad=False, noise=0.0) -> OwnSets:
    """The sets at a path, of which meshes get `points` (2,048 or more) points."""
    if not (isinstance(noise, int | float) and 0 <= noise < np.inf):
        raise DataError(f"noise={noise!r}: want a number ≥ 0, the σ of what is added")
    if not str(path):
        raise DataError("no data called '': want a name or a path")
    path, columns = Path(path), read_columns(columns)
    try:
        there = path.stat()
    except OSError as e:
        names = "synthetic, mnist, modelnet, modelnet10, or a path"
        raise DataError(f"no data called {str(path)!r}: want {names} ({e.strerror})") from None
    bad, suffix = Bad(path, skip_bad), path.suffix.lower()
    if path.is_dir():
        table = read_folder(path, columns, bad, max(MESH_POINTS, span(points or 1)[1]))
    elif path.is_file() and suffix in READERS:
        reading.check_room(there.st_size, path)
        try:
            table = READERS[suffix](path, columns, bad)
        except OSError as e:
            raise DataError(f"{path}: cannot be read ({e.strerror})") from None
    else:
        hint = f"want a folder, or one of {' '.join(READERS)}"
        raise DataError(f"{path}: {suffix or 'no suffix'} is no format of many sets: {hint}")
    source = as_sets(table, path, float(noise))
    if not noise:
        note_repeats(source, path)
    return source


def as_sets(table, path, noise):
    """A table whose labels are numbers of classes, and whose points are checked."""
    count, names = len(table.names), [word(name) for name in table.names]
    classes, labels = UNLABELLED, np.zeros(count, np.int64)
    if table.label is not None:
        if table.label.size != count:
            raise DataError(f"{path}: label is {table.label.shape}: want ({count},), one for each")
        classes, labels = np.unique(table.label.ravel(), return_inverse=True)
        classes = tuple(word(c) for c in classes)
    start = np.concatenate([[0], np.cumsum(table.size)])
    with np.errstate(over="ignore"):
        points = table.points.astype(np.float32, copy=False)
    if not (fine := np.isfinite(points).all(1)).all():
        point = fine.argmin()
        raise DataError(
            f"{path}: {table.points[point].tolist()} is too large for float32: scale it"
        )
    more = (_context_of(table, names, path), table.times, table.frames, noise)
    return OwnSets(points, start, labels, classes, _part_of(table, names, path), names, *more)


def _part_of(table, names, path):
    """The split of each set, "" if it has none."""
    if table.split is None:
        return np.full(len(names), "")
    part = np.array([PARTS.get(str(p).lower(), "?") for p in table.split.ravel()])
    if (wrong := np.flatnonzero(part == "?")).size:
        fault = f"{str(table.split[wrong[0]])!r} of set {names[wrong[0]]!r}"
        raise DataError(f"{path}: split {fault} is not train, valid or test")
    return part


def _context_of(table, names, path):
    """What sets are conditioned on (N, c), float32, or None."""
    if table.context is None:
        return None
    if table.context.dtype.kind not in "fiub":
        raise DataError(f"{path}: context is {table.context.dtype}: want numbers")
    context = table.context.astype(np.float32).reshape(len(names), -1)
    if not (fine := np.isfinite(context).all(1)).all():
        name = names[fine.argmin()]
        raise DataError(f"{path}: the context of set {name!r} is not finite numbers")
    return context


def note_repeats(source, path, most=100_000):
    """Say so if points repeat or coordinates are rounded: their density has no bound."""
    x = source.points[:most]
    which = np.searchsorted(source.start, np.arange(len(x)), "right")
    way = "so log p has no bound: add noise=σ (--noise)"
    for k, axis in enumerate(x.T):
        values = np.unique(axis)
        if len(values) > max(len(axis) // 4, 1) or len(axis) < 8:
            continue
        step = np.diff(values).min() if len(values) > 1 else 0
        grid = f", {step:g} apart or more, {way} of about {step / 2:g}" if step else f", {way}"
        say(f"{path}: coordinate {k} has only {len(values)} values in {len(x)} points{grid}")
        return
    rows = np.unique(np.column_stack([which, x.astype(np.float64)]), axis=0)
    if repeated := len(x) - len(rows):
        say(f"{path}: {repeated} of {len(x)} points are repeated exactly in their set, {way}")
