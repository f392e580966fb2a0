"""Files and folders that hold a person's own sets and series.

    .npz     padded: x (N, n, d), optional mask (N, n), label (N,), context (N, c), name (N,);
             series: x (N, T, n, d), time (T,) or (N, T), mask (N, T, n);
             long: points (P, d), set (P,), optional time (P,); label and context have a row for
             each set, in the order of increasing `set`
    .npy     x as above; a row of NaN is no point. Series have times 0, 1, 2, …
    .csv     (or .txt) long, with a header: set, coordinates, optional time, label, split
    .h5      JetNet: particle_features (N, n, d + 1), whose last column is the mask, jet_features
    folder   a file for each set: .npy .xyz .txt .csv .ply .pcd .off .obj; meshes are sampled by
             area; folders inside are labels

Splits: folders called train, valid or test; in tables `split`, one of these words for each set; in
.npz files also keys with these words in front (train_x, test_label). Else a tenth of the sets is
for the test, always the same, and a tenth for validation, chosen by the seed.

`columns` renames what is looked for: "set=event,points=eta+phi+pt,context=mass" takes these
columns or keys. `skip_bad` goes on without files and sets that are wrong. Nothing is unpickled.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from support import reading
from support.meshes import read_obj, read_off, read_pcd, read_ply, surface_points
from support.reading import DataError, Progress, fingerprint, say

PARTS = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}
SKIP = "mend or remove it, or go on without it by skip_bad (--skip-bad)"
MESH_POINTS = 2048  # of a mesh, unless more are asked for
ROLES = ("set", "points", "time", "label", "split", "context", "x", "mask", "name")


@dataclass(eq=False)
class Table:
    """What a reader finds: points (P, d), sizes of sets, and what is known of each series."""

    points: np.ndarray
    size: np.ndarray  # (F,)
    names: list
    label: np.ndarray | None = None
    context: np.ndarray | None = None
    split: np.ndarray | None = None
    times: np.ndarray | None = None  # (T,) or (N, T)
    frames: np.ndarray | None = None  # (N, T)


@dataclass
class Bad:
    """What to do with what is wrong: raise it, or note it and go on."""

    path: Path
    skip: bool
    found: list = field(default_factory=list)

    def add(self, error):
        if not self.skip:
            raise error
        self.found.append(str(error))

    def tell(self, total):
        if self.found:
            say(f"{self.path}: {len(self.found)} of {total} left out as bad; {self.found[0]}")
        if len(self.found) == total:
            raise DataError(f"{self.path}: none of {total} sets can be used; {self.found[0]}")


def read_columns(columns):
    """Roles and the columns or keys that play them: "set=event,points=eta+phi" or a dict."""
    if isinstance(columns, str):
        pairs = [pair.partition("=") for pair in columns.split(",") if pair.strip()]
        columns = {role.strip(): names.strip() for role, _, names in pairs}
    for role, names in (columns or {}).items():
        if role not in ROLES or not names:
            want = "role=name[+name…] with roles " + ", ".join(ROLES)
            raise DataError(f"columns: {role}={names!r} is not understood: want {want}")
    split = {r: n.split("+") if isinstance(n, str) else list(n) for r, n in (columns or {}).items()}
    return {role: [n.strip() for n in names] for role, names in split.items()}


# ------------------------------------------------------------------------------- arrays
def read_arrays(path, columns, bad):
    """An .npz file: one table, or one for each of train, valid and test."""
    arrays = reading.read_npz(path)
    for role, names in columns.items():
        if missing := [n for n in names if n not in arrays]:
            raise DataError(f"{path}: no array {missing[0]!r}: there are {', '.join(arrays)}")
        found = [arrays[n] for n in names]
        arrays[role] = found[0] if len(found) == 1 else np.stack(found, -1)
    parts = {p: {} for p in PARTS}
    for name, array in arrays.items():
        part, _, rest = name.partition("_")
        if part in PARTS:
            parts[part][rest or "x"] = array
    tables, total = [], 0
    for part, mine in ({"": arrays} if not any(parts.values()) else parts).items():
        if mine:
            table, count = _table_of(mine, f"{path}, {part}" if part else path, bad)
            table.split = np.repeat(part, len(table.names)) if part else mine.get("split")
            tables.append(table)
            total += count
    bad.tell(total)
    return _joined(tables, path)


def _joined(tables, path):
    """Tables one after the other."""
    first = tables[0]
    if len(tables) == 1:
        return first
    if len({t.points.shape[1] for t in tables}) > 1:
        raise DataError(
            f"{path}: points of train, valid and test sets differ in their number of axes"
        )
    first = replace(first)
    for name in ("points", "size", "label", "context", "split"):
        rows = [getattr(t, name) for t in tables]
        if sum(r is None for r in rows) % len(tables):
            raise DataError(f"{path}: {name!r} is there for some of train, valid and test only")
        setattr(first, name, None if rows[0] is None else np.concatenate(rows))
    first.names = [n for t in tables for n in t.names]
    if first.frames is not None:
        shift = np.cumsum([0] + [len(t.size) for t in tables])
        wide = max(t.frames.shape[1] for t in tables)
        frames = [np.where(t.frames < 0, -1, t.frames + s) for t, s in zip(tables, shift)]
        frames = [np.pad(f, ((0, 0), (0, wide - f.shape[1])), constant_values=-1) for f in frames]
        times = [_rows_of_times(t, wide) for t in tables]
        first.frames, first.times = np.concatenate(frames), _shared(np.concatenate(times))
    return first


def _rows_of_times(table, wide):
    times = np.broadcast_to(table.times, table.frames.shape).astype(np.float64)
    return np.pad(times, ((0, 0), (0, wide - times.shape[1])), constant_values=np.nan)


def _shared(times):
    """Times (N, T), or (T,) if they are the same for all series."""
    return times[0] if (times == times[0]).all() else times


def _table_of(arrays, name, bad):
    """The table in the arrays of an .npz file, and how many sets there are in all."""
    time = arrays.get("time", arrays.get("t"))
    more = {k: arrays.get(k) for k in ("label", "context", "split")}
    if "x" in arrays:
        return _padded(arrays["x"], arrays.get("mask"), time, arrays.get("name"), more, name, bad)
    if "points" not in arrays or "set" not in arrays:
        there = ", ".join(arrays) or "nothing"
        raise DataError(
            f"{name}: neither x, nor points and set: there are {there}; name by columns"
        )
    return _long(arrays["points"], arrays["set"], time, more, name, bad)


def _padded(x, mask, time, names, more, name, bad):
    """A table of x (N, n, d), or of series (N, T, n, d), without what does not exist."""
    x = x[:, :, None] if x.ndim == 2 and time is None else x  # d = 1
    if x.ndim not in (3, 4) or x.dtype.kind not in "fiu" or not len(x):
        raise DataError(f"{name}: x is {x.dtype}{x.shape}: want numbers (N, n, d) or (N, T, n, d)")
    if mask is not None and mask.shape != x.shape[:-1]:
        raise DataError(f"{name}: mask is {mask.shape}: want {x.shape[:-1]}, as x has")
    there = ~np.isnan(x).all(-1) if mask is None else mask.astype(bool)
    fine = np.isfinite(x).all(-1) | ~there
    names = np.arange(len(x)) if names is None else names
    keep = np.ones(len(x), bool)
    for i in np.flatnonzero(~fine.reshape(len(x), -1).all(1)):
        point = np.unravel_index(np.argmin(fine[i]), fine[i].shape)
        where = f"set {names[i]!s}, point {', '.join(map(str, point))}"
        bad.add(DataError(f"{name}, {where}: not finite numbers; {SKIP}"))
        keep[i] = False
    for i in np.flatnonzero(~there.reshape(len(x), -1).any(1)):
        bad.add(DataError(f"{name}, set {names[i]!s}: no points in it; {SKIP}"))
        keep[i] = False
    total, rows = len(x), {k: _kept(v, keep, f"{name}: {k}") for k, v in more.items()}
    x, there, names = x[keep], there[keep], np.asarray(names)[keep]
    table = Table(x[there], there.sum(-1).ravel(), list(names), rows["label"], rows["context"])
    if x.ndim == 4:
        table.times = _check_times(np.arange(x.shape[1]) if time is None else time, total, x, name)
        table.times = table.times if table.times.ndim == 1 else table.times[keep]
        table.frames = np.arange(len(table.size)).reshape(x.shape[:2])
    return table, total


def _kept(rows, keep, name):
    if rows is not None and len(rows) != len(keep):
        raise DataError(f"{name} has {len(rows)} rows for {len(keep)} sets: give one each")
    return None if rows is None else rows[keep]


def _check_times(time, count, x, name):
    """Times (T,) or (N, T), increasing along T."""
    time = np.asarray(time)
    if time.dtype.kind not in "fiu" or time.shape not in ((x.shape[1],), (count, x.shape[1])):
        want = f"numbers ({x.shape[1]},) or ({count}, {x.shape[1]})"
        raise DataError(f"{name}: time is {time.dtype}{time.shape}: want {want}, as x has")
    if not np.isfinite(time).all() or not (np.diff(time) > 0).all():
        raise DataError(f"{name}: times of a series must be finite and increase")
    return time.astype(np.float64)


def _long(points, which, time, more, name, bad):
    """A table of points (P, d) with the set that each belongs to, and perhaps its time."""
    points = points[:, None] if points.ndim == 1 else points
    if points.ndim != 2 or points.dtype.kind not in "fiu" or not points.size:
        raise DataError(f"{name}: points are {points.dtype}{points.shape}: want numbers (P, d)")
    for what, rows in (("set", which), ("time", time)):
        if rows is not None and rows.shape != (len(points),):
            raise DataError(f"{name}: {what} is {rows.shape}: want ({len(points)},), one per point")
    names, of = np.unique(which, return_inverse=True)
    keep, fine = np.ones(len(names), bool), np.isfinite(points).all(1)
    if time is not None:
        fine &= np.isfinite(np.asarray(time, np.float64))
    for i, row in zip(*np.unique(of[~fine], return_index=True)):
        row = np.flatnonzero(~fine)[row]
        bad.add(DataError(f"{name}, set {names[i]!s}, row {row}: not finite numbers; {SKIP}"))
        keep[i] = False
    rows = {k: _per_set(v, of, len(names), f"{name}: {k}") for k, v in more.items()}
    rows = {k: None if v is None else v[keep] for k, v in rows.items()}
    mine = keep[of]
    points, of = points[mine], (np.cumsum(keep) - 1)[of[mine]]
    table = Table(points, None, list(names[keep]), rows["label"], rows["context"], rows["split"])
    moment = np.zeros(len(points)) if time is None else np.asarray(time, np.float64)[mine]
    order = np.lexsort((moment, of))  # stable: points of a set stay in their order
    first = np.flatnonzero(
        np.r_[True, (np.diff(of[order]) != 0) | (np.diff(moment[order]) != 0)][: len(order)]
    )
    table.points, table.size = points[order], np.diff(np.r_[first, len(order)])
    if time is not None:
        series, moment = of[order][first], moment[order][first]
        position = np.arange(len(series)) - np.searchsorted(series, series)
        table.frames = np.full((keep.sum(), position.max(initial=0) + 1), -1)
        table.frames[series, position] = np.arange(len(series))
        times = np.full(table.frames.shape, np.nan)
        times[series, position] = moment
        table.times = _shared(times)
    return table, len(names)


def _per_set(rows, of, count, name):
    """A row for each set, from one for each set or one for each of its points."""
    if rows is None or len(rows) == count:
        return rows
    if len(rows) != len(of):
        raise DataError(f"{name} has {len(rows)} rows for {count} sets: give one each")
    _, first = np.unique(of, return_index=True)
    if (other := rows != rows[first][of]).any():
        row = int(np.argmax(other.reshape(len(of), -1).any(1)))
        raise DataError(f"{name} in row {row} is not that of the set's other points")
    return rows[first]


def read_array(path, columns, bad):
    """An .npy file: x (N, n, d), or series (N, T, n, d)."""
    table, total = _padded(_npy(path), None, None, None, {}, path, bad) if True else None
    bad.tell(total)
    return table


def _npy(path):
    with open(path, "rb") as file:
        reading.npy_header(file, os.fstat(file.fileno()).st_size, path)
    return np.load(path, allow_pickle=False)


def read_jets(path, columns, bad):
    """HDF5 as JetNet has it: the last of the particles' features is the mask."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path} is HDF5: run `pip install h5py` to read it") from None
    try:
        with h5py.File(path) as f:
            x = np.asarray(f["particle_features"][:], np.float32)
            context = np.asarray(f["jet_features"][:]) if "jet_features" in f else None
    except Exception as e:
        raise DataError(f"{path}: no 'particle_features' in it ({e})") from None
    if x.ndim != 3 or x.shape[-1] < 2 or not np.isin(x[..., -1], (0, 1)).all():
        fault = "want (jets, particles, features), with 0 or 1 in the last, which is the mask"
        raise DataError(f"{path}: particle_features are {x.shape}: {fault}")
    more = {"context": context}
    table, total = _padded(
        x[..., :-1], x[..., -1] > 0, None, None, {"label": None, **more}, path, bad
    )
    bad.tell(total)
    return table


