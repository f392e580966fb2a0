"""Shapes from disk: every common copy of ModelNet, and points on the surface of a mesh.

    Sec. 4.2, 4.3  ModelNet40 point clouds   modelnet_points, surface_points

Shapes: vertices are `(V, 3)`, triangles `(F, 3)`, a cloud `(m, 3)`, clouds `(N, m, 3)`.

Departures from the paper
- Its own HDF5 file is not to be had any more, so any copy of ModelNet serves; every shape is
  centred and scaled to radius 1, whatever its units were.
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
import zlib
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


class DataError(ValueError):
    """Data that is missing or wrong: one line naming the place, the fault and the way out."""


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
