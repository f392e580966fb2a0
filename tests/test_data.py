"""data.py: recipes and units, readers and their errors, splits, batches, and the download."""

import gzip
import io
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data
from data import DataError, Random
from support import meshes

REPOSITORY = Path(__file__).resolve().parent.parent
REAL = REPOSITORY.parent / "shared" / "data"
needs_mnist = pytest.mark.skipif(not (REAL / "mnist").is_dir(), reason=f"no MNIST in {REAL}")
needs_modelnet = pytest.mark.skipif(not (REAL / "modelnet40").is_dir(), reason=f"none in {REAL}")
in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def one_line(error, *parts):
    """An error's message is one line that holds all parts."""
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, text


# ------------------------------------------------------------------------------- randomness
@given(
    st.integers(-(2**70), 2**70), st.integers(0, 2**20), st.lists(st.integers(0, 10**6), min_size=1)
)
def test_numbers_of_a_set_do_not_depend_on_the_other_sets(seed, epoch, index):
    together = Random(index, seed, epoch)
    a, b = together.uniform(5), together.normal(2, 3)
    alone = Random(index[-1:], seed, epoch)
    assert (alone.uniform(5)[0] == a[-1]).all()
    assert (alone.normal(2, 3)[0] == b[-1]).all()


def test_random_numbers_have_the_moments_and_independence_they_should():
    rng = Random(np.arange(2000), 3, 4)
    u, z = rng.uniform(100), rng.normal(100)
    assert u.min() >= 0
    assert u.max() < 1
    assert u.dtype == z.dtype == np.float32
    assert np.abs(np.histogram(u, 20, (0, 1))[0] / 10000 - 1).max() < 0.05
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert abs((z**4).mean() - 3) < 0.1
    for first, second in (
        (u[:, 1:], u[:, :-1]),
        (u[1:], u[:-1]),
        (u, Random(np.arange(2000), 3, 5).uniform(100)),
    ):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01


# ------------------------------------------------------------------------------- MNIST
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


def test_mnist_reads_the_same_raw_or_gzipped_and_in_torchvisions_folders(tmp_path):
    make_mnist(tmp_path / "a")
    make_mnist(tmp_path / "b", zipped=False, folder="MNIST/raw")
    a, b = (data.load("mnist", tmp_path / k).train.draw(np.arange(30)) for k in "ab")
    assert (a[0] == b[0]).all()
    assert (a[2] == b[2]).all()


def test_points_of_spatial_mnist_fall_into_active_pixels_the_right_way_up():
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 0, 3] = 255
    x = data.Flat(data.spatial_mnist(image), 1.0, 0).sample(
        np.zeros(1, int), 100, Random([0]), None
    )[0]
    assert (np.floor(28 * x) == [3, 27]).all()
    assert np.ptp(28 * x, axis=0).min() > 0.8  # spread over the pixel


@given(st.integers(0, 1000), st.integers(1, 300))
def test_pixels_are_active_and_differ_wherever_there_are_enough(seed, n):
    rng = np.random.default_rng(seed)
    images = (rng.integers(0, 256, (6, 28, 28)) * (rng.random((6, 28, 28)) < 0.2)).astype(np.uint8)
    images[0] *= rng.random((28, 28)) < 0.05
    images[:, 1, 1] = 1
    index = rng.integers(0, 6, 9)
    x = data.spatial_mnist(images)(index, n, Random(index, seed)).astype(int)
    cell = (27 - x[..., 1]) * 28 + x[..., 0]
    for i, row in zip(index, cell):
        assert images[i].ravel()[row].all()
        if np.count_nonzero(images[i]) >= n:
            assert len(set(row)) == n


def test_pixels_are_drawn_in_proportion_to_intensity_without_replacement():
    image = np.zeros((1, 28, 28), np.uint8)
    w = np.array([10, 30, 60, 100])
    image[0, 0, :4] = w
    p, draws = w / w.sum(), 40000
    x = data.spatial_mnist(image)(np.zeros(draws, int), 2, Random(np.arange(draws)))[..., 0].astype(
        int
    )
    pair = np.array([[p[i] * p[j] / (1 - p[i]) * (i != j) for j in range(4)] for i in range(4)])
    seen = np.histogram2d(x[:, 0], x[:, 1], bins=(range(5), range(5)))[0] / draws
    assert np.abs(seen - pair).max() < 5 * math.sqrt(0.25 / draws)


def test_pixels_are_drawn_in_proportion_to_intensity_with_replacement_too():
    image = np.zeros((2, 28, 28), np.uint8)
    image[1, 0, :3] = 20, 60, 120
    image[0, 5] = 7
    x = data.spatial_mnist(image)(np.ones(100, int), 400, Random(np.arange(100)))
    seen = np.bincount(x[..., 0].astype(int).ravel(), minlength=3) / 40000
    assert np.abs(seen - [0.1, 0.3, 0.6]).max() < 0.01


def test_units_of_spatial_mnist_make_a_uniform_density_score_minus_6_66(tmp_path):
    make_mnist(tmp_path)
    assert data.load("mnist", tmp_path).test.log_unit == pytest.approx(-6.6644, abs=1e-4)


@needs_mnist
def test_one_gaussian_on_real_mnist_scores_its_published_landmark():
    splits = data.load("mnist", REAL)
    assert [len(s) for s in splits] == [54000, 6000, 10000]
    x = splits.train.draw(np.arange(4000))[0].reshape(-1, 2).astype(np.float64)
    y = splits.test.draw(np.arange(4000))[0].reshape(-1, 2) - x.mean(0)
    cov = np.cov(x.T)
    log_p = -0.5 * (
        np.einsum("ni,ij,nj->n", y, np.linalg.inv(cov), y) + np.log(np.linalg.det(2 * np.pi * cov))
    )
    assert log_p.mean() + splits.test.log_unit == pytest.approx(-5.90, abs=0.02)


@in_folder
@given(st.floats(0, 1, exclude_max=True))
def test_a_gzip_cut_anywhere_is_one_clear_error(tmp_path, share):
    path = make_mnist(tmp_path)["train-images-idx3-ubyte"]
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path)
    one_line(error, path, "offset")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b"\0\0\x08\x01" + b[4:], ["offset 0", "magic", "0x801", "0x803"]),
        (lambda b: b[:-5], ["offset 31371", "31376"]),
        (lambda b: b + b"x", ["offset 31377", "31376"]),
        (lambda b: b[:4] + (39).to_bytes(4, "big") + b[8 : -28 * 28], ["39 images", "40 labels"]),
        (lambda b: b[:16] + bytes(28 * 28) + b[16 + 28 * 28 :], ["image 0", "blank"]),
        (
            lambda b: b[:8] + (56).to_bytes(4, "big") + (14).to_bytes(4, "big") + b[16:],
            ["(56, 14)"],
        ),
        (lambda b: b"", ["offset 0"]),
    ],
)
def test_a_wrong_image_file_is_one_clear_error(tmp_path, change, says):
    path = make_mnist(tmp_path, zipped=False)["train-images-idx3-ubyte"]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path)
    one_line(error, path, *says)


