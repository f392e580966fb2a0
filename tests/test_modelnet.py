"""support/modelnet.py: copies of ModelNet, the cache, and twins."""

import gzip
import io
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from samples import (
    REAL,
    SQUARE,
    Evil,
    Hdf5,
    make_mnist,
    make_modelnet,
    needs_modelnet,
    one_line,
    same,
    zip_tree,
)

import data
from data import DataError
from support import mnist, modelnet
from support.shapes import SOLIDS, Random, hand_of, solids


# ------------------------------------------------------------------------------- ModelNet
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
    read = modelnet._resampled(folder, "night_stand", "test")[1]
    some = {tuple(row) for row in read("night_stand_0007", 2048).astype(np.float32)}
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
        lambda: modelnet.unpack(path, tmp_path / "ModelNet40"),
    ):
        with pytest.raises(DataError) as error:
            act()
        one_line(error, path, "evil")
    assert [p.name for p in tmp_path.rglob("*")] == ["ModelNet40.zip"]


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(modelnet, "LARGEST", 10**6)
    monkeypatch.setattr(modelnet, "EXPANDS", 10**6)
    monkeypatch.setattr(mnist, "LARGEST", 10**6)
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


def test_identical_meshes_are_kept_on_one_side(tmp_path):
    make_modelnet(tmp_path, ["chair"], train=8)
    chairs = tmp_path / "ModelNet40" / "chair" / "train"
    text = (chairs / "chair_0001.off").read_bytes()
    (chairs / "chair_0002.off").write_bytes(text.replace(b"\n", b"\r\n"))  # same mesh, other file
    sides = set()
    for seed in range(12):
        splits = data.load("modelnet", tmp_path, category="chair", valid=0.3, seed=seed)
        train, valid = set(splits.train.index), set(splits.valid.index)
        assert train | valid == set(range(8))
        assert ({0, 1} <= train) != ({0, 1} <= valid)
        sides.add(0 in train)
    assert sides == {True, False}


# ------------------------------------------------------------------------------- scales and sizes
@pytest.mark.parametrize("scale", [1e-300, 1e-25, 1e-3, 1e25, 1e120])
def test_clouds_of_any_scale_get_radius_one(scale):
    cloud = np.random.default_rng(0).normal(size=(3, 600, 3))
    x = modelnet.unit_radius(scale * cloud, "clouds")
    np.testing.assert_allclose(x, modelnet.unit_radius(cloud, "clouds"), rtol=1e-5)
    assert np.linalg.norm(x, axis=-1).max(-1) == pytest.approx(np.ones(3))


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_a_copy_of_any_scale_is_read_and_its_cache_read_again(tmp_path, scale):
    folder = tmp_path / "modelnet40_normal_resampled"
    (folder / "chair").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, numbers in (("train", range(3)), ("test", range(3, 5))):
        names = [f"chair_{i:04d}" for i in numbers]
        (folder / f"modelnet40_{part}.txt").write_text("\n".join(names))
        for name in names:
            rows = scale * rng.normal(size=(600, 6))
            text = "\n".join(",".join(map(str, row)) for row in rows)
            (folder / "chair" / f"{name}.txt").write_text(text)
    first = data.load("modelnet", tmp_path, category="chair", valid=0.4)
    assert np.isfinite(first.train.draw([0])[0]).all()
    assert same(first, data.load("modelnet", tmp_path, category="chair", valid=0.4))


def test_a_cloud_too_large_to_compute_with_is_named_and_not_cached():
    with pytest.raises(DataError) as error:
        modelnet.unit_radius(np.array([[[0.0, 0, 0], [1, 1, 1]], [[1e308, 0, 0]] * 2]), "chairs")
    one_line(error, "chairs", "shape 2 of 2")


@pytest.mark.parametrize("promise", ["zeros", "header", "directory"])
def test_a_cache_that_expands_too_far_is_refused_before_it_does(tmp_path, monkeypatch, promise):
    path = tmp_path / "modelnet40" / "chair_train.npz"
    path.parent.mkdir()
    head = io.BytesIO()
    shape = {"zeros": (100, 2048, 3), "header": (10**9, 2048, 3), "directory": (3, 5, 3)}[promise]
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    size = 0 if promise == "header" else 4 * 100 * 2048 * 3
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("points.npy", head.getvalue() + bytes(size))
    monkeypatch.setattr(np, "load", None)  # nothing is expanded
    with pytest.raises(DataError) as error:
        data.load("modelnet", tmp_path, category="chair")
    says = "times, so it holds no points" if promise == "zeros" else "its header promises"
    one_line(error, path, says, "delete it to renew it")


# ------------------------------------------------------------------------------- twins
def furniture(first, count, draw):
    """Clouds (count, 2000, 3) of built-in chairs from number `first` on; draw chooses points."""
    index = np.arange(first, first + count)
    clouds = solids(np.repeat("chair", first + count))(index, 2000, Random(index, draw))
    return modelnet.unit_radius(clouds.astype(np.float64), "chairs")


def test_test_shapes_drawn_anew_in_training_are_twins_and_others_are_not():
    train, test = furniture(0, 40, draw=0), furniture(100, 16, draw=0)
    test[:8] = furniture(20, 8, draw=1)
    twins = modelnet.find_twins(train, test)
    assert twins[:8].sum() >= 7
    assert not twins[8:].any()
    assert modelnet.find_twins(train, train[:4]).all()


def write_chair(path, number, shift=0, order=slice(None)):
    """A built-in chair as an OFF mesh."""
    parts = SOLIDS["chair"](hand_of(np.array([number])))
    v = np.concatenate(parts, 1)[0][order].reshape(-1, 3) + shift
    rows = [f"{x:.6f} {y:.6f} {z:.6f}" for x, y, z in v]
    rows += [f"3 {k} {k + 1} {k + 2}" for k in range(0, len(v), 3)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["OFF", f"{len(v)} {len(v) // 3} 0", *rows]))


def test_a_shifted_copy_with_other_triangles_is_a_twin_and_stays_in_the_split(tmp_path, capsys):
    folder = tmp_path / "ModelNet40" / "chair"
    for k in range(8):
        write_chair(folder / "train" / f"chair_{k:04d}.off", k)
        write_chair(folder / "test" / f"chair_{k + 8:04d}.off", k + 8)
    write_chair(folder / "test" / "chair_0099.off", 3, shift=7, order=slice(None, None, -1))
    splits = data.load("modelnet", tmp_path, category="chair")
    assert [len(s) for s in splits] == [7, 1, 9]
    assert np.flatnonzero(splits.test.twins).tolist() == [8]
    assert splits.test.some(2).twins.shape == (2,)
    assert not splits.train.twins.any()
    assert "1 of 9 test shapes are among the training shapes" in capsys.readouterr().err


@needs_modelnet
def test_about_as_many_twins_are_found_as_independent_draws_of_the_meshes_show():
    splits = data.load("modelnet", REAL, category="chair")
    assert 7 <= splits.test.twins.sum() <= 11  # ../shared/reference.md: 9 of 99


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
