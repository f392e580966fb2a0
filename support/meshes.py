"""Shapes from disk: every common copy of ModelNet, and points on the surface of a mesh.

    Secs. 4.2, 4.3  ModelNet40 point clouds   modelnet_points: (N, m, 3) of one category and split

Shapes: vertices `(V, 3)`, triangles `(F, 3)`, corners `(..., F, 3, 3)`; one cloud `(m, 3)`.

Departures from the paper
- Its own HDF5 file is hard to find, so any copy serves: `COPIES`, in the order of preference.
- Copies differ in their units: each shape is centred and scaled to radius 1.
- Two of them have y upwards: their axes are turned, so that it is z as in the others.
"""

import contextlib
import errno
import functools
import hashlib
import math
import os
import re
import shutil
import stat
import sys
import time
import zipfile
from pathlib import Path

import numpy as np

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
STORED = 2048  # points kept of each shape in the cache
LARGEST = 1 << 30  # bytes of a file that was compressed: MNIST and ModelNet's meshes stay far below


class DataError(ValueError):
    """Data that is missing or wrong: one line naming the place, the fault and the way out."""


def say(text, end="\n"):
    """A line on stderr; on a terminal it takes the place of one that ended with "\\r"."""
    clear = "\033[K" if sys.stderr.isatty() else ""
    print(f"data: {text}{clear}", end=end, file=sys.stderr, flush=True)


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
            text = f"{self.label}: {done / self.total:.0%}, {left:.0f} s left"
            say(text, end="\r" if terminal and done < self.total else "\n")


def fingerprint(array):
    """63 bits, an int64, that tell the contents of two arrays apart."""
    return int.from_bytes(hashlib.blake2b(array.tobytes(), digest_size=8).digest(), "little") >> 1


def weighted_choice(cdf, u):
    """For each row of cdf (B, m), which ends at 1, the indices (B, n) where it first exceeds u."""
    row = np.arange(len(cdf))[:, None]
    found = np.searchsorted((cdf + row).ravel(), (u + row).ravel(), "right")
    return found.reshape(u.shape) - row * cdf.shape[1]


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
    last = b"".join(text[-64:].split()[-1:])
    if last in (b".", b"+", b"-", b"+.", b"-."):  # at the end, numpy takes these for 0
        raise ValueError(f"unmatched data: {last.decode()}")
    dots = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("."))
    token = np.searchsorted(ends, dots)
    with contextlib.suppress(ValueError):
        digits = np.fromstring(text.replace(b".", b""), np.int64, sep=" ")
        places = np.zeros(len(ends), np.int64)
        places[token] = ends[token] - dots - 1
        one_each = len(digits) == len(ends) and (np.diff(token) > 0).all()
        exact = digits.max(initial=0) < 1e15 and digits.min(initial=0) > -1e15
        if one_each and exact and places.max(initial=0) < len(TENS):
            return digits / TENS[places]
    numbers = np.fromstring(text, sep=" ")
    if len(numbers) != len(ends):
        raise ValueError("two numbers without a blank between them")
    return numbers


def read_off(data, name):
    """Vertices (V, 3) and triangles (F, 3) of an OFF mesh; polygons are fanned from a corner."""
    data = re.sub(rb"#[^\n]*", b"", data) + b"\n"
    head = re.match(rb"\s*OFF\s*(\d{1,18})[ \t]+(\d{1,18})(?:[ \t]+\d+)?[ \t\r]*\n", data)
    if not head:
        raise DataError(f"{name}, line 1: not an OFF mesh: it begins with {data[:20]!r}")
    vertices, faces, start = int(head[1]), int(head[2]), head.end()
    if not vertices or not faces:
        raise DataError(f"{name}, line {data.count(10, 0, start)}: the mesh has no faces")
    ends = token_ends(data[start - 1 :]) + start - 1
    if len(ends) < 3 * vertices:
        line = data.rstrip().count(10) + 1
        raise DataError(f"{name}, line {line}: ends after {len(ends) // 3} of {vertices} vertices")
    cut = int(ends[3 * vertices - 1])
    if rest := data[cut : data.index(b"\n", cut)].strip():  # numbers are missing or too many
        line = data.count(10, 0, cut) + 1
        raise DataError(
            f"{name}, line {line}: {rest[:20]!r} after the last of 3 × {vertices} numbers"
        )
    try:
        v = read_numbers(data[start : cut + 1], ends[: 3 * vertices] - start)
    except ValueError:
        v = np.array([np.nan])
    if not np.isfinite(v).all():
        raise DataError(f"{name}, {_bad_line(data[start:cut], data.count(10, 0, start) + 1)}")
    f = _equal_faces(data[cut:], faces, vertices)
    if f is None:
        f = _any_faces(data[cut:], faces, vertices, name, data.count(10, 0, cut) + 1)
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