def test_a_damaged_gzip_and_wrong_labels_are_clear_errors(tmp_path):
    files = make_mnist(tmp_path)
    path = files["t10k-labels-idx1-ubyte"]
    path.write_bytes(gzip.compress(idx(np.full(20, 10))))
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path)
    one_line(error, path, "labels")
    bad = bytearray(files["t10k-images-idx3-ubyte"].read_bytes())
    bad[len(bad) // 2] ^= 0xFF
    files["t10k-images-idx3-ubyte"].write_bytes(bytes(bad))
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path)
    one_line(error, files["t10k-images-idx3-ubyte"], "damaged", "fetch")


def test_missing_data_says_where_it_looked_and_what_to_run(tmp_path):
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path)
    one_line(error, tmp_path / "mnist", f"python data.py mnist --root {tmp_path}")
    for name, command in (("modelnet", "modelnet"), ("modelnet10", "modelnet10")):
        with pytest.raises(DataError) as error:
            data.load(name, tmp_path)
        one_line(error, tmp_path, f"python data.py {command} --root {tmp_path}")


# ------------------------------------------------------------------------------- series
def test_digits_turn_clockwise():
    x = np.array([[[[0.0, 1.0]]] * 3], np.float32)  # one point straight up, at three times
    turned = data.rotate_clockwise(x, np.pi * np.array([0, 0.5, 1]))
    assert turned[0, :, 0] == pytest.approx(np.array([[0, 1], [1, 0], [0, -1]]), abs=1e-6)


@given(st.lists(st.floats(-2, 3), min_size=1, max_size=6), st.integers(1, 80), st.booleans())
def test_a_series_has_any_times_and_points_and_stays_centred(times, n, resample):
    split = data.load(task="temporal", times=times, points=n, resample=resample).train
    x, mask, label = split.draw(np.arange(7))
    assert x.shape == (7, len(times), n, 2)
    assert mask is None
    assert label.tolist() == split.labels[split.index[:7]].tolist()
    assert np.abs(x.mean(-2)).max() < 0.1 / 14 + 1e-6
    assert (split.times == times).all()


@pytest.mark.parametrize("resample", [True, False])
def test_points_are_carried_along_only_if_asked(resample):
    times = np.array([0, 0.3, 1])
    split = data.load(task="temporal", times=times, resample=resample).test
    x = split.draw(np.arange(5))[0]
    back = data.rotate_clockwise(x, -np.pi * times)
    apart = np.abs(back - back[:, :1]).max(-1)[:, 1:]  # carried points differ by their noise
    assert (apart.max() < 2 * 0.1 * math.sqrt(2) / 14 + 1e-5) == (not resample)
    assert np.median(apart) > 1e-4


def test_resampled_points_of_a_series_still_show_the_same_digit():
    x = data.load(task="temporal", points=2000).test.draw(np.arange(10))[0]
    back = data.rotate_clockwise(x, -np.pi * np.array([0, 0.25, 0.5, 0.75, 1]))
    cov = np.einsum("btni,btnj->btij", back, back) / 2000
    assert np.abs(cov - cov[:, :1]).max() < 0.02 < cov[:, 0].diagonal(0, 1, 2).max()


# ------------------------------------------------------------------------------- meshes
decimal = st.one_of(
    st.decimals(-(10**6), 10**6, places=6).map(str),
    st.integers(-(10**9), 10**9).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["5.", "-.5", "+3", "1e-3", "-0.0", "007.50", "123456789012345678901234567890"]
    ),
)


@given(st.lists(decimal, min_size=1))
def test_numbers_are_read_as_python_reads_them(tokens):
    text = " ".join(tokens).encode() + b"\n"
    assert meshes.read_numbers(text).tolist() == [float(t) for t in tokens]


@given(
    st.lists(decimal),
    st.sampled_from(["x", "1.2.3", ".", "-", "1-2", "--1", "1,2"]),
    st.lists(decimal),
)
def test_what_is_not_a_number_is_refused(before, wrong, after):
    with pytest.raises(ValueError, match=r"unmatched data|without a blank"):
        meshes.read_numbers(" ".join([*before, wrong, *after]).encode() + b"\n")


@st.composite
def off_files(draw):
    """An OFF file in some dialect, with its vertices and its fanned triangles."""
    v = draw(
        st.lists(
            st.tuples(*[st.integers(-99, 99).map(lambda i: i / 8)] * 3), min_size=3, max_size=9
        )
    )
    sizes = draw(st.sampled_from([(3, 3), (4, 4), (3, 7), (2, 5)]))
    corner = st.integers(0, len(v) - 1)
    faces = draw(
        st.lists(st.lists(corner, min_size=sizes[0], max_size=sizes[1]), min_size=1, max_size=6)
    )
    blank, colour = draw(st.booleans()), draw(st.sampled_from(["", " 255 0 0", " 0.5 0.5 0.5 1"]))
    head = draw(
        st.sampled_from(["OFF\n", "OFF", "OFF ", "# made up\nOFF\n# counts\n", "\nOFF\n\n"])
    )
    lines = [" ".join(map(str, row)) for row in v]
    lines += [" ".join(map(str, [len(f), *f])) + colour for f in faces]
    if draw(st.booleans()):
        lines = [f"  {line}\t # comment 1 2 3" for line in lines]
    counts = f"{len(v)} {len(faces)}{draw(st.sampled_from([' 0', '']))}\n"
    text = (
        head
        + counts
        + ("\n\n" if blank else "\n").join(lines)
        + draw(st.sampled_from(["", "\n", "\n\n \n"]))
    )
    text = text.replace("\n", draw(st.sampled_from(["\n", "\r\n"])))
    return text.encode(), v, [(f[0], *f[i : i + 2]) for f in faces for i in range(1, len(f) - 1)]


@given(off_files())
def test_every_dialect_of_off_gives_the_same_mesh(file):
    text, vertices, triangles = file
    v, f = data.read_off(text, "some.off")
    assert v.tolist() == [list(row) for row in vertices]
    assert f.tolist() == [list(row) for row in triangles]


