"""What tests of data share: small copies of MNIST and ModelNet, and where the real ones are."""

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent
REAL = REPOSITORY.parent / "shared" / "data"
needs_mnist = pytest.mark.skipif(not (REAL / "mnist").is_dir(), reason="no ../shared/data/mnist")
needs_modelnet = pytest.mark.skipif(
    not (REAL / "modelnet40").is_dir(), reason="no ../shared/data/modelnet40"
)
in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SQUARE = b"OFF\n4 2 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n3 0 1 2\n3 0 2 3\n"


def one_line(error, *parts):
    """An error's message is one line that holds all parts."""
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, text


def idx(array):
    head = b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def make_mnist(root, train=40, test=20, zipped=True, folder="mnist"):
    """Random images, of which every fifth has few active pixels."""
    made = {}
    (root / folder).mkdir(parents=True, exist_ok=True)
    for part, n, seed in (("train", train, 0), ("t10k", test, 1)):
        rng = np.random.default_rng(seed)
        images = rng.integers(1, 256, (n, 28, 28)) * (rng.random((n, 28, 28)) < 0.2)
        images[::5] *= rng.random((len(images[::5]), 28, 28)) < 0.1
        images[:, 14, 14] = 200
        labels = np.arange(n) % 10
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = root / folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
            made[path.name.removesuffix(".gz")] = path
    return made


def box(*size):
    """An OFF box with the given edges, of six quadrilaterals."""
    corners = [(x, y, z) for x in (0, size[0]) for y in (0, size[1]) for z in (0, size[2])]
    faces = ["0 1 3 2", "4 6 7 5", "0 4 5 1", "2 3 7 6", "0 2 6 4", "1 5 7 3"]
    rows = [" ".join(f"{c:.4f}" for c in v) for v in corners] + [f"4 {f}" for f in faces]
    return "\n".join(["OFF", "8 6 0", *rows, ""]).encode()


def make_modelnet(root, categories=("chair", "table"), train=6, test=3):
    for k, category in enumerate(categories):
        for part, n in (("train", train), ("test", test)):
            folder = root / "ModelNet40" / category / part
            folder.mkdir(parents=True)
            for i in range(n):
                number = i + 1 + (train if part == "test" else 0)
                (folder / f"{category}_{number:04d}.off").write_bytes(box(1 + k, 2, 1 + number / 9))
    return root


def zip_tree(root, name="ModelNet40"):
    with zipfile.ZipFile(root / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr(f"__MACOSX/{name}/chair/train/._chair_0001.off", b"not a mesh")
        for path in sorted((root / name).rglob("*.off")):
            z.writestr(str(path.relative_to(root)), path.read_bytes())
    return root / f"{name}.zip"


def same(a, b):
    return all(
        (s.draw(np.arange(len(s)))[0] == t.draw(np.arange(len(t)))[0]).all() for s, t in zip(a, b)
    )


class Hdf5:
    """The part of h5py, which is not among our packages, that we use: on .npz files."""

    def __init__(self, path):
        self.file = np.load(path)

    def __enter__(self):
        return self.file

    def __exit__(self, *_):
        self.file.close()


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