# ------------------------------------------------------------------------------- text
def read_long_text(path, columns, bad):
    """A .csv or .txt file with a header and a row for each point."""
    text = reading.unix_text(path.read_bytes())
    head, _, body = text.partition(b"\n")
    names, cut = _fields(head)
    if all(_is_number(n) for n in names):
        raise DataError(f"{path}, line 1: {head[:40]!r} is no header, such as set,x,y")
    roles = {r: [r] for r in ("set", "time", "label", "split") if r in names} | columns
    used = {n for r, found in roles.items() for n in found if r != "points"}
    roles.setdefault("points", [n for n in names if n not in used])
    for role in ("set", *roles):
        if missing := [n for n in roles.get(role, [role]) if n not in names]:
            hint = f"there are {', '.join(names)}; name it by columns (--columns {role}=NAME)"
            raise DataError(f"{path}, line 1: no column {missing[0]!r}: {hint}")
    columns = _text_columns(body, names, cut, path, {n for found in roles.values() for n in found})

    def numbers(role):
        return np.stack([_as_numbers(columns[n], n, path) for n in roles[role]], -1)

    more = {r: columns[roles[r][0]] if r in roles else None for r in ("label", "split")}
    more["context"] = numbers("context") if "context" in roles else None
    time = numbers("time")[:, 0] if "time" in roles else None
    table, total = _long(numbers("points"), columns[roles["set"][0]], time, more, path, bad)
    bad.tell(total)
    return table