SQUARE = b"OFF\n4 2 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n3 0 1 2\n3 0 2 3\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", ["line 1", "not an OFF"]),
        (b"solid cube\n", ["line 1", "not an OFF", "solid cube"]),
        (b"OFF\n4 0 0\n0 0 0\n", ["line 2", "no faces"]),
        (b"OFF\n0 0 0\n", ["line 2", "no faces"]),
        (SQUARE[:22], ["line 4", "2 of 4 vertices"]),
        (SQUARE[:-8], ["line 7", "1 of 2 faces"]),
        (SQUARE[:-3], ["line 8", "2 of 3 corners"]),
        (SQUARE.replace(b"3 0 2 3", b"3 0 2 4"), ["line 8", "vertex 4 of 4"]),
        (SQUARE.replace(b"3 0 2 3", b"3 0 -2 3"), ["line 8", "vertex -2 of 4"]),
        (SQUARE.replace(b"3 0 2 3", b"3 0 x 3"), ["line 8", "not a face"]),
        (SQUARE.replace(b"1 1 0", b"1 nan 0"), ["line 5", "nan"]),
        (SQUARE.replace(b"1 1 0", b"1 1e999 0"), ["line 5", "1e999"]),
        (SQUARE.replace(b"1 1 0", b"1 oops 0"), ["line 5", "oops"]),
        (SQUARE + b"3 0 1 3\n", ["line 9", "more than the 2 faces"]),
        (SQUARE.replace(b"3 0", b"2 0"), ["no area"]),
        (SQUARE.replace(b"1 1 0", b"2 0 0").replace(b"0 1 0", b"3 0 0"), ["no area"]),
        (b"OFF\n999999999 999999999 0\n0 0 0\n", ["line 3", "1 of 999999999 vertices"]),
        (b"OFF\n" + b"9" * 5000 + b" 1 0\n", ["line 1", "not an OFF"]),
        (SQUARE.replace(b"4 2 0", b"5 2 0", 1), ["line 7", "after the last of 3 × 5 numbers"]),
        (SQUARE.replace(b"1 1 0", b"1 10"), ["line 7", "after the last of 3 × 4 numbers"]),
        (SQUARE.replace(b"1 1 0", b"1"), ["line 7", "after the last of 3 × 4 numbers"]),
        (SQUARE.replace(b"4 2 0", b"3 2 0", 1), ["line 8", "more than the 2 faces"]),
        (SQUARE.replace(b"3 0 2 3", b"-3 0 2 3 1 1"), ["line 8", "not a face"]),
        (SQUARE.replace(b"1 1 0", b"1e300 1e300 0"), ["area"]),
    ],
)
def test_a_wrong_off_file_is_one_clear_error(tmp_path, text, says):
    make_modelnet(tmp_path)
    path = tmp_path / "ModelNet40" / "chair" / "train" / "chair_0003.off"
    path.write_bytes(text)
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, path, *says)
    assert not list(tmp_path.rglob("*.npz*"))  # nothing half-written
    assert len(data.load("modelnet", tmp_path, category="table").train)  # and the rest is usable
    path.unlink()
    assert len(data.load("modelnet", tmp_path, category="chair").train)


def test_surface_points_are_uniform_over_area():
    corners = np.array(
        [[[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[5, 0, 0], [8, 0, 0], [5, 0, 1]]], float
    )
    x = data.surface_points(corners[None], np.random.default_rng(0).random((1, 40000, 3)))[0]
    second = x[:, 0] > 4
    assert second.mean() == pytest.approx(0.75, abs=0.01)
    assert x[~second].mean(0) == pytest.approx(np.array([1 / 3, 1 / 3, 0]), abs=0.01)
    assert x[second].mean(0) == pytest.approx(np.array([6, 0, 1 / 3]), abs=0.02)
    assert (x[~second][:, :2].sum(1) <= 1 + 1e-12).all()
    assert np.cov(x[~second][:, :2].T) == pytest.approx(
        np.array([[2, -1], [-1, 2]]) / 36, abs=0.003
    )


# ------------------------------------------------------------------------------- ModelNet
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


def test_meshes_read_the_same_from_a_tree_a_zip_and_the_cache(tmp_path):
    a, b = make_modelnet(tmp_path / "a"), tmp_path / "b"
    b.mkdir()
    zip_tree(a).rename(b / "ModelNet40.zip")
    tree, zipped = (data.load("modelnet", r, category="chair,table") for r in (a, b))
    assert same(tree, zipped)
    (b / "ModelNet40.zip").unlink()
    assert same(tree, data.load("modelnet", b, category=["table", "chair"]))  # from the cache
    assert [len(s) for s in tree] == [11, 1, 6]
    assert tree.train.classes == ("chair", "table")
    assert sorted(tree.test.labels) == [0, 0, 0, 1, 1, 1]
    assert sorted(p.name for p in (a / "modelnet40").iterdir()) == [
        f"{c}_{p}.npz" for c in ("chair", "table") for p in ("test", "train")
    ]
    stored = np.load(a / "modelnet40" / "chair_train.npz")["points"]
    assert stored.shape == (6, 2048, 3)
    assert stored.dtype == np.float32
    assert np.linalg.norm(stored, axis=-1).max(-1) == pytest.approx(np.ones(6), abs=1e-6)
    assert np.abs(stored.mean(1)).max() < 1e-6


def test_asking_for_more_points_than_the_cache_has_reads_the_meshes_again(tmp_path):
    make_modelnet(tmp_path, ["chair"])
    data.load("modelnet", tmp_path, category="chair")
    assert (
        data.load("modelnet", tmp_path, category="chair", points=3000).train.draw([0])[0].shape[1]
        == 3000
    )
    (tmp_path / "ModelNet40").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair", points=3001)
    one_line(error, "chair_train.npz", 3000, 3001)


def test_modelnet10_has_its_own_folder_and_names(tmp_path):
    make_modelnet(tmp_path)
    (tmp_path / "ModelNet40").rename(tmp_path / "ModelNet10")
    assert len(data.load("modelnet10", tmp_path, category="chair").test) == 3
    with pytest.raises(DataError) as error:
        data.load("modelnet10", tmp_path, category="airplane")
    one_line(error, "airplane", "modelnet10")
    with pytest.raises(DataError) as error:
        data.load("modelnet10", tmp_path, category="sofa")
    one_line(error, "sofa", "in ModelNet10, ModelNet10.zip; run")


def test_a_cache_that_was_filled_too_early_says_so(tmp_path, capsys):
    make_modelnet(tmp_path, ["chair"])
    late = tmp_path / "ModelNet40" / "chair" / "train" / "chair_0001.off"
    text = late.read_bytes()
    late.unlink()
    assert sum(map(len, data.load("modelnet", tmp_path, category="chair"))) == 8
    assert "chair_train.npz" not in capsys.readouterr().err
    late.write_bytes(text)
    data.load("modelnet", tmp_path, category="chair")
    assert "chair_train.npz: 5 shapes, but 6 in" in capsys.readouterr().err


def write_resampled(root, rows=2100):
    rng, folder = np.random.default_rng(0), root / "modelnet40_normal_resampled"
    for part, numbers in (("train", range(1, 7)), ("test", range(7, 9))):
        names = [f"night_stand_{i:04d}" for i in numbers]
        (folder / "night_stand").mkdir(parents=True, exist_ok=True)
        (folder / f"modelnet40_{part}.txt").write_text("\n".join([*names, "person_0001", ""]))
        for name in names:
            text = "\n".join(
                ",".join(f"{v:.6f}" for v in row) for row in rng.normal(size=(rows, 6))
            )
            (folder / "night_stand" / f"{name}.txt").write_text(text + "\n")
    return folder


def test_resampled_text_files_are_read_and_wrong_ones_named(tmp_path):
    folder = write_resampled(tmp_path)
    splits = data.load("modelnet", tmp_path, category="night_stand", valid=0.2)
    assert [len(s) for s in splits] == [5, 1, 2]
    stored = np.load(tmp_path / "modelnet40" / "night_stand_test.npz")["points"]
    assert stored.shape == (2, 2048, 3)
    table = np.loadtxt(
        folder / "night_stand" / "night_stand_0007.txt", delimiter=",", dtype=np.float32
    )
    read = meshes._resampled(folder, "night_stand", "test")[1]
    some = {tuple(row) for row in read("night_stand_0007", 2048)}
    assert len(some) == 2048
    assert some < {tuple(row) for row in table[:, [2, 0, 1]]}  # there y points upwards, here z
    (tmp_path / "modelnet40" / "night_stand_test.npz").unlink()
    path = folder / "night_stand" / "night_stand_0008.txt"
    row = "1,2,3,4,5,6\n"
    wrong = [(row + "1,2,3\n4,5", "line 2"), (row + row + "1,2,3,4,5,x\n", "line 3")]
    for text, says in [
        *wrong,
        (row + "nan,1,2,3,4,5\n", "point 1"),
        ("", "no numbers"),
        (row, "points"),
        ("1,2,3,4,5,6\n6,5,4,3,2,1\n" * 300, "600 points, others have 2048"),
    ]:
        path.write_text(text)
        with pytest.raises(DataError) as error:
            data.load("modelnet", tmp_path, category="night_stand")
        one_line(error, "night_stand", says)
        assert str(path) in str(error.value) or "shape 2 of 2" in str(error.value)


class Hdf5:
    """The part of h5py, which is not among our packages, that we use: on .npz files."""

    def __init__(self, path):
        self.file = np.load(path)

    def __enter__(self):
        return self.file

    def __exit__(self, *_):
        self.file.close()


def test_hdf5_copies_are_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace(File=Hdf5))
    rng = np.random.default_rng(0)
    clouds, labels = rng.normal(size=(30, 2100, 3)).astype(np.float32), np.arange(30) % 3 + 7
    folder = tmp_path / "a" / "modelnet40_ply_hdf5_2048"
    folder.mkdir(parents=True)
    (tmp_path / "b").mkdir()
    for file, rows in (
        ("train0", slice(0, 12)),
        ("train1", slice(12, 24)),
        ("test0", slice(24, 30)),
    ):
        with open(folder / f"ply_data_{file}.h5", "wb") as f:
            np.savez(f, data=clouds[rows], label=labels[rows, None].astype(np.uint8))
    upright = clouds[..., [2, 0, 1]]  # the first copy has y upwards
    with open(tmp_path / "b" / "ModelNet40_cloud.h5", "wb") as f:
        train = {"tr_cloud": upright[:24], "tr_labels": labels[:24]}
        np.savez(f, **train, test_cloud=upright[24:], test_labels=labels[24:])
    a, b = (data.load("modelnet", tmp_path / k, category="chair,cone") for k in "ab")
    assert [len(s) for s in a] == [14, 2, 4]
    assert same(a, b)
    (folder / "ply_data_test0.h5").write_bytes(b"no")
    (tmp_path / "a" / "modelnet40" / "chair_test.npz").unlink()
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path / "a", category="chair")
    one_line(error, "ply_data_test0.h5")