def _equal_faces(text, faces, vertices):
    """Triangles of a block whose faces all have the same number of corners, None of any other."""
    try:
        size, *corners = np.fromstring(text, np.int64, sep=" ").reshape(faces, -1).T
    except ValueError:
        return None
    low, high = np.min(corners, initial=0), np.max(corners, initial=0)
    if len(corners) < 3 or (size != len(corners)).any() or low < 0 or high >= vertices:
        return None
    fan = [(corners[0], corners[k], corners[k + 1]) for k in range(1, len(corners) - 1)]
    return np.stack([np.stack(triangle, -1) for triangle in fan], 1).reshape(-1, 3)


def _any_faces(text, faces, vertices, name, line):
    """Triangles of a block of any polygons, with or without colours, one to a line."""
    triangles, seen = [], 0
    for number, row in enumerate(text.split(b"\n"), line):
        if not (row := row.split()):
            continue
        line, seen, place = number, seen + 1, f"{name}, line {number}"
        if seen > faces:
            raise DataError(f"{place}: more than the {faces} faces of the header")
        try:
            size = int(row[0])
            corner = [int(c) for c in row[1 : 1 + size]]
        except ValueError:
            size = -1
        if size < 0:
            raise DataError(f"{place}: {b' '.join(row)!r} is not a face")
        if len(corner) < size:
            raise DataError(f"{place}: ends after {len(corner)} of {size} corners")
        if wrong := [c for c in corner if not 0 <= c < vertices]:
            raise DataError(f"{place}: vertex {wrong[0]} of {vertices} is not there")
        triangles += [(corner[0], *corner[i : i + 2]) for i in range(1, size - 1)]
    if seen < faces:
        raise DataError(f"{name}, line {line}: ends after {seen} of {faces} faces")
    return np.array(triangles, np.int64).reshape(-1, 3)


def surface_points(corners, u, name="mesh"):
    """Points (B, n, 3) uniform on triangles `corners` (B, F, 3, 3), from uniforms u (B, n, 3)."""
    planes = np.ascontiguousarray(corners.transpose(2, 3, 0, 1))  # far faster than rows of three
    with np.errstate(over="ignore", invalid="ignore"):
        (x, y, z), (r, s, t) = planes[1:] - planes[0]
        area = np.sqrt((y * t - z * s) ** 2 + (z * r - x * t) ** 2 + (x * s - y * r) ** 2)
        total = area.sum(-1)
    if not ((total > 0) & np.isfinite(total)).all():
        raise DataError(f"{name}: its surface has no area, or one too large to compute")
    cdf = np.cumsum(area, -1, dtype=np.float64)
    face = weighted_choice(cdf / cdf[:, -1:], u[..., 0])
    p, q = u[..., 1], u[..., 2]
    beyond = p + q > 1  # the half of the parallelogram outside the triangle is turned into it
    p, q = np.where(beyond, 1 - p, p), np.where(beyond, 1 - q, q)
    mine = corners[np.arange(len(face))[:, None], face]  # (B, n, 3, 3)
    return np.einsum("bnk,bnki->bni", np.stack([1 - p - q, p, q], -1), mine)


# ------------------------------------------------------------------------------- copies of ModelNet
# Each reader (path, category, split) returns the shapes that are there, and a function that gives
# `count` points of one of them. Points are seeded by a shape's contents: twins stay twins.
def _mesh_points(data, name, count):
    """Points (count, 3) on the surface of an OFF mesh."""
    v, f = read_off(data, name)
    u = np.random.default_rng([fingerprint(v), fingerprint(f)]).random((1, count, 3))
    return surface_points(v.take(f, 0)[None], u, name)[0]