def _fields(line):
    """The fields of a line of text, and what separates them, None for blanks."""
    text = line.decode("utf-8", "replace")
    cut = next((c for c in ",;\t" if c in text), None)
    return [part.strip().strip('"') for part in text.split(cut)], cut


def _is_number(word):
    try:
        float(word)
    except ValueError:
        return False
    return True


def _text_columns(body, names, cut, path, wanted):
    """The wanted columns of the rows of a table, as numbers where all of them are."""
    count = len(names)
    plain = body if cut is None else body.replace(cut.encode(), b" ")
    try:
        table = reading.read_numbers(plain + b"\n")
        lines = len(plain.split(b"\n")) - plain.count(b"\n\n") - plain.endswith(b"\n")
        if len(table) == lines * count:
            return dict(zip(names, table.reshape(-1, count).T))
    except ValueError:
        pass  # some columns are words
    rows = []
    for number, line in enumerate(body.decode("utf-8", "replace").split("\n"), 2):
        if line.strip():
            rows.append(row := line.split(cut))
            if len(row) != count:
                raise DataError(f"{path}, line {number}: {len(row)} fields, but {count} in line 1")
    if not rows:
        raise DataError(f"{path}, line 2: no rows after the header")
    every = ([word.strip().strip('"') for word in column] for column in zip(*rows))
    return {n: _simplest(column) for n, column in zip(names, every) if n in wanted}