def test_hdf5_without_h5py_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "ModelNet40_cloud.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, "ModelNet40_cloud.h5", "pip install h5py")


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("modelnet", "chairs", "chair"),
        ("modelnet", "chair,tabel", "table"),
        ("modelnet", "nightstand", "night_stand"),
        ("synthetic", "plane", "airplane"),
        ("synthetic", ["3", "13"], "3"),
    ],
)
def test_an_unknown_category_suggests_the_nearest(tmp_path, name, wrong, right):
    with pytest.raises(DataError) as error:
        data.load(name, tmp_path, category=wrong)
    one_line(error, "did you mean", right)


@pytest.mark.parametrize("none", ["", " , ", []])
def test_a_category_that_names_none_is_not_all_of_them(none):
    with pytest.raises(DataError) as error:
        data.load("synthetic", category=none)
    one_line(error, "names none")


@pytest.mark.parametrize(
    "member", ["../evil.off", "ModelNet40/../../evil", "/etc/evil", "C:/evil", "a\\..\\evil"]
)
def test_a_zip_that_leaves_its_folder_is_refused_by_reader_and_unpacker(tmp_path, member):
    path = tmp_path / "ModelNet40.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("ModelNet40/chair/train/chair_0001.off", SQUARE)
        z.writestr(member, b"evil")
    for act in (
        lambda: data.load("modelnet", tmp_path),
        lambda: meshes.unpack(path, tmp_path / "ModelNet40"),
    ):
        with pytest.raises(DataError) as error:
            act()
        one_line(error, path, "evil")
    assert [p.name for p in tmp_path.rglob("*")] == ["ModelNet40.zip"]


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(meshes, "LARGEST", 10**6)
    path = make_mnist(tmp_path)["train-images-idx3-ubyte"]
    path.write_bytes(gzip.compress(bytes(2 * 10**6)))
    with pytest.raises(DataError) as error:
        data.load("mnist", tmp_path)
    one_line(error, path, "too large")
    with zipfile.ZipFile(tmp_path / "ModelNet40.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("ModelNet40/chair/train/chair_0001.off", bytes(2 * 10**6))
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, "ModelNet40.zip", "chair_0001.off", "refused")


def test_an_empty_category_folder_says_where_it_looked(tmp_path):
    make_modelnet(tmp_path, ["chair"], train=0)
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, "no train shapes of 'chair'", tmp_path / "modelnet40", "ModelNet40.zip")


def test_a_damaged_zip_names_the_member(tmp_path):
    make_modelnet(tmp_path)
    path = zip_tree(tmp_path)
    (tmp_path / "ModelNet40").rename(tmp_path / "elsewhere")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as z:
        info = z.getinfo("ModelNet40/chair/train/chair_0002.off")
    at = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, path, "chair_0002.off")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, path, "zip")


def test_a_full_disk_while_caching_leaves_nothing_behind(tmp_path, monkeypatch):
    make_modelnet(tmp_path)

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, tmp_path / "modelnet40" / "chair_train.npz", "No space left")
    assert list((tmp_path / "modelnet40").iterdir()) == []
    monkeypatch.undo()
    assert len(data.load("modelnet", tmp_path, category="chair").train)


def test_a_folder_that_cannot_be_written_to_is_only_a_note(tmp_path, monkeypatch, capsys):
    make_modelnet(tmp_path)

    def read_only(file, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(np, "savez", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)  # as a read-only mount does, file or no file
    assert len(data.load("modelnet", tmp_path, category="chair").train)
    assert "Read-only" in capsys.readouterr().err
    assert not list((tmp_path / "modelnet40").glob("*.npz"))


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "contents", ["pickle", "cut", "no points", "shape", "nan", "empty", "none", "array", "units"]
)
def test_a_wrong_cache_is_one_clear_error_and_nothing_is_unpickled(tmp_path, contents):
    path = tmp_path / "modelnet40" / "chair_train.npz"
    path.parent.mkdir()
    points = np.zeros((4, 600, 3), np.float32)
    points[:, 0, 0] = 1
    points[2, 5] = np.nan if contents == "nan" else 0
    arrays = {"pickle": np.array([Evil(tmp_path / "evil"), None]), "shape": points[0]}
    arrays |= {"none": points[:0], "units": points * 100}
    name = "clouds" if contents == "no points" else "points"
    np.savez(path, **{name: arrays.get(contents, points)})
    if contents == "array":
        with open(path, "wb") as f:
            np.save(f, points)
    if contents in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: 999 if contents == "cut" else 0])
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    one_line(error, path)
    assert not (tmp_path / "evil").exists()


