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

import contextlib
import os
import re
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support import reading
from support.meshes import read_obj, read_off, read_pcd, read_ply, surface_points
from support.reading import DataError, Progress, fingerprint, say

PARTS = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}
SKIP = "mend or remove it, or go on without it by skip_bad (--skip-bad)"
MESH_POINTS = 2048  # of a mesh, unless more are asked for
MORE = ("label", "context", "split")  # what is known of each set
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
        self.found.append(str(error).removesuffix(f"; {SKIP}"))

    def tell(self, total):
        """Say how many of `total` were left out, and begin anew."""
        found, self.found = self.found, []
        if len(found) == total:
            raise DataError(f"{self.path}: none of {total} sets can be used: {found[0]}")
        for text in found[:9]:
            say(f"left out: {text}")
        if found:
            say(f"{self.path}: {len(found)} of {total} sets are left out as bad")


def word(value):
    """The name that a number or a word in a file is; 7.0 is 7."""
    whole = isinstance(value, np.floating) and np.isfinite(value) and value == int(value)
    return str(int(value) if whole else value)


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
def read_npz(path, columns, bad):
    """An .npz file: one table, or one for each of train, valid and test."""
    arrays = reading.read_npz(path)
    for role, names in columns.items():
        if missing := [n for n in names if n not in arrays]:
            raise DataError(f"{path}: no array {missing[0]!r}: there are {', '.join(arrays)}")
        found = [arrays[n] for n in names]
        arrays[role] = found[0] if len(found) == 1 else np.stack(found, -1)
    parts = {part: {} for part in PARTS}
    for name, array in arrays.items():
        part, _, rest = name.partition("_")
        if part in PARTS:
            parts[part][rest or "x"] = array
    parts = {part: mine for part, mine in parts.items() if mine}
    if not parts:
        return _table_of(arrays, path, bad)
    tables = []
    for part, mine in parts.items():
        table = _table_of(mine, f"{path}, {part}", bad)
        table.split = np.repeat(part, len(table.names))
        table.names = [f"{part} {name}" for name in table.names]
        tables.append(table)
    return _joined(tables, path)


def _table_of(arrays, name, bad):
    """The table in the arrays of an .npz file."""
    for what, array in arrays.items():
        if array.dtype.kind not in "fiubUS":
            raise DataError(f"{name}: {what} is {array.dtype}: want numbers or words")
    if "t" in arrays:
        arrays = {"time": arrays["t"], **arrays}
    if "x" in arrays:
        return _padded(arrays, name, bad)
    if "points" in arrays and "set" in arrays:
        return _long(arrays, name, bad)
    there = ", ".join(arrays) or "nothing"
    raise DataError(f"{name}: no x, nor points and set: there are {there}; name them by columns")


def _padded(arrays, name, bad):
    """A table of x (N, n, d), or of series (N, T, n, d), without what does not exist."""
    x, mask = arrays["x"], arrays.get("mask")
    x = x[:, :, None] if x.ndim == 2 else x  # d = 1
    if x.ndim not in (3, 4) or x.dtype.kind not in "fiu" or not x.size:
        raise DataError(f"{name}: x is {x.dtype}{x.shape}: want numbers (N, n, d) or (N, T, n, d)")
    if mask is not None and mask.shape != x.shape[:-1]:
        raise DataError(f"{name}: mask is {mask.shape}: want {x.shape[:-1]}, as x has")
    there = ~np.isnan(x).all(-1) if mask is None else mask.astype(bool)
    fine = np.isfinite(x).all(-1) | ~there
    every = _rows(arrays.get("name", np.arange(len(x))), len(x), f"{name}: name")
    keep = there.reshape(len(x), -1).any(1) & fine.reshape(len(x), -1).all(1)
    for i in np.flatnonzero(~keep):
        point = ", ".join(map(str, np.unravel_index(np.argmin(fine[i]), fine[i].shape)))
        fault = f"point {point} is not finite numbers" if there[i].any() else "no points in it"
        bad.add(DataError(f"{name}, set {word(every[i])}: {fault}; {SKIP}"))
    bad.tell(len(x))
    more = {k: _rows(arrays.get(k), len(x), f"{name}: {k}", keep) for k in MORE}
    table = Table(x[keep][there[keep]], there[keep].sum(-1).ravel(), list(every[keep]), **more)
    if x.ndim == 4:
        times = _check_times(arrays.get("time", np.arange(x.shape[1])), x, name)
        table.times = times if times.ndim == 1 else _shared(times[keep])
        table.frames = np.arange(len(table.size)).reshape(-1, x.shape[1])
    return table


def _rows(rows, count, name, keep=slice(None)):
    """Those rows of an array, one for each set, that are kept; None of none."""
    if rows is not None and (rows.ndim == 0 or len(rows) != count):
        raise DataError(f"{name} has {np.shape(rows)} rows for {count} sets: give one each")
    return None if rows is None else rows[keep]


