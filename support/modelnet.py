"""Every common copy of ModelNet, its cache, and shapes of the test set that training has, too.

    Secs. 4.2, 4.3  ModelNet40 point clouds   modelnet_points: (N, m, 3) of one category and split

Shapes: one cloud `(m, 3)`.

Departures from the paper
- Its own HDF5 file is hard to find, so any copy serves: `COPIES`, in the order of preference.
- Copies differ in their units: each shape is centred and scaled to radius 1.
- Two of them have y upwards: their axes are turned, so that it is z as in the others.
"""

import errno
import functools
import os
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np

from support import reading
from support.files import write_whole
from support.meshes import read_off, surface_points
from support.reading import DataError, Progress, Refused, bad_line, fingerprint, read_table, say

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
LARGEST = 1 << 30  # bytes of a mesh that was compressed: ModelNet's stay far below
UNPACKED, EXPANDS = 1 << 34, 100  # bytes of all of them, and how many times those of the zip


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
    points = np.ascontiguousarray(points[:, list(axes)], np.float64)
    if not (fine := np.isfinite(points).all(1)).all():
        raise DataError(f"{name}, point {fine.argmin()}: not a finite number")
    if len(points) == 0 or not np.ptp(points, 0).any():
        raise DataError(f"{name}: no two different points in it")
    seed = fingerprint(points.astype(np.float32))
    return np.random.default_rng(seed).permutation(points)[:count]


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
    members, whole = {}, sum(info.file_size for info in archive.infolist())
    if whole > min(UNPACKED, EXPANDS * Path(path).stat().st_size + (1 << 20)):
        raise Refused(f"{path}: refused, it would unpack to {whole} bytes")
    for info in sorted(archive.infolist(), key=lambda info: info.filename):
        parts = tuple(info.filename.replace("\\", "/").split("/"))
        outside = ".." in parts or parts[0] == "" or ":" in parts[0]
        if outside or stat.S_ISLNK(info.external_attr >> 16) or info.file_size > LARGEST:
            fault = "would leave the folder or fill the disk"
            raise Refused(f"{path}: refused, its member {info.filename[-99:]!r} {fault}")
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
            table = read_table(text, 6)
        except OSError as e:
            raise DataError(f"{file}: {e.strerror}; it is in the list of shapes") from None
        except ValueError:
            raise DataError(f"{file}, {bad_line(text, columns=6)}") from None
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
    """Up to `count` points of each shape, as many of each, of radius 1."""
    clouds, bar = [], Progress(label, len(shapes))
    for shape in shapes:
        clouds.append(read(shape, count))
        bar.show(len(clouds))
    sizes = [len(cloud) for cloud in clouds]
    if (fewest := min(sizes)) < max(sizes):
        which = f"shape {sizes.index(fewest) + 1} of {len(shapes)}"
        raise DataError(f"{label}: {which} has {fewest} points, others have {max(sizes)}")
    return unit_radius(np.stack(clouds), label)


def unit_radius(x, name):
    """Clouds (N, m, 3) of any scale, centred and scaled to radius 1, as float32."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x = x - x.mean(-2, keepdims=True)
        x = x / np.abs(x).max((-2, -1), keepdims=True)  # so that squares are numbers
        x = (x / np.sqrt((x**2).sum(-1)).max(-1)[:, None, None]).astype(np.float32)
    if not (fine := np.isfinite(x).all((1, 2))).all():
        which = f"shape {fine.argmin() + 1} of {len(x)}"
        raise DataError(f"{name}: {which} has coordinates too large to compute with")
    return x


def read_cache(path):
    """`points` (shapes, m, 3) of an .npz file, refused before it would fill the memory."""
    try:
        shape, dtype, expands = reading.npz_headers(path).get("points", ((), np.dtype("V"), 1))
        if len(shape) != 3 or shape[-1] != 3 or dtype.kind != "f" or 0 in shape:
            raise DataError(f"{path}: points are {dtype}{shape}, not float(shapes, m, 3)")
        if expands > 20:  # coordinates hardly compress
            raise DataError(f"{path}: expands {expands:.0f} times, so it holds no points of shapes")
        points = reading.read_npz(path, "points")["points"]
    except DataError as e:
        raise DataError(f"{e}; delete it to renew it") from None
    with np.errstate(over="ignore"):
        radius = np.sqrt(np.square(points, dtype=np.float32).sum(-1).max(-1))
    if not (fine := (radius > 0.5) & (radius < 1.01)).all():  # fewer points may miss the farthest
        fault = f"shape {fine.argmin()} has radius {radius[fine.argmin()]:g}, not 1"
        raise DataError(f"{path}: {fault}; delete it to renew it")
    return points


def write_cache(path, points):
    """Save `points` under its name in one step; a folder that cannot be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: np.savez(file, points=points))
    except OSError as e:
        if e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise DataError(f"{path}: cannot write the cache: {e.strerror}") from None
        say(f"{path}: not cached ({e.strerror}), so it will be read again next time")