@needs_modelnet
def test_the_real_cache_loads_with_all_categories_and_mixed_sizes():
    splits = data.load(
        "modelnet", REAL, task="classify", category="airplane,chair,xbox", points=200
    )
    assert splits.train.classes == ("airplane", "chair", "xbox")
    assert len(splits.train) + len(splits.valid) == 529 + 880 + 103
    assert np.bincount(splits.test.labels).tolist() == [87, 99, 20]
    assert splits.test.draw(np.arange(9))[0].shape == (9, 200, 3)
    assert 0.0004 < splits.test.noise() < 0.001


# ------------------------------------------------------------------------------- preprocessing
@given(st.integers(0, 99), st.integers(2, 40), st.integers(1, 5))
def test_shapes_are_noised_scaled_by_one_factor_and_centred(seed, n, sets):
    x = np.random.default_rng(seed).normal(size=(sets, n, 3)).astype(np.float32) * 50
    y = data.modelnet_sets(x, Random(np.arange(sets), seed))
    assert y.dtype == np.float32
    assert y.mean(-2) == pytest.approx(np.zeros((sets, 3)), abs=1e-5)
    scale = np.ptp(x.reshape(sets, -1), axis=1)[:, None, None]
    centred = x - x.mean(-2, keepdims=True)
    assert y == pytest.approx(centred / scale, abs=1e-3)


def test_the_noise_has_the_stated_width_before_and_after_scaling():
    cloud = np.random.default_rng(0).random((300, 500, 3)).astype(np.float32) * [1, 0.5, 0.25]
    split = data.Split(
        data.Solid(data.stored_cloud(cloud), False), np.arange(300), np.zeros(300, int), ("a",), 500
    )
    noise = data.modelnet_sets(cloud, Random(np.arange(300))) - data.unit_box(cloud)[0]
    assert split.noise() == pytest.approx(
        0.001 / np.ptp(cloud.reshape(300, -1), axis=1).mean(), rel=1e-3
    )
    assert noise.std() == pytest.approx(split.noise(), rel=0.1)  # it moves min and max as well


@given(st.integers(0, 99), st.integers(1, 20), st.integers(1, 20))
def test_padded_points_change_nothing_in_the_preprocessing(seed, n, padding):
    x = np.random.default_rng(seed).normal(size=(2, n + padding, 3)).astype(np.float32)
    mask = np.arange(n + padding) < np.array([[n], [n + padding]])
    got, scale = data.unit_box(x, mask)
    alone, alone_scale = data.unit_box(x[:1, :n])
    assert got[:1, :n] == pytest.approx(alone, abs=1e-5)
    assert scale[0] == pytest.approx(alone_scale[0])


def test_augmentation_turns_about_z_and_scales_each_axis_within_bounds():
    x = np.tile(np.eye(3, dtype=np.float32), (5000, 1, 1))
    y = data.augment(x, Random(np.arange(5000)))
    scale = np.sqrt((y**2).sum(1))  # of the rows of R·diag(s), so of each axis: (sets, 3)
    assert scale.min() >= 0.8 - 1e-5
    assert scale.max() <= 1.25 + 1e-5
    assert scale.mean(0) == pytest.approx(np.full(3, 1.025), abs=0.01)
    assert np.abs(np.corrcoef(scale.T) - np.eye(3)).max() < 0.05
    angle = np.arctan2(y[:, 0, 1] / scale[:, 1], y[:, 0, 0] / scale[:, 0])
    assert np.abs(angle).max() <= 0.15 * np.pi + 1e-5
    assert angle.std() == pytest.approx(0.3 * np.pi / math.sqrt(12), rel=0.05)
    assert (y[:, 2, :2] == 0).all()


def test_only_large_training_sets_are_augmented_unless_asked():
    def augmented(**options):
        return [getattr(s.source, "augment", None) for s in data.load(task="classify", **options)]

    assert augmented(points=100) == [False, False, False]
    assert augmented(points=1000) == [True, False, False]
    assert augmented(points=1000, augment=False) == [False, False, False]
    assert augmented(points=10, augment=True) == [True, False, False]
    with pytest.raises(DataError, match="augment"):
        data.load("synthetic", category="digits", augment=True)


# ------------------------------------------------------------------------------- built-in sets
def test_digits_stay_on_the_unit_square_and_differ_in_pose():
    x, _, label = data.load().train.draw(np.arange(1000))
    assert x.shape == (1000, 50, 2)
    assert x.min() > 0
    assert x.max() < 1
    width = np.ptp(x, axis=1)[label == 0]
    assert width[:, 0].std() > 0.03
    assert set(label) == set(range(10))


@pytest.mark.parametrize(
    ("options", "least"), [({"category": "digits", "points": 200}, 0.85), ({}, 0.9)]
)
def test_built_in_classes_can_be_told_apart_by_their_histograms(options, least):
    splits = data.load(task="classify", **options)

    def histogram(split):
        x, _, label = split.draw(np.arange(600))
        x = x if x.shape[-1] == 2 else x + 0.5
        cell = (x * 7).clip(0, 6).astype(int) @ (7 ** np.arange(x.shape[-1]))
        return np.stack([np.bincount(c, minlength=7 ** x.shape[-1]) for c in cell]) ** 0.5, label

    (h, label), (g, truth) = histogram(splits.train), histogram(splits.test)
    distance = (h**2).sum(1) - 2 * g @ h.T
    assert (label[distance.argmin(1)] == truth).mean() > least


def test_shapes_have_radius_one_and_six_names():
    splits = data.load(category="shapes")
    assert splits.train.classes == ("airplane", "bookshelf", "chair", "lamp", "table", "vase")
    cloud = splits.train.source.cloud(np.arange(60), 400, Random(np.arange(60)))
    radius = np.linalg.norm(cloud, axis=-1).max(-1)
    assert radius.max() <= 1 + 1e-5
    assert radius.min() > 0.8
    assert data.load(category="lamp").test.draw([0])[0].shape == (1, 512, 3)