Y_UP = (2, 0, 1)  # axes of a cloud with y upwards that become x, y and z


def _some_points(points, name, count, axes=(0, 1, 2)):
    """`count` of the points (k, ≥3) of a cloud, all if there are fewer."""
    if points.ndim != 2 or points.shape[1] < 3:
        raise DataError(f"{name}: {points.shape} numbers are no rows of x, y, z")
    points = np.ascontiguousarray(points[:, list(axes)], np.float32)
    if not (fine := np.isfinite(points).all(1)).all():
        raise DataError(f"{name}, point {fine.argmin()}: not a finite number")
    if len(points) == 0 or not np.ptp(points, 0).any():
        raise DataError(f"{name}: no two different points in it")
    return np.random.default_rng(fingerprint(points)).permutation(points)[:count]


def _off_tree(path, category, split):
    names = sorted((path / category / split).glob("[!.]*.off"))
    return names, lambda name, count: _mesh_points(name.read_bytes(), name, count)


def _off_zip(path, category, split):
    archive, members = _open_once(path, path.stat().st_mtime_ns)

    def read(info, count):
        try:
            data = archive.read(info)
        except Exception as e:  # whatever a damaged file leads to
            raise DataError(f"{path}, {info.filename}: damaged ({e}); fetch it again") from None
        return _mesh_points(data, f"{path}/{info.filename}", count)

    return members.get((category, split), []), read


@functools.lru_cache(maxsize=1)
def _open_once(path, changed):
    return open_zip(path)


def open_zip(path):
    """A zip file and its meshes by (category, split), if no member would leave its folder."""
    try:
        archive = zipfile.ZipFile(path)
    except Exception as e:
        raise DataError(f"{path}: not a whole zip file ({e}); fetch it again") from None
    members = {}
    for info in sorted(archive.infolist(), key=lambda info: info.filename):
        parts = tuple(info.filename.replace("\\", "/").split("/"))
        outside = ".." in parts or parts[0] == "" or ":" in parts[0]
        if outside or stat.S_ISLNK(info.external_attr >> 16) or info.file_size > LARGEST:
            fault = "would leave the folder or fill the disk"
            raise DataError(f"{path}: refused, its member {info.filename!r} {fault}")
        if len(parts) > 2 and parts[-1].endswith(".off") and not parts[-1].startswith("."):
            members.setdefault(parts[-3:-1], []).append(info)
    return archive, members


def check_zip(path):
    """Raise a DataError unless every member of a zip file is whole and stays inside it."""
    archive, _ = open_zip(path)
    try:
        with archive:
            broken = archive.testzip()
    except Exception as e:
        broken = e
    if broken:
        raise DataError(f"{path}: damaged ({broken})")


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


def _resampled(path, category, split):
    """modelnet40_normal_resampled: rows x,y,z,nx,ny,nz; the lists name the official splits."""
    try:
        names = (path / f"modelnet40_{split}.txt").read_text().split()
    except Exception as e:
        raise DataError(f"{path}: no list of the {split} shapes ({e})") from None

    def read(name, count):
        file = path / category / f"{name}.txt"
        try:
            text = file.read_bytes().replace(b",", b" ") + b"\n"
            table = read_numbers(text).reshape(-1, 6)
        except OSError as e:
            raise DataError(f"{file}: {e.strerror}; it is in the list of shapes") from None
        except ValueError:
            raise DataError(f"{file}, {_bad_line(text, columns=6)}") from None
        return _some_points(table, file, count, Y_UP)

    return [n for n in names if n.rpartition("_")[0] == category], read