# ------------------------------------------------------------------------------- twins
SAME = 1.1  # times the Chamfer distance of two draws of one shape: another draw of it, or a copy
ALIKE, LOOKS = (
    1.2,
    5,
)  # deviation of moments and extents, in units of their noise, that is worth a look; of how many


def find_twins(train, test):
    """For each test cloud (N, m, 3), whether some training cloud (M, m, 3) is of the same shape.

    A cloud's two halves are two draws of its shape: a training cloud whose halves are nearly as
    close to them as halves are to each other is a twin. Only clouds alike in extent and moments are
    compared, so that this takes seconds.
    """
    one, two = (_halves(np.float32(part)) for part in (test, train))
    a, b = ([_summary(half) for half in halves] for halves in (one, two))
    noise = np.sqrt(np.concatenate([(a[0] - a[1]) ** 2, (b[0] - b[1]) ** 2]).mean(0)) + 1e-12
    a, b = sum(a) / 2 / noise, sum(b) / 2 / noise
    return np.array([_has_twin(*pair, two, b) for pair in zip(one.swapaxes(0, 1), a)], bool)


def _has_twin(mine, summary, two, summaries):
    """Whether a cloud, given as its halves, has a twin among those whose halves are `two`."""
    apart, floor = np.sqrt(((summary - summaries) ** 2).mean(-1)), chamfer(*mine)
    for j in np.argsort(apart)[:LOOKS]:
        theirs = two[:, j]
        if apart[j] < ALIKE and chamfer(mine[0], theirs[0]) < 1.5 * floor:  # else why look closer
            between = np.mean([chamfer(x, y) for x in mine for y in theirs])
            if between <= SAME * (floor + chamfer(*theirs)) / 2:
                return True
    return False


def _aligned(x):
    """Clouds about their mean, in units of their mean square radius."""
    x = x - x.mean(-2, keepdims=True)
    return x / np.sqrt((x**2).sum(-1, keepdims=True).mean(-2, keepdims=True))


def _halves(x):
    """Aligned clouds (N, m, 3) as two halves (2, N, m // 2, 3)."""
    x = _aligned(x)
    return np.stack([x[:, 0 : x.shape[1] // 2 * 2 : 2], x[:, 1::2]])


def chamfer(x, y):
    """Chamfer distance of two clouds (n, 3), by a product of matrices: fast, and good to 1e-6."""
    d = (x**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * x @ y.T
    return float(np.maximum(d.min(0), 0).mean() + np.maximum(d.min(1), 0).mean())


def _summary(x):
    """Second and third moments of clouds, and where they begin and end along each axis."""
    x, axes = _aligned(x), range(3)
    pairs = [(i, j) for i in axes for j in axes[i:]]
    moments = [(x[..., i] * x[..., j]).mean(-1) for i, j in pairs]
    moments += [(x[..., i] * x[..., j] * x[..., k]).mean(-1) for i, j in pairs for k in axes[j:]]
    ends = np.quantile(x, (0.02, 0.98), axis=1)  # (2, N, 3)
    return np.concatenate([np.stack(moments, -1), *ends], -1)