def test_a_shape_stays_itself_while_its_points_change():
    split = data.load(category="chair").train
    a, b = (split.draw([3], epoch=e, points=4000)[0][0] for e in (0, 1))
    other = split.draw([4], points=4000)[0][0]
    assert not (a == b).all()
    assert np.abs(np.cov(a.T) - np.cov(b.T)).max() < np.abs(np.cov(a.T) - np.cov(other.T)).max() / 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "cifar"}, "cifar"),
        ({"task": "segment"}, "segment"),
        ({"task": "temporal", "category": "shapes"}, "digits"),
        ({"points": 0}, "points=0"),
        ({"points": (5, 4)}, r"points=\(5, 4\)"),
        ({"valid": 0}, "valid=0"),
        ({"valid": 1.5}, "valid=1.5"),
        ({"valid": math.nan}, "valid=nan"),
        ({"points": 2.5}, "points=2.5"),
        ({"points": (1, 2, 3)}, "points="),
        ({"task": "temporal", "times": []}, "times="),
        ({"task": "temporal", "times": [0, math.inf]}, "times="),
        ({"name": "mnist", "category": "shapes"}, "there are 0, 1"),
        ({"category": "chair,3"}, "chair"),
    ],
)
def test_wrong_arguments_are_named(options, says):
    with pytest.raises(DataError, match=says):
        data.load(**options)


# ------------------------------------------------------------------------------- splits
@given(
    st.lists(st.integers(0, 30), min_size=12, max_size=80),
    st.lists(st.integers(0, 5)),
    st.integers(0, 99),
)
def test_no_shape_is_on_two_sides(train, test, seed):
    train = np.array([*train, 31, 32])
    a, b = data.hold_out(train, np.array(test, int), 0.2, seed)
    assert not set(train[a]) & set(train[b])
    assert not (set(train[a]) | set(train[b])) & set(test)
    assert set(train[a]) | set(train[b]) == set(train) - set(test)
    assert len(b) > 0
    assert sorted([*a, *b]) == [i for i in range(len(train)) if train[i] not in test]


def test_identical_meshes_are_kept_on_one_side(tmp_path, capsys):
    make_modelnet(tmp_path, ["chair", "table"], train=8)
    chairs = tmp_path / "ModelNet40" / "chair"
    twin = (chairs / "train" / "chair_0001.off").read_bytes()
    (chairs / "train" / "chair_0002.off").write_bytes(
        twin.replace(b"\n", b"\r\n")
    )  # same mesh, other file
    (tmp_path / "ModelNet40" / "table" / "test" / "table_0099.off").write_bytes(
        box(1, 2, 1 + 3 / 9)
    )  # chair 3
    sides = set()
    for seed in range(12):
        splits = data.load("modelnet", tmp_path, category="chair,table", valid=0.3, seed=seed)
        train, valid = set(splits.train.index), set(splits.valid.index)
        assert "1 training sets identical to a test set" in capsys.readouterr().err
        assert 2 not in train | valid
        assert ({0, 1} <= train) != ({0, 1} <= valid)
        assert len(splits.test) == 7
        sides.add(0 in train)
    assert sides == {True, False}


def test_the_validation_split_is_a_tenth_and_seeded():
    a, b, c = data.load(seed=0), data.load(seed=0), data.load(seed=1)
    assert len(a.valid) == 600
    assert (a.valid.index == b.valid.index).all()
    assert set(a.valid.index) != set(c.valid.index)
    assert not set(a.valid.index) & set(a.train.index)


# ------------------------------------------------------------------------------- batches
def arrays(batches):
    return [torch.cat([b.x for b in batches]), torch.cat([b.label for b in batches])]


@given(
    st.integers(0, 99),
    st.integers(0, 9),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
def test_processes_share_the_batches_of_a_single_one(seed, epoch, share, world, training):
    split = data.load(points=(3, 6)).valid
    size, options = share * world, {"seed": seed, "epoch": epoch, "training": training}

    def first(**more):
        return list(itertools.islice(data.batches(split, size, **options, **more), 3))

    whole, parts = first(), [first(rank=r, world=world) for r in range(world)]
    for k, batch in enumerate(whole):
        for r in range(world):
            for one, all_ in zip(parts[r][k][:3], batch[:3]):
                assert torch.equal(one, all_[r::world])


@pytest.mark.parametrize("points", [7, 60, (20, 60)])
@pytest.mark.parametrize("source", ["mnist", "mnist series", "modelnet", "shapes", "series"])
def test_a_set_is_drawn_the_same_alone_as_among_others(tmp_path, source, points):
    make_mnist(tmp_path)
    make_modelnet(tmp_path)
    options = {
        "mnist": {"name": "mnist"},
        "mnist series": {"name": "mnist", "task": "temporal"},
        "modelnet": {"name": "modelnet", "category": "chair,table"},
        "shapes": {"category": "shapes", "task": "classify", "augment": True},
        "series": {"task": "temporal"},
    }[source]
    split = data.load(root=tmp_path, points=points, **options).train
    where = np.random.default_rng(0).permutation(len(split))[:30]
    together = split.draw(where, seed=5, epoch=6)
    for k in (0, 3, 7):
        alone = split.draw(where[k : k + 1], seed=5, epoch=6)
        for one, all_ in zip(alone, together):
            assert one is all_ is None or (one[0] == all_[k]).all()


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 3}, {"batch_size": 7}])
def test_the_sets_of_an_epoch_do_not_depend_on_workers_or_batch_size(options):
    split = data.load(points=5).valid
    plain = arrays(list(data.batches(split, 4, training=False)))
    other = arrays(list(data.batches(split, **{"batch_size": 4, **options}, training=False)))
    assert all(torch.equal(a, b) for a, b in zip(plain, other))
    assert len(plain[0]) == 600


def test_an_epoch_can_be_taken_up_at_any_step():
    split = data.load(points=5).train
    whole = list(data.batches(split, 500, seed=3, epoch=2))
    assert len(whole) == data.steps(split, 500) == 10
    rest = list(data.batches(split, 500, seed=3, epoch=2, start=7))
    assert len(rest) == 3
    assert all(torch.equal(a.x, b.x) for a, b in zip(whole[7:], rest))


def test_training_sets_are_new_each_epoch_and_evaluation_sets_never():
    splits = data.load(points=5)
    first, again, later, other = (
        next(data.batches(splits.train, 100, seed=s, epoch=e)).x
        for s, e in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)
    a, b = (splits.train.draw(np.arange(9), epoch=e)[0] for e in (0, 1))
    assert (a != b).all()
    for split in splits[1:]:
        a, b = (next(data.batches(split, 50, seed=s, epoch=s, training=False)).x for s in (0, 1))
        assert torch.equal(a, b)


def test_an_epoch_visits_every_set_once_in_an_order_of_its_own():
    split = data.load(points=1).valid
    orders = [torch.cat([b.label for b in data.batches(split, 60, epoch=e)]) for e in (0, 1)]
    assert not torch.equal(*orders)
    for order in orders:
        assert torch.bincount(order).tolist() == np.bincount(split.labels[split.index]).tolist()


def test_a_split_smaller_than_a_batch_is_one_batch_and_a_rest_is_left_out():
    split = data.load(points=2).valid  # 600 sets
    assert [len(b.x) for b in data.batches(split, 1000)] == [600]
    assert [len(b.x) for b in data.batches(split, 7 * 64)] == [448]
    assert [len(b.x) for b in data.batches(split, 448, training=False)] == [448, 152]
    shares = [
        [len(b.x) for b in data.batches(split, 599, training=False, rank=r, world=2)]
        for r in (0, 1)
    ]
    assert shares == [[300, 1], [299]]