def _simplest(words):
    """A column as numbers, if all its words are."""
    try:
        return np.array(words, np.float64)
    except ValueError:
        return np.array(words)


def _as_numbers(column, name, path):
    if column.dtype.kind == "U":
        row = next(i for i, word in enumerate(column) if not _is_number(word))
        fault = f"{column[row]!r} in column {name!r} of row {row} is not a number"
        raise DataError(f"{path}: {fault}; take other columns by columns (--columns points=x+y)")
    return column


# ------------------------------------------------------------------------------- folders
def read_folder(path, columns, bad, mesh_points):
    """A folder with a file for each set; folders inside are labels, or splits."""
    files = sorted(
        Path(folder) / file
        for folder, _, inside in os.walk(path)
        for file in inside
        if not file.startswith(".")
    )
    if not files:
        raise DataError(f"{path}: no files in it: want one for each set ({' '.join(FILES)})")
    clouds, bar = [], Progress(str(path), len(files))

    def one(file):
        try:
            return read_file(file, columns.get("points"), mesh_points)
        except DataError as e:
            return e

    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for cloud in pool.map(one, files):
            clouds.append(cloud)
            bar.show(len(clouds))
    dims = [c.shape[1] for c in clouds if not isinstance(c, DataError)]
    usual = max(dims, key=dims.count) if dims else 0
    good, names = [], []
    for file, cloud in zip(files, clouds):
        if isinstance(cloud, DataError):
            bad.add(DataError(f"{cloud}; {SKIP}"))
        elif cloud.shape[1] != usual:
            fault = f"points of {cloud.shape[1]} axes, where others have {usual}"
            bad.add(DataError(f"{file}: {fault}; {SKIP}"))
        else:
            good.append(cloud)
            names.append(file.relative_to(path).as_posix())
    bad.tell(len(files))
    size = np.array([len(cloud) for cloud in good])
    return Table(np.concatenate(good), size, names, *_folders(names, path))