def _check_times(time, x, name):
    """Times (T,) or (N, T), increasing along T."""
    if time.dtype.kind not in "fiu" or time.shape not in ((x.shape[1],), x.shape[:2]):
        want = f"numbers ({x.shape[1]},) or {x.shape[:2]}"
        raise DataError(f"{name}: time is {time.dtype}{time.shape}: want {want}, as x has")
    if not np.isfinite(time).all() or not (np.diff(time.astype(np.float64)) > 0).all():
        raise DataError(f"{name}: times of a series must be finite and increase")
    return time.astype(np.float64)


def _shared(times):
    """Times (N, T), or (T,) if they are the same for all series."""
    return times[0] if (times == times[0]).all() else times


def _long(arrays, name, bad):
    """A table of points (P, d), the set of each, and perhaps its time."""
    points, which, time = arrays["points"], arrays["set"], arrays.get("time")
    points = points[:, None] if points.ndim == 1 else points
    if points.ndim != 2 or points.dtype.kind not in "fiu" or not points.size:
        raise DataError(f"{name}: points are {points.dtype}{points.shape}: want numbers (P, d)")
    for what, rows in (("set", which), ("time", time)):
        if rows is not None and rows.shape != (len(points),):
            raise DataError(f"{name}: {what} is {rows.shape}: want ({len(points)},), one per point")
    if time is not None and time.dtype.kind not in "fiu":
        raise DataError(f"{name}: time is {time.dtype}: want numbers")
    names, of = np.unique(which, return_inverse=True)
    moment = np.zeros(len(points)) if time is None else time.astype(np.float64)
    fine, keep = np.isfinite(points).all(1) & np.isfinite(moment), np.ones(len(names), bool)
    for row in np.flatnonzero(~fine):
        if keep[of[row]]:
            place = f"set {word(names[of[row]])}, row {row}"
            bad.add(DataError(f"{name}, {place}: not finite numbers; {SKIP}"))
        keep[of[row]] = False
    bad.tell(len(names))
    more = {k: _per_set(arrays.get(k), of, len(names), f"{name}: {k}", keep) for k in MORE}
    order = np.lexsort((moment, of))  # stable: points of a set stay in their order
    order = order[keep[of[order]]]
    table = Table(points[order], None, list(names[keep]), **more)
    series, moment = (np.cumsum(keep) - 1)[of[order]], moment[order]
    first = np.flatnonzero(np.r_[True, (np.diff(series) != 0) | (np.diff(moment) != 0)])
    table.size = np.diff(np.r_[first, len(order)])
    if time is not None:
        _place(table, series[first], moment[first])
    return table


def _place(table, series, moment):
    """Set frames and times (N, T) of a table whose sets are of these series at these moments."""
    position = np.arange(len(series)) - np.searchsorted(series, series)
    table.frames = np.full((len(table.names), position.max() + 1), -1)
    table.frames[series, position] = np.arange(len(series))
    times = np.full(table.frames.shape, np.nan)
    times[series, position] = moment
    table.times = _shared(times)


def _per_set(rows, of, count, name, keep):
    """A row for each set that is kept, from one for each set or one for each of its points."""
    if rows is None or rows.ndim == 0 or len(rows) != len(of) or len(of) == count:
        return _rows(rows, count, name, keep)
    _, first = np.unique(of, return_index=True)
    if (other := (rows != rows[first][of]).reshape(len(of), -1).any(1)).any():
        raise DataError(f"{name} in row {other.argmax()} is not that of the set's other points")
    return rows[first][keep]


def _joined(tables, path):
    """Tables one after the other."""
    if len({t.points.shape[1] for t in tables}) > 1:
        raise DataError(f"{path}: points of train, valid and test sets have not as many axes")
    joined = {"names": [name for t in tables for name in t.names]}
    for what in ("points", "size", *MORE, "frames"):
        rows = [getattr(t, what) for t in tables]
        if len({r is None for r in rows}) > 1:
            raise DataError(f"{path}: {what!r} is there for some of train, valid and test only")
        if what != "frames":
            joined[what] = None if rows[0] is None else np.concatenate(rows)
    table = Table(**joined)
    if tables[0].frames is not None:
        shift = np.cumsum([0] + [len(t.size) for t in tables])
        wide = max(t.frames.shape[1] for t in tables)
        frames = [np.where(t.frames < 0, -1, t.frames + s) for t, s in zip(tables, shift)]
        times = [np.broadcast_to(t.times, t.frames.shape) for t in tables]
        table.frames = np.concatenate([_wider(f, wide, -1) for f in frames])
        table.times = _shared(np.concatenate([_wider(t, wide, np.nan) for t in times]))
    return table


def _wider(rows, width, value):
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)


def read_npy(path, columns, bad):
    """An .npy file: x (N, n, d), or series (N, T, n, d)."""
    return _padded({"x": _npy(path)}, path, bad)


