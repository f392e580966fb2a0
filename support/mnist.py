"""The four files of MNIST: images and labels in the IDX format, raw or gzipped."""

import math
import zlib
from pathlib import Path

import numpy as np

from support.reading import DataError, Refused

MNIST = {  # md5 of the contents: every mirror compresses anew
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
AGAIN = "delete it and fetch it again"


LARGEST = 1 << 26  # bytes: the largest of the files has 47 million


def read_bytes(path):
    """Contents of a file, gunzipped if it is gzip whatever its name says, read once."""
    if (size := Path(path).stat().st_size) > LARGEST:
        raise Refused(f"{path}: {size} bytes are too large to be of MNIST; {AGAIN}")
    data = Path(path).read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data
    unzip = zlib.decompressobj(31)
    try:
        contents = unzip.decompress(data, LARGEST)
    except zlib.error as e:
        raise DataError(f"{path}: damaged gzip ({e}); {AGAIN}") from None
    end = len(data) - len(unzip.unused_data) - len(unzip.unconsumed_tail)
    if unzip.unconsumed_tail:
        raise Refused(f"{path}, offset {end}: too large to be of MNIST; {AGAIN}")
    if not unzip.eof or unzip.unused_data:
        raise DataError(f"{path}, offset {end}: the gzip file ends early, or more follows; {AGAIN}")
    return contents


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