def _folders(names, path):
    """Label, context and split of each file, from the folders on the way to it."""
    ways = [name.split("/")[:-1] for name in names]
    labels = ["/".join(f for f in way if f not in PARTS) for way in ways]
    parts = [next((f for f in way if f in PARTS), "") for way in ways]
    for rows, what in ((labels, "a label"), (parts, "a split")):
        if any(rows) and not all(rows):
            name = names[rows.index("")]
            raise DataError(
                f"{path}: {name} is in no folder that is {what}, but others are: move it"
            )
    label, split = (np.array(rows) if any(rows) else None for rows in (labels, parts))
    return label, None, split


def read_file(path, wanted, mesh_points):
    """The points (n, d) of one file, float32, of a mesh as many as asked for."""
    reader = FILES.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: no format of a set, as {' '.join(FILES)} are")
    try:
        size = path.stat().st_size
        reading.check_room(size, path)
        points, triangles = reader(path, wanted)
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror})") from None
    if triangles is not None:
        seed = [fingerprint(points), fingerprint(triangles)]
        u = np.random.default_rng(seed).random((1, mesh_points, 3))
        points = surface_points(points.astype(np.float64)[triangles][None], u, path)[0]
    if points.ndim != 2 or not points.size:
        raise DataError(f"{path}: no points in it")
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    if not (fine := np.isfinite(points).all(1)).all():
        raise DataError(f"{path}, point {fine.argmin()}: not finite numbers")
    return points


def _text_points(path, wanted):
    """Rows of numbers, perhaps below a header; all columns, unless some are wanted."""
    text = re.sub(rb"#[^\n]*", b"", reading.unix_text(path.read_bytes())).lstrip() + b"\n"
    head = text[: text.index(b"\n")]
    names, cut = _fields(head)
    header = not all(_is_number(n) for n in names if n)
    body = text[len(head) + 1 :] if header else text
    plain = body if cut is None else body.replace(cut.encode(), b" ")
    if not header:
        names = [str(k) for k in range(len(names))]
    columns = reading.bad_line(plain, 1 + header, len(names))
    try:
        numbers = reading.read_numbers(plain)
        if not len(numbers):
            raise DataError(f"{path}, line 1: no rows of numbers in it")
        table = numbers.reshape(-1, len(names))
    except DataError:
        raise
    except ValueError:
        raise DataError(f"{path}, {columns}") from None
    for w in wanted or ():
        if w not in names:
            raise DataError(f"{path}, line 1: no column {w!r}: there are {', '.join(names)}")
    return (table if wanted is None else table[:, [names.index(w) for w in wanted]]), None


def _array_points(path, wanted):
    x = _npy(path)
    x = x[:, None] if x.ndim == 1 else x
    if x.ndim != 2 or x.dtype.kind not in "fiu":
        raise DataError(f"{path}: {x.dtype}{x.shape} is no set: want numbers (n, d)")
    return x[~np.isnan(x).all(1)], None


FILES = {
    ".npy": _array_points,
    ".xyz": _text_points,
    ".txt": _text_points,
    ".csv": _text_points,
    ".ply": lambda path, wanted: read_ply(path.read_bytes(), path, wanted),
    ".pcd": lambda path, wanted: read_pcd(path.read_bytes(), path, wanted),
    ".off": lambda path, wanted: read_off(path.read_bytes(), path),
    ".obj": lambda path, wanted: read_obj(path.read_bytes(), path),
}
READERS = {".npz": read_arrays, ".npy": read_array, ".csv": read_long_text}
READERS |= {".txt": read_long_text, ".h5": read_jets, ".hdf5": read_jets}