def test_spare_points_lie_behind_a_training_set_in_its_units():
    splits = data.load(category="shapes", points=20, spare=30)
    where = np.arange(9)
    x, mask, _ = splits.train.draw(where)
    assert (mask == (np.arange(50) < 20)).all()
    np.testing.assert_allclose(x[:, :20].mean(1), 0, atol=1e-6)
    whole = replace(splits.train, points=50, spare=0).draw(where)[0]  # the same points, as one set
    scale = np.ptp(whole, 1) / np.ptp(x, 1)
    np.testing.assert_allclose(scale, scale[:, :1].repeat(3, 1), rtol=1e-4)
    assert (scale < 0.999).any()
    assert (splits.valid.spare, splits.test.spare) == (0, 0)
    x, mask, _ = data.load(points=20, spare=30).train.draw(where)
    assert x.shape[:2] == mask.shape == (9, 50)
    for wrong in ({"name": "mnist"}, {"task": "temporal"}, {"points": (5, 9)}):
        with pytest.raises(DataError, match="spare=3: for 3-D shapes and built-in digits"):
            data.load(**wrong, spare=3)


def test_ragged_sets_are_padded_with_zeros_and_masked():
    split = data.load("synthetic", category="shapes", points=(10, 30)).train
    batch = next(data.batches(split, 500))
    assert batch.x.shape == (500, 30, 3)
    assert batch.mask.dtype == torch.bool
    sizes = batch.mask.sum(1)
    assert sizes.unique().tolist() == list(range(10, 31))
    assert (batch.mask == (torch.arange(30) < sizes[:, None])).all()
    assert (batch.x[~batch.mask] == 0).all()
    assert (batch.x[batch.mask] != 0).all()
    means = (batch.x.sum(1) / sizes[:, None]).abs()
    assert means.max() < 1e-5
    series = next(data.batches(data.load(task="temporal", points=(4, 9)).train, 20))
    assert series.mask.shape == series.x.shape[:-1] == (20, 5, 9)
    assert (series.x.sum(2) / series.mask.sum(2)[..., None]).abs().max() < 0.1 / 14 + 1e-6
    assert series.t.tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_the_first_points_of_a_ragged_digit_are_a_fair_draw_themselves():
    image = np.repeat([10, 20, 30, 40], 196).reshape(1, 28, 28).astype(np.uint8)
    x = data.spatial_mnist(image)(np.zeros(8000, int), 600, Random(np.arange(8000)))
    quarter = np.bincount((27 - x[:, 0, 1].astype(int)) // 7) / 8000  # of each set's first point
    assert quarter == pytest.approx(np.array([0.1, 0.2, 0.3, 0.4]), abs=0.02)


def test_batches_go_straight_to_the_device():
    batch = next(data.batches(data.load(task="temporal").train, 4, device="meta"))
    assert {batch.x.device.type, batch.label.device.type, batch.t.device.type} == {"meta"}
    assert batch.x.dtype == batch.t.dtype == torch.float32
    assert batch.label.dtype == torch.int64


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 3, "world": 2},
        {"batch_size": 4, "rank": 2, "world": 2},
        {"batch_size": 6000, "world": 6000},
        {"batch_size": 600, "start": 10},
        {"batch_size": 600, "start": -1},
    ],
)
def test_wrong_shares_and_starts_are_refused(options):
    with pytest.raises(DataError, match=r"batch|rank|start"):
        data.batches(data.load().train, **options)


def test_a_process_without_a_share_of_a_batch_gets_none():
    split = data.load(points=1).valid
    shares = [list(data.batches(split, 2, training=False, rank=r, world=3)) for r in range(3)]
    assert [len(s) for s in shares] == [300, 300, 0]
    assert list(data.batches(split, 60, start=10)) == []  # taken up at the very end


def test_more_points_than_were_loaded_are_refused(tmp_path):
    make_modelnet(tmp_path, ["chair"])
    split = data.load("modelnet", tmp_path, category="chair").train
    with pytest.raises(DataError, match=r"2049.*2048"):
        split.draw([0], points=2049)


def test_stored_points_are_drawn_without_replacement():
    clouds = np.arange(20 * 3, dtype=np.float32).reshape(1, 20, 3).repeat(4, 0)
    x = data.stored_cloud(clouds)(np.arange(4).repeat(500), 15, Random(np.arange(2000)))
    assert all(len(set(row)) == 15 for row in x[..., 0])
    assert np.bincount((x[..., 0] / 3).astype(int).ravel()) / 2000 == pytest.approx(
        np.full(20, 0.75), abs=0.06
    )