def _hdf5(path, category, split):
    """modelnet40_ply_hdf5_2048 (a folder) or the authors' ModelNet40_cloud.h5 (one file)."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path} is HDF5: run `pip install h5py` to read it") from None
    files, points, labels = sorted(path.glob(f"ply_data_{split}*.h5")), "data", "label"
    axes = Y_UP
    if path.is_file():
        tag = {"train": "tr", "test": "test"}[split]
        files, points, labels = [path], f"{tag}_cloud", f"{tag}_labels"
        axes = (0, 1, 2)
    clouds = []
    for file in files:
        try:
            with h5py.File(file) as f:
                mine = np.flatnonzero(f[labels][:].ravel() == MODELNET40.index(category))
                clouds += [(f"{file}, shape {i}", f[points][i]) for i in mine]
        except Exception as e:
            raise DataError(f"{file}: no {points!r} and {labels!r} in it ({e})") from None
    return clouds, lambda cloud, count: _some_points(cloud[1], cloud[0], count, axes)


COPIES = {  # by their names for ModelNet40; of ModelNet10 there are the first two
    "ModelNet40": _off_tree,
    "ModelNet40.zip": _off_zip,
    "modelnet40_normal_resampled": _resampled,
    "modelnet40_ply_hdf5_2048": _hdf5,
    "ModelNet40_cloud.h5": _hdf5,
}


# ------------------------------------------------------------------------------- the cache
def modelnet_points(root, name, category, split, points):
    """Shapes (N, m ≥ points, 3) of radius 1: from the cache, else from a copy, which fills it."""
    cache = Path(root) / name / f"{category}_{split}.npz"
    copies = {file.replace("40", name[-2:]): reader for file, reader in COPIES.items()}
    copies = copies if name == "modelnet40" else dict(list(copies.items())[:2])
    stored, origin = read_cache(cache) if cache.is_file() else None, cache
    tree = Path(root) / next(iter(copies))
    there = len(_off_tree(tree, category, split)[0])
    if stored is not None and there > len(stored):  # it was read before all were unpacked
        say(f"{cache}: {len(stored)} shapes, but {there} in {tree}; delete it to renew it")
    if stored is None or stored.shape[1] < points:
        for file, reader in copies.items():
            path = Path(root) / file
            shapes, read = reader(path, category, split) if path.exists() else ((), None)
            if shapes:
                label = f"{path}: {category} {split}"
                stored, origin = _read_all(shapes, read, max(STORED, points), label), path
                break
    if stored is None:
        raise DataError(
            f"no {split} shapes of {category!r} in {root}: looked for {cache} and in "
            f"{', '.join(copies)}; run `python data.py {name.removesuffix('40')} "
            f"--root {root}` or name its folder with --root"
        )
    if stored.shape[1] < points:
        raise DataError(f"{origin}: {stored.shape[1]} points per shape, but {points} are asked for")
    if origin != cache:
        write_cache(cache, stored)
    return stored


def _read_all(shapes, read, count, label):
    """Up to `count` points of each shape, as many of each, centred and scaled to radius 1."""
    clouds, bar = [], Progress(label, len(shapes))
    for shape in shapes:
        clouds.append(read(shape, count))
        bar.show(len(clouds))
    sizes = [len(cloud) for cloud in clouds]
    if (fewest := min(sizes)) < max(sizes):
        which = f"shape {sizes.index(fewest) + 1} of {len(shapes)}"
        raise DataError(f"{label}: {which} has {fewest} points, others have {max(sizes)}")
    x = np.stack(clouds)
    x = x - x.mean(-2, keepdims=True)
    return (x / np.sqrt((x**2).sum(-1)).max(-1)[:, None, None]).astype(np.float32)


def read_cache(path):
    """`points` (shapes, m, 3) of an .npz file, never unpickling anything."""
    try:
        with np.load(path, allow_pickle=False) as f:
            points = f["points"]
    except Exception as e:
        raise DataError(f"{path}: no cache of points ({e}); delete it to renew it") from None
    if points.ndim != 3 or points.shape[-1] != 3 or points.dtype.kind != "f" or not points.size:
        raise DataError(f"{path}: points are {points.dtype}{points.shape}, not float(shapes, m, 3)")
    with np.errstate(over="ignore"):
        radius = np.sqrt(np.square(points, dtype=np.float32).sum(-1).max(-1))
    if not (fine := (radius > 0.5) & (radius < 1.01)).all():  # fewer points may miss the farthest
        fault = f"shape {fine.argmin()} has radius {radius[fine.argmin()]:g}, not 1"
        raise DataError(f"{path}: {fault}; delete it to renew it")
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
            raise DataError(f"{path}: cannot write the cache: {e.strerror}") from None
        say(f"{path}: not cached ({e.strerror}), so it will be read again next time")
    finally:
        with contextlib.suppress(OSError):  # there is none, or the folder is read-only
            part.unlink()