def _npy(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy's, of files from Python 2
        with open(path, "rb") as file:
            reading.npy_header(file, os.fstat(file.fileno()).st_size, path)
        try:
            return np.load(path, allow_pickle=False)
        except Exception as e:  # whatever a damaged header leads to
            raise DataError(f"{path}: not a .npy array ({e})") from None


def read_jets(path, columns, bad):
    """HDF5 as JetNet has it: the last of the particles' features is the mask."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path} is HDF5: run `pip install h5py` to read it") from None
    try:
        with h5py.File(path) as f:
            x = np.asarray(f["particle_features"][:], np.float32)
            context = {"context": f["jet_features"][:]} if "jet_features" in f else {}
    except Exception as e:
        raise DataError(f"{path}: no 'particle_features' in it ({e})") from None
    if x.ndim != 3 or x.shape[-1] < 2 or not np.isin(x[..., -1], (0, 1)).all():
        fault = "want (jets, particles, features), with 0 or 1 in the last, which is the mask"
        raise DataError(f"{path}: particle_features are {x.shape}: {fault}")
    return _padded({"x": x[..., :-1], "mask": x[..., -1] > 0, **context}, path, bad)


# ------------------------------------------------------------------------------- text
def read_text(path, columns, bad):
    """A .csv or .txt file with a header and a row for each point."""
    head, _, body = reading.unix_text(path.read_bytes()).partition(b"\n")
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
    table = _text_columns(body, names, cut, path, {n for found in roles.values() for n in found})

    arrays = {role: table[found[0]] for role, found in roles.items()}
    for role in ("points", "time", "context"):
        if role in roles:
            found = [_as_numbers(table[n], n, path) for n in roles[role]]
            arrays[role] = found[0] if role == "time" else np.stack(found, -1)
    return _long(arrays, path, bad)


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
    with contextlib.suppress(ValueError):  # some columns are words, or a line is wrong
        return dict(zip(names, reading.read_table(plain + b"\n", count).T))
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
        fault = f"{str(column[row])!r} in column {name!r} of row {row} is not a number"
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

    def some(first):
        return [_tried(f, columns.get("points"), mesh_points) for f in files[first : first + 64]]

    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for read in pool.map(some, range(0, len(files), 64)):
            clouds += read
            bar.show(len(clouds))
    good, names = [], []
    for name, cloud in zip(files, _of_one_dim(files, clouds)):
        if isinstance(cloud, DataError):
            bad.add(DataError(f"{cloud}; {SKIP}"))
        else:
            good.append(cloud)
            names.append(name.relative_to(path).as_posix())
    bad.tell(len(files))
    size = np.array([len(cloud) for cloud in good])
    return Table(np.concatenate(good), size, names, *_folders(names, path))


def _of_one_dim(files, clouds):
    """The clouds, with an error in place of those of another d than most have."""
    dims = Counter(c.shape[1] for c in clouds if not isinstance(c, DataError))
    usual = max(dims, key=dims.get, default=0)
    for file, cloud in zip(files, clouds):
        if isinstance(cloud, DataError) or cloud.shape[1] == usual:
            yield cloud
        else:
            fault = f"points of {cloud.shape[1]} axes, where others have {usual}"
            yield DataError(f"{file}: {fault}")


def _tried(*file):
    """The points of a file, or the error that they are."""
    try:
        return read_file(*file)
    except DataError as e:
        return e


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
    if reader is None or not path.is_file():
        raise DataError(f"{path}: no format of a set, as {' '.join(FILES)} are")
    try:
        reading.check_room(path.stat().st_size, path)
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
        points = points.astype(np.float32, copy=False)
    if not (fine := np.isfinite(points).all(1)).all():
        raise DataError(f"{path}, point {fine.argmin()}: not finite numbers")
    return points


def _text_points(path, wanted):
    """Rows of numbers, perhaps below a header; all columns, unless some are wanted."""
    text = re.sub(rb"#[^\n]*", b"", reading.unix_text(path.read_bytes())) + b"\n"
    head, _, body = text.lstrip().partition(b"\n")
    names, cut = _fields(head)
    header = not all(_is_number(n) for n in names if n)
    body = body if header else text
    body = body if cut is None else body.replace(cut.encode(), b" ")
    names = [n if header else str(k) for k, n in enumerate(names) if n]
    try:
        table = reading.read_table(body, len(names))
    except ValueError:
        line = text.count(b"\n") - body.count(b"\n") + 1
        raise DataError(f"{path}, {reading.bad_line(body, line, len(names))}") from None
    if missing := [w for w in wanted or () if w not in names]:
        raise DataError(f"{path}, line 1: no column {missing[0]!r}: there are {', '.join(names)}")
    return table if wanted is None else table[:, [names.index(w) for w in wanted]], None


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
READERS = {".npz": read_npz, ".npy": read_npy, ".csv": read_text}
READERS |= {".txt": read_text, ".h5": read_jets, ".hdf5": read_jets}