# ------------------------------------------------------------------------------- download
class Handler(BaseHTTPRequestHandler):
    """Serves server.files; each request takes its fault from the front of server.faults."""

    def do_GET(self):
        server = self.server
        fault = server.faults.pop(0) if server.faults else None
        body = server.files.get(self.path.lstrip("/"))
        server.seen.append((self.path.lstrip("/"), self.headers.get("Range")))
        if body is None or fault == "busy":
            return self.send_error(404 if body is None else 503)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if start >= len(body) and start:
            return self.send_error(416)
        start = 0 if fault == "restart" else start
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        piece = body[start:]
        if fault == "corrupt":
            piece = piece[:-9] + bytes(9)
        if fault in ("truncate", "stall"):
            piece = piece[: len(piece) // 2]
        self.wfile.write(piece)
        self.wfile.flush()
        if fault == "stall":
            server.release.wait(10)
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(data, "TIMEOUT", 0.3)
    monkeypatch.setattr(data, "TRIES", 2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.files, server.faults, server.seen, server.release = {}, [], [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def mnist_server(server, tmp_path, monkeypatch):
    made = make_mnist(tmp_path / "origin")
    server.files = {f"{name}.gz": path.read_bytes() for name, path in made.items()}
    sums = {
        n: data.hashlib.md5(gzip.decompress(p.read_bytes())).hexdigest() for n, p in made.items()
    }
    monkeypatch.setattr(data, "MNIST", sums)
    return server


def run(server, root, *more):
    return data.main([*more, "--root", str(root), "--url", server.url])


def holds(path, body):
    return path.read_bytes() == body


def no_parts(root):
    return not list(root.rglob("*.part"))


def test_mnist_is_fetched_and_a_second_run_fetches_nothing(mnist_server, tmp_path, capsys):
    root = tmp_path / "data"
    assert run(mnist_server, root, "mnist") == 0
    assert len(mnist_server.seen) == 4
    assert same(data.load("mnist", root), data.load("mnist", tmp_path / "origin"))
    assert run(mnist_server, root, "mnist") == 0
    assert len(mnist_server.seen) == 4
    assert no_parts(root)
    assert "there and whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        (["truncate"], [None, "half"]),
        (["stall"], [None, "half"]),
        (["truncate", "restart"], [None, "half"]),
        (["corrupt"], [None, None]),
        (["truncate", "corrupt"], [None, "half", None]),
        (["busy"], [None, None]),
        (["truncate", "truncate", "truncate", "stall"], 5),
    ],
)
def test_a_download_survives(mnist_server, tmp_path, monkeypatch, faults, requests):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = "train-images-idx3-ubyte.gz"
    mnist_server.faults = list(faults)
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    path = tmp_path / "data" / "mnist" / name
    assert holds(path, mnist_server.files[name])
    assert no_parts(tmp_path)
    ranges = [r for n, r in mnist_server.seen if n == name]
    if isinstance(requests, int):
        assert len(ranges) == requests
    else:
        half = f"bytes={len(mnist_server.files[name]) // 2}-"
        assert ranges == [half if r == "half" else r for r in requests]


def test_a_download_that_stays_corrupt_leaves_nothing_and_exits_2(
    mnist_server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    mnist_server.faults = ["corrupt"] * 9
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert list((tmp_path / "data" / "mnist").iterdir()) == []
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "train-images-idx3-ubyte.gz" in error
    assert "gzip" in error


def test_wrong_contents_in_a_valid_gzip_are_caught_by_their_checksum(
    mnist_server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    mnist_server.files["train-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.arange(40) % 9))
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert "md5" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "data" / "mnist").iterdir()) == [
        "train-images-idx3-ubyte.gz"
    ]


def test_what_has_arrived_is_taken_up_by_the_next_run(mnist_server, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = "train-images-idx3-ubyte.gz"
    mnist_server.faults = ["truncate", "busy", "busy"]
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    part = tmp_path / "data" / "mnist" / f"{name}.part"
    half = len(mnist_server.files[name]) // 2
    assert part.stat().st_size == half
    assert not part.with_suffix("").exists()
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    assert mnist_server.seen[3] == (name, f"bytes={half}-")


@pytest.mark.parametrize("left", ["all", "too much", "something else"])
def test_a_part_that_is_whole_or_too_long_or_wrong_does_no_harm(
    mnist_server, tmp_path, monkeypatch, left
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = "train-images-idx3-ubyte.gz"
    body = mnist_server.files[name]
    part = tmp_path / "data" / "mnist" / f"{name}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes({"all": body, "too much": body + body, "something else": b"<html>" * 9}[left])
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    assert holds(part.with_suffix(""), body)


def test_a_damaged_file_under_the_final_name_is_replaced(mnist_server, tmp_path):
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    path = tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-4])
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    assert holds(path, mnist_server.files[path.name])
    assert len(mnist_server.seen) == 5


def test_a_missing_file_is_not_asked_for_twice(mnist_server, tmp_path, capsys):
    mnist_server.files.clear()
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert len(mnist_server.seen) == 1
    assert "404" in capsys.readouterr().err


def test_no_server_at_all_exits_2_with_the_address(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    assert data.main(["mnist", "--root", str(tmp_path), "--url", url]) == 2
    assert url in capsys.readouterr().err


def test_an_address_that_is_none_exits_2(tmp_path, capsys):
    assert data.main(["mnist", "--root", str(tmp_path), "--url", "somewhere"]) == 2
    assert "somewhere" in capsys.readouterr().err.splitlines()[-1]


def test_a_second_download_into_the_same_folder_is_refused_while_one_runs(
    mnist_server, tmp_path, capsys
):
    with data.alone(tmp_path / "data" / "mnist"):
        assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert "another download" in capsys.readouterr().err
    assert not mnist_server.seen
    assert run(mnist_server, tmp_path / "data", "mnist") == 0


def test_a_full_disk_while_downloading_is_one_clear_error(
    mnist_server, tmp_path, monkeypatch, capsys
):
    def full(url, part, have):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "_transfer", full)
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert "No space left" in capsys.readouterr().err.splitlines()[-1]
    assert data.main(["mnist", "--root", "/dev/null/x", "--url", mnist_server.url]) == 2


def test_modelnet_is_fetched_and_unpacked_on_request(server, tmp_path):
    origin, root = make_modelnet(tmp_path / "origin"), tmp_path / "data"
    server.files["ModelNet40.zip"] = zip_tree(origin).read_bytes()
    assert run(server, root, "modelnet") == 0
    assert [p.name for p in root.iterdir()] == ["ModelNet40.zip"]
    assert run(server, root, "modelnet", "--unpack") == 0
    assert run(server, root, "modelnet", "--unpack") == 0
    assert sorted(p.name for p in root.iterdir()) == ["ModelNet40", "ModelNet40.zip"]
    assert len(server.seen) == 1
    mesh = "ModelNet40/table/test/table_0008.off"
    assert holds((root / mesh), (origin / mesh).read_bytes())


def test_an_evil_zip_is_not_kept(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    evil = io.BytesIO()
    with zipfile.ZipFile(evil, "w") as z:
        z.writestr("../evil", b"")
    server.files["ModelNet10.zip"] = evil.getvalue()
    assert run(server, tmp_path / "data", "modelnet10", "--unpack") == 2
    assert "'../evil'" in capsys.readouterr().err
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_unpacking_onto_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = zip_tree(make_modelnet(tmp_path))
    (tmp_path / "ModelNet40").rename(tmp_path / "elsewhere")

    def full(self, folder):
        (folder / "ModelNet40").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with pytest.raises(DataError) as error:
        meshes.unpack(path, tmp_path / "ModelNet40")
    one_line(error, path, "No space left")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ModelNet40.zip", "elsewhere"]


def test_ctrl_c_exits_130_and_the_next_run_goes_on(server, tmp_path):
    server.files["ModelNet40.zip"] = body = zip_tree(
        make_modelnet(tmp_path / "origin")
    ).read_bytes()
    server.faults = ["stall"]
    command = [sys.executable, "data.py", "modelnet", "--root", str(tmp_path), "--url", server.url]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # if ignored, as behind &
    )
    part = tmp_path / "ModelNet40.zip.part"
    while not (part.exists() and part.stat().st_size == len(body) // 2):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "again" in error.splitlines()[-1]
    assert not (tmp_path / "ModelNet40.zip").exists()
    assert run(server, tmp_path, "modelnet") == 0
    assert holds((tmp_path / "ModelNet40.zip"), body)
    assert server.seen[-1] == ("ModelNet40.zip", f"bytes={len(body) // 2}-")


def test_help_names_every_option_with_its_default_and_wrong_usage_exits_2(capsys):
    with pytest.raises(SystemExit) as done:
        data.parse(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for part in ("--root", "(default: data)", "--url", "--unpack"):
        assert part in text
    for wrong in (["imagenet"], [], ["mnist", "--unpack"]):
        with pytest.raises(SystemExit) as done:
            data.parse(wrong)
        assert done.value.code == 2


def test_progress_tells_the_time_left(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 12.0, 30.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    bar = meshes.Progress("a file", 200, done=100)
    bar.show(110)  # too early to say anything
    bar.show(140)
    bar.show(190)
    assert capsys.readouterr().err == "data: a file: 70%, 18 s left\ndata: a file: 95%, 3 s left\n"
