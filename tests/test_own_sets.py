"""support/own_sets.py and own_files.py: a person's own sets, through every format and back."""

import io
import itertools
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import SQUARE, Evil, Hdf5, in_folder, one_line

import data
from data import DataError
from support import own_files, own_sets, reading

seeds = st.integers(0, 10**6)


def make_sets(seed, count=12, dim=2, sizes=(1, 9)):
    """Sets (nᵢ, d) of float32."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(n, dim)).astype(np.float32) for n in rng.integers(*sizes, count, int, True)
    ]


def padded(sets, value=0.0):
    x = np.full((len(sets), max(map(len, sets)), sets[0].shape[1]), value, np.float32)
    for row, points in zip(x, sets):
        row[: len(points)] = points
    return x, np.arange(x.shape[1]) < np.array([[len(s)] for s in sets])


def named(path, **options):
    """The sets at a path by name."""
    source = own_sets.read(path, **options)
    parts = np.split(source.points, source.start[1:-1])
    return dict(zip(source.names, parts)), source


# ------------------------------------------------------------------------------- writers
def text_rows(rows, cut=" "):
    return "".join(cut.join(repr(float(v)) for v in row) + "\n" for row in rows).encode()


def ply(points, order="<", more=b""):
    kind = {"": "ascii", "<": "binary_little_endian", ">": "binary_big_endian"}[order]
    names = "".join(f"property float c{k}\n" for k in range(points.shape[1]))
    head = f"ply\nformat {kind} 1.0\ncomment made up\nelement vertex {len(points)}\n{names}"
    body = points.astype(f"{order}f4").tobytes() if order else text_rows(points)
    return head.encode() + more + b"end_header\n" + body


def pcd(points, binary=True):
    d = points.shape[1]
    head = f"# .PCD v0.7\nVERSION 0.7\nFIELDS {' '.join(f'c{k}' for k in range(d))}\n"
    head += f"SIZE {'4 ' * d}\nTYPE {'F ' * d}\nCOUNT {'1 ' * d}\nWIDTH {len(points)}\nHEIGHT 1\n"
    head += f"POINTS {len(points)}\nDATA {'binary' if binary else 'ascii'}\n"
    return head.encode() + (points.astype("<f4").tobytes() if binary else text_rows(points))


def npy(points):
    file = io.BytesIO()
    np.save(file, points)
    return file.getvalue()


FILES = {  # one set each
    ".npy": npy,
    ".xyz": text_rows,
    ".txt": lambda points: b"# made up\n\n" + text_rows(points, "\t"),
    ".csv": lambda points: (
        ",".join(f"c{k}" for k in range(points.shape[1])).encode()
        + b"\r\n"
        + text_rows(points, ",")
    ),
    "little.ply": ply,
    "big.ply": lambda points: ply(points, ">"),
    "text.ply": lambda points: ply(points, ""),
    "binary.pcd": pcd,
    "text.pcd": lambda points: pcd(points, binary=False),
}


def write_folder(folder, sets, labels, kind):
    for i, (points, label) in enumerate(zip(sets, labels)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        suffix = kind[kind.rindex(".") :]
        (folder / label / f"{i:03d}{suffix}").write_bytes(FILES[kind](points))


def write_long(path, sets, labels, cut=","):
    lines = [cut.join(["set", *(f"c{k}" for k in range(sets[0].shape[1])), "label"])]
    for i, (points, label) in enumerate(zip(sets, labels)):
        lines += [cut.join([f"s{i:03d}", *(repr(float(v)) for v in p), label]) for p in points]
    path.write_text("\n".join(lines) + "\n")


# ------------------------------------------------------------------------------- round trips
@settings(in_folder, max_examples=60)
@given(seeds, st.integers(1, 4), st.sampled_from(list(FILES)))
def test_a_folder_gives_back_its_sets_and_labels_whatever_the_format(
    tmp_path_factory, seed, d, kind
):
    folder = tmp_path_factory.mktemp("sets")
    sets = make_sets(seed, dim=d)
    labels = np.random.default_rng(seed).choice(["a", "b", "c"], len(sets))
    write_folder(folder, sets, labels, kind)
    columns = (
        f"points={'+'.join(f'c{k}' for k in range(d))}" if "c" in kind or "ply" in kind else None
    )
    got, source = named(folder, columns=columns)
    for name, points in got.items():
        number = int(name.split("/")[-1].split(".")[0])
        np.testing.assert_array_equal(points, sets[number])
        assert name.startswith(labels[number])
        assert source.classes[source.labels[source.names.index(name)]] == labels[number]
    assert len(got) == len(sets)
    assert source.classes == tuple(sorted(set(labels)))
    assert source.dim == d


@settings(in_folder, max_examples=60)
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from(["x.npz", "long.npz", "x.npy", "t.csv", "t.txt", "j.h5"]),
)
def test_a_file_gives_back_its_sets_whatever_the_format(tmp_path_factory, seed, d, kind):
    path = tmp_path_factory.mktemp("sets") / kind
    sets, fake = make_sets(seed, dim=d), SimpleNamespace(File=Hdf5)
    labels = np.random.default_rng(seed).choice(["a", "b"], len(sets))
    x, mask = padded(sets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "h5py", fake)
        if kind == "x.npz":
            np.savez(path, x=x, mask=mask, label=labels)
        elif kind == "long.npz":
            which = np.repeat(np.arange(len(sets)), [len(s) for s in sets])
            order = np.random.default_rng(seed).permutation(len(sets))[which].argsort(kind="stable")
            np.savez_compressed(
                path, points=np.concatenate(sets)[order], set=which[order], label=labels
            )
        elif kind == "x.npy":
            np.save(path, padded(sets, np.nan)[0])
        elif kind == "j.h5":
            with open(path, "wb") as file:
                np.savez(file, particle_features=np.dstack([x, mask]), jet_features=x[:, 0])
        else:
            write_long(path, sets, labels, "," if kind == "t.csv" else " ")
        got, source = named(path)
    for points, want in zip(got.values(), sets):
        np.testing.assert_array_equal(points, want)
    if kind in ("x.npy", "j.h5"):
        assert source.classes == ("all",)
    else:
        assert [source.classes[k] for k in source.labels] == labels.tolist()
    if kind == "j.h5":
        np.testing.assert_array_equal(source.context, x[:, 0])


def test_built_in_sets_written_to_a_file_give_the_same_numbers(tmp_path):
    for options in ({"points": 7}, {"points": (5, 9)}, {"task": "temporal", "points": 4}):
        splits = data.load(**options)
        splits = data.Splits(*(s.some(60) for s in splits))
        own_sets.save(tmp_path / "sets.npz", splits, seed=3)
        back = data.load(str(tmp_path / "sets.npz"), task=options.get("task", "flow"))
        assert back.train.classes == splits.train.classes
        for a, b in zip(splits, back):
            x, mask, label = a.draw(np.arange(60), seed=3)
            order = b.index - b.index.min()
            y, got, again = b.draw(np.argsort(order))
            np.testing.assert_array_equal(x[..., : y.shape[-2], :], y)
            assert (mask is None) == (got is None)
            assert (label == again).all()
        if mask is None:  # of equal sizes: also the batches, in their order
            for p, q in zip(
                data.batches(splits.train, 16, seed=3), data.batches(back.train, 16, seed=3)
            ):
                for one, other in zip(p, q):
                    assert one is other is None or torch.equal(one, other)


def test_columns_choose_what_is_what(tmp_path):
    path = tmp_path / "jets.csv"
    path.write_text("event;eta;phi;pt;mass;kind\n7;1;2;3;9;top\n7;4;5;6;9;top\n2;7;8;9;5;gluon\n")
    columns = "set=event,points=eta+pt,context=mass,label=kind"
    got, source = named(path, columns=columns)
    assert {k: v.tolist() for k, v in got.items()} == {"2": [[7, 9]], "7": [[1, 3], [4, 6]]}
    assert source.classes == ("gluon", "top")
    assert source.context.tolist() == [[5], [9]]
    np.savez(tmp_path / "jets.npz", jets=np.ones((4, 3, 2)), kind=np.arange(4))
    _, source = named(tmp_path / "jets.npz", columns={"x": "jets", "label": "kind"})
    assert source.classes == ("0", "1", "2", "3")
    with pytest.raises(DataError) as error:
        own_sets.read(path, columns="st=event")
    one_line(error, "st=", "roles set, points")


def test_meshes_are_sampled_by_area_and_points_of_a_cloud_are_not(tmp_path):
    square = b"v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nv 9 9 9\n"
    quad = square.replace(b"v ", b"").replace(b"9 9 9\n", b"")
    mesh = b"ply\nformat ascii 1.0\nelement vertex 4\nproperty float x\nproperty float y\n"
    mesh += (
        b"property float z\nelement face 2\nproperty list uchar int vertex_indices\nend_header\n"
    )
    files = {
        "a.off": SQUARE,
        "b.obj": square + b"f 1/1 2/2 3\nf -5 -3 -2\n",
        "c.ply": mesh + quad + b"3 0 1 2\n3 0 2 3\n",
        "d.ply": mesh.replace(b"face 2", b"face 1") + quad + b"4 0 1 2 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    got, _ = named(tmp_path)
    for name, points in got.items():
        assert points.shape == (2048, 3), name
        assert points.min(0).tolist() == pytest.approx([0, 0, 0], abs=0.01)
        assert points.mean(0) == pytest.approx(np.array([0.5, 0.5, 0]), abs=0.03)
    (tmp_path / "b.obj").write_bytes(square)
    got, _ = named(tmp_path, points=3000)
    assert got["a.off"].shape == (3000, 3)
    assert got["b.obj"].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [9, 9, 9]]


# ------------------------------------------------------------------------------- splits
def save_ragged(path, count=40, seed=0, **more):
    sets = make_sets(seed, count, sizes=(3, 40))
    x, mask = padded(sets)
    np.savez(path, x=x, mask=mask, **more)
    return str(path), sets


def test_the_test_sets_are_a_tenth_and_the_same_whatever_the_seed(tmp_path):
    path, _ = save_ragged(tmp_path / "a.npz", 50)
    a, b = (data.load(path, seed=seed) for seed in (0, 1))
    assert [len(s) for s in a] == [40, 5, 5]
    assert sorted(a.test.index) == sorted(b.test.index)
    assert sorted(a.valid.index) != sorted(b.valid.index)
    assert sorted(itertools.chain(*(s.index for s in a))) == list(range(50))


def test_named_splits_are_kept_and_missing_ones_held_out(tmp_path, capsys):
    parts = np.array((["train"] * 6 + ["val"] * 2 + ["test"] * 2) * 3)
    path, _ = save_ragged(tmp_path / "a.npz", 30, split=parts)
    splits = data.load(path)
    assert [sorted(s.index) for s in splits] == [
        np.flatnonzero(parts == p).tolist() for p in ("train", "val", "test")
    ]
    for k, part in enumerate(("train", "test")):
        sets = make_sets(k, 20 - 10 * k, dim=3)
        write_folder(tmp_path / "b" / part, sets, ["chair", "table"] * 10, ".npy")
    splits = data.load(str(tmp_path / "b"), category="table")
    assert [len(s) for s in splits] == [9, 1, 5]
    assert splits.test.names == sorted(splits.test.names, key=splits.test.names.index)
    assert all(name.startswith("test/table/") for name in splits.test.names)
    assert splits.train.classes == ("table",)
    (x, _), (y, _) = (padded(make_sets(k, 8, dim=5)) for k in (1, 1))
    np.savez(
        tmp_path / "c.npz", train=x, test_x=y, train_label=np.arange(8), test_label=np.arange(8)
    )
    assert [len(s) for s in data.load(str(tmp_path / "c.npz"))] == [7, 1, 8]
    assert "7 of 8 test sets are identical to a training set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ("train train test", [1, 1, 1]),
        ("train train valid", [1, 1, 1]),
        ("train valid test", [1, 1, 1]),
        ("train train train", [1, 1, 1]),
        ("train test test", None),
        ("train valid valid", None),
        ("train train valid valid", [1, 2, 1]),
    ],
)
def test_as_few_sets_as_can_be_split_are_split(tmp_path, parts, sizes):
    parts = np.array(parts.split())
    path, _ = save_ragged(tmp_path / "a.npz", len(parts), split=parts)
    if sizes is None:
        with pytest.raises(DataError, match="1 sets cannot be split"):
            data.load(path)
    else:
        assert [len(s) for s in data.load(path)] == sizes


def test_sizes_of_sets_are_told_by_class(tmp_path):
    label = np.array(["a", "b"] * 20)
    path, sets = save_ragged(tmp_path / "a.npz", label=label)
    train = data.load(path).train
    assert train.points == max(map(len, sets))
    assert train.sizes.tolist() == [len(sets[i]) for i in train.index]
    for name, pairs in train.sizes_by_class().items():
        mine = [len(sets[i]) for i in train.index if label[i] == name]
        assert pairs == [[n, mine.count(n)] for n in sorted(set(mine))]
    assert (data.load(path, points=10).train.sizes <= 10).all()
    built_in = data.load(points=7).valid
    assert built_in.sizes_by_class()["3"] == [[7, (built_in.labels[built_in.index] == 3).sum()]]


def test_all_sets_can_be_loaded_as_one_split_to_score_them(tmp_path):
    path, sets = save_ragged(tmp_path / "a.npz", 1, name=np.array(["mine"]))
    split = own_sets.load_all(path)
    assert (len(split), split.names) == (1, ["mine"])
    np.testing.assert_array_equal(split.draw([0])[0][0], sets[0])
    path, sets = save_ragged(tmp_path / "b.npz", 30)
    split = own_sets.load_all(path)
    assert (np.diff(split.sizes) >= 0).all()
    assert [str(i) for i in split.index] == split.names


# ------------------------------------------------------------------------------- draws
@in_folder
@given(seeds, st.integers(1, 50), st.sampled_from([0.0, 0.1]), st.booleans())
def test_own_sets_are_drawn_the_same_alone_as_among_others(tmp_path, seed, points, noise, series):
    path = tmp_path / "a.npz"
    sets = make_sets(seed, 24, sizes=(1, 40))
    x, mask = padded(sets)
    if series:
        x, mask = x.reshape(8, 3, -1, 2), mask.reshape(8, 3, -1)
    np.savez(path, x=x, mask=mask)
    split = data.load(
        str(path), task="temporal" if series else "flow", points=points, noise=noise
    ).train
    where = np.random.default_rng(seed).permutation(len(split))
    together, mask, _ = split.draw(where, seed=seed, epoch=2)
    mask = np.ones(together.shape[:-1], bool) if mask is None else mask
    for k in range(0, len(where), 3):
        alone, there, _ = split.draw(where[k : k + 1], seed=seed, epoch=2)
        n = alone.shape[-2]
        np.testing.assert_array_equal(alone[0], together[k][..., :n, :])
        assert not mask[k][..., n:].any()
        assert there is None or (there[0] == mask[k][..., :n]).all()


def test_some_points_of_large_sets_are_drawn_anew_and_small_sets_are_kept(tmp_path):
    path, sets = save_ragged(tmp_path / "a.npz")
    splits = data.load(path, points=12)
    first, mask, _ = splits.train.draw(np.arange(32), epoch=0)
    later, _, _ = splits.train.draw(np.arange(32), epoch=1)
    assert first.shape == (32, 12, 2)
    for k, i in enumerate(splits.train.index):
        mine = {tuple(p) for p in sets[i]}
        drawn = [tuple(p) for p in first[k][mask[k]]]
        assert len(set(drawn)) == len(drawn) == min(len(mine), 12)
        assert set(drawn) <= mine
        if len(mine) <= 12:
            np.testing.assert_array_equal(first[k], later[k])
            np.testing.assert_array_equal(first[k][: len(mine)], sets[i])
    assert (first != later).any()
    for split in splits[1:]:
        a, b = (split.draw(np.arange(4), seed=s, epoch=s)[0] for s in (0, 1))
        np.testing.assert_array_equal(a, b)


def test_every_point_of_a_large_set_is_drawn_as_often(tmp_path):
    x = (
        np.arange(20, dtype=np.float32).reshape(1, 20, 1).repeat(5, 0)
        + 100 * np.arange(5)[:, None, None]
    )
    np.savez(tmp_path / "a.npz", x=x)
    split = data.load(str(tmp_path / "a.npz"), points=5).train
    drawn = np.concatenate([split.draw([0], epoch=e)[0].ravel() for e in range(800)])
    assert np.bincount((drawn % 100).astype(int)) / 800 == pytest.approx(
        np.full(20, 0.25), abs=0.07
    )


def test_noise_is_added_to_every_draw_with_its_width(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((50, 200, 2)) + np.arange(50)[:, None, None])
    splits = data.load(str(tmp_path / "a.npz"), noise=0.3)
    for split in splits:
        x = split.draw(np.arange(len(split)))[0] - split.index[:, None, None]
        assert x.std() == pytest.approx(0.3, rel=0.05)
        assert abs(x.mean()) < 0.03
        assert len(np.unique(x[:, 0, 0])) == len(x)  # each set has its own
        assert split.noise() == 0.3
    a, b = (splits.train.draw([0], epoch=e)[0] for e in (0, 1))
    assert (a != b).all()
    assert data.load(points=9).train.noise() is None


# ------------------------------------------------------------------------------- batches
def test_ragged_batches_hold_sets_of_similar_size_and_every_set_once(tmp_path):
    path, _ = save_ragged(tmp_path / "a.npz", 1000)
    train = data.load(path, valid=0.2).train
    for epoch in (0, 1):
        batches = list(data.batches(train, 16, seed=1, epoch=epoch))
        again = list(data.batches(train, 16, seed=1, epoch=epoch, start=3, workers=2))
        assert all(torch.equal(a.x, b.x) for a, b in zip(batches[3:], again))
        kept = sum(
            b.x.shape[0] * b.x.shape[1] if b.mask is None else b.mask.sum().item() for b in batches
        )
        room = sum(b.x.shape[0] * b.x.shape[1] for b in batches)
        assert room < 1.1 * kept
        seen = sorted(tuple(p) for b in batches for p in b.x[:, 0].tolist())
        assert len(set(seen)) == len(batches) * 16 == len(train) // 16 * 16
        widths = [b.x.shape[1] for b in batches]
        assert widths != sorted(widths)
    parts = [list(data.batches(train, 16, seed=1, epoch=1, rank=r, world=2)) for r in (0, 1)]
    for whole, *shares in zip(batches, *parts):
        for r, share in enumerate(shares):
            n = share.x.shape[1]
            assert torch.equal(share.x, whole.x[r::2, :n])


def test_a_batch_has_labels_and_context_of_its_sets(tmp_path):
    label, context = np.arange(40) % 4, np.random.default_rng(0).normal(size=(40, 3))
    path, sets = save_ragged(tmp_path / "a.npz", label=label, context=context)
    first = {tuple(s[0].tolist()): i for i, s in enumerate(sets)}
    for batch in data.batches(data.load(path, points=40).train, 8):
        index = [first[tuple(p)] for p in batch.x[:, 0].tolist()]
        assert batch.label.tolist() == label[index].tolist()
        np.testing.assert_array_equal(batch.context, context[index].astype(np.float32))
        assert batch.t is None
    assert next(data.batches(data.load().train, 4)).context is None


def test_pad_makes_a_batch_of_a_list():
    sets = make_sets(0, 5)
    x, mask = data.pad(sets)
    want, there = padded(sets)
    np.testing.assert_array_equal(x, want)
    np.testing.assert_array_equal(mask, there)
    for wrong in ([], [np.zeros(3)], [np.zeros((2, 3)), np.zeros((2, 2))]):
        with pytest.raises(DataError) as error:
            data.pad(wrong)
        one_line(error, "pad", "one d")


# ------------------------------------------------------------------------------- series
def series_table(seed, own=True, count=12):
    """Rows (series, time, x, y) of series with times and sizes of their own."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        times = np.sort(rng.choice(20, rng.integers(1, 5), replace=False)) if own else np.arange(3)
        for t in times:
            rows += [(i, t / 4, *rng.normal(size=2)) for _ in range(rng.integers(1, 6))]
    return np.array(rows)


@in_folder
@given(seeds, st.booleans(), st.sampled_from(["a.npz", "a.csv"]))
def test_series_come_back_with_their_times_and_sets(tmp_path, seed, own, name):
    rows, path = series_table(seed, own), tmp_path / name
    shuffled = np.random.default_rng(seed).permutation(rows)
    if name == "a.npz":
        np.savez(path, points=shuffled[:, 2:], set=shuffled[:, 0].astype(int), time=shuffled[:, 1])
    else:
        path.write_bytes(b"set,time,x,y\n" + text_rows(shuffled, ","))
    splits = data.load(str(path), task="temporal")
    for split in splits:
        assert split.times.ndim == (2 if own else 1)
        for b in data.batches(split, 5, training=False):
            for i in range(len(b.x)):
                mask = torch.ones(b.x.shape[:-1], dtype=bool) if b.mask is None else b.mask
                t = b.t[i] if own else b.t
                for k in range(len(t)):
                    if not mask[i, k].any():
                        assert t[k] == t[k - 1]  # it has ended
                        continue
                    point = b.x[i, k, 0].numpy()
                    row = np.abs(rows[:, 2:] - point).sum(1).argmin()
                    same = (rows[:, 0] == rows[row, 0]) & (rows[:, 1] == rows[row, 1])
                    assert t[k] == np.float32(rows[row, 1])
                    want = rows[same, 2:].astype(np.float32)
                    got = b.x[i, k][mask[i, k]].numpy()
                    np.testing.assert_array_equal(sorted(got.tolist()), sorted(want.tolist()))


@pytest.mark.parametrize("rows", [False, True])
def test_padded_series_have_one_grid_of_times_or_a_row_each(tmp_path, rows):
    x = np.random.default_rng(0).normal(size=(20, 4, 5, 3))
    x[2, 3], x[5, 1, 2:] = np.nan, np.nan  # a set that was not observed, and one of two points
    t = np.array([0, 1, 2, 5.0])
    t = t + np.arange(20)[:, None] if rows else t
    np.savez(tmp_path / "a.npz", x=x, t=t)
    split = data.load(str(tmp_path / "a.npz"), task="temporal").train
    assert split.times.shape == ((16, 4) if rows else (4,))
    batch = next(data.batches(split, 16))
    assert batch.x.shape == (16, 4, 5, 3)
    assert batch.t.shape == ((16, 4) if rows else (4,))
    assert sorted(batch.mask.sum((1, 2)).tolist())[:2] in ([15, 17], [15, 20], [17, 20], [20, 20])
    np.save(tmp_path / "b.npy", x)
    assert data.load(str(tmp_path / "b.npy"), task="temporal").train.times.tolist() == [0, 1, 2, 3]


def test_series_are_for_one_task_and_sets_for_the_others(tmp_path):
    np.savez(tmp_path / "series.npz", x=np.random.default_rng(0).normal(size=(9, 2, 3, 2)))
    path, _ = save_ragged(tmp_path / "sets.npz")
    for name, task in ((tmp_path / "series.npz", "flow"), (path, "temporal")):
        with pytest.raises(DataError) as error:
            data.load(str(name), task=task)
        one_line(error, name, "times", "train_temporal.py")


# ------------------------------------------------------------------------------- units
@pytest.mark.parametrize(
    ("x", "says"),
    [
        (
            np.random.default_rng(0).integers(0, 28, (20, 30, 2)).astype(float),
            ["coordinate 0", "28 values", "1 apart", "noise=σ"],
        ),
        (np.random.default_rng(0).normal(size=(20, 30, 2)) * [1, 0], ["coordinate 1", "1 values"]),
        (
            np.random.default_rng(0).normal(size=(20, 15, 2)).repeat(2, 1),
            ["300 of 600 points are repeated"],
        ),
    ],
)
def test_repeated_and_rounded_coordinates_are_named_with_the_way_out(tmp_path, capsys, x, says):
    np.savez(tmp_path / "a.npz", x=x)
    data.load(str(tmp_path / "a.npz"))
    said = capsys.readouterr().err
    for part in (*says, "no bound", "--noise"):
        assert part in said
    data.load(str(tmp_path / "a.npz"), noise=0.1)
    assert not capsys.readouterr().err


def test_nothing_is_said_of_coordinates_that_are_fine(tmp_path, capsys):
    path, _ = save_ragged(tmp_path / "a.npz", 200)
    assert data.load(path).train.log_unit == 0
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------- bad input
def bad_files(root):
    """(path, options, what the error says) of everything that is wrong."""
    good = make_sets(0, 6, dim=3)
    x, mask = padded(good)
    nan = x.copy()
    nan[4, 1, 2] = np.nan

    def npz(name, **arrays):
        np.savez(root / name, **arrays)
        return root / name

    def text(name, contents):
        (root / name).write_bytes(contents)
        return root / name

    def folder(name, extra, contents):
        write_folder(root / name, good, [""] * 6, ".npy")
        text(f"{name}/{extra}", contents)
        return root / name

    header = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 100, 3)}
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, header)
    cut = ply(good[0].repeat(9, 0))[:-5]
    words = b"set,x,y\n1,2,3\n1,2,oops\n"
    return [
        (root / "nowhere.npz", ["no data called", "nowhere.npz", "or a path"]),
        (text("a.tar", b""), [".tar", "want a folder, or one of .npz"]),
        (text("b.csv", b"id,x,y\n1,2,3\n"), ["line 1", "no column 'set'", "id, x, y", "--columns"]),
        (text("c.csv", b"1,2,3\n4,5,6\n"), ["line 1", "no header"]),
        (text("d.csv", words), ["'oops' in column 'y' of row 1", "--columns"]),
        (text("e.csv", b"set,x,y\n1,2,3\n1,2\n"), ["line 3", "2 fields, but 3"]),
        (
            text("f.csv", b"set,x,y\n1,2,3\n1,nan,4\n"),
            ["set 1, row 1", "not finite", "--skip-bad"],
        ),
        (text("g.csv", b""), ["line 1"]),
        (text("h.csv", b"set,x\n"), ["line 2"]),
        (npz("a.npz", x=nan), ["set 4", "point 1", "not finite", "--skip-bad"]),
        (npz("b.npz", x=x, mask=mask & (np.arange(6) != 2)[:, None]), ["set 2", "no points"]),
        (npz("c.npz", x=x, label=np.arange(5)), ["label", "(5,)", "6 sets"]),
        (npz("d.npz", x=x, mask=mask[:, :-1]), ["mask", "want (6,"]),
        (npz("e.npz", y=x), ["no x, nor points and set", "there are y"]),
        (npz("f.npz", x=x[:1]), ["1 sets cannot be split", "give more"]),
        (npz("g.npz", x=x[0, 0]), ["(N, n, d)"]),
        (npz("h.npz", x=x, label=np.array([Evil(root / "evil"), *"abcde"])), ["never unpickled"]),
        (
            npz("i.npz", points=good[0], set=np.arange(len(good[0]) + 1)),
            ["set is", "one per point"],
        ),
        (npz("j.npz", x=x, split=np.array(["train"] * 5 + ["rest"])), ["split 'rest' of set '5'"]),
        (npz("k.npz", x=x, context=np.full((6, 2), np.inf)), ["context of set '0'", "not finite"]),
        (npz("l.npz", x=x[:, None].repeat(2, 1), time=np.array([1, 0])), ["increase"]),
        (
            npz("m.npz", x=x[:, None].repeat(2, 1), time=np.array([1])),
            ["time is", "(2,) or (6, 2)"],
        ),
        (npz("q.npz", x=x, context=np.array(["a"] * 6)), ["context is <U1", "want numbers"]),
        (npz("r.npz", x=x, label=np.ones((6, 2))), ["label is (6, 2)"]),
        (npz("s.npz", x=x.astype(np.float64) * 1e39), ["too large for float32", "scale it"]),
        (text("n.npy", huge.getvalue()), ["promises", "1000000000"]),
        (text("o.npy", npy(np.array([Evil(root / "evil")]))), ["never unpickled"]),
        (text("p.npz", b"PK no"), ["not a whole .npz"]),
        (folder("fa", "x.npy", npy(np.zeros((3, 2)))), ["x.npy", "2 axes, where others have 3"]),
        (
            folder("fb", "x.ply", cut),
            ["x.ply", f"offset {len(cut)}", "ends after", "cut", "--skip-bad"],
        ),
        (
            folder("fc", "x.ply", ply(good[0]).replace(b"vertex ", b"vertex 99999999")),
            ["x.ply", "ends after"],
        ),
        (
            folder("fd", "notes.txt", b"what these are\nfrom whom\n"),
            ["notes.txt", "line 2", "--skip-bad"],
        ),
        (folder("fe", "x.doc", b""), ["x.doc", "no format of a set", "--skip-bad"]),
        (folder("ff", "x.npy", npy(np.zeros((0, 3)))), ["x.npy", "no points"]),
        (
            folder("fn", "x.ply", ply(good[0]).replace(b"float c1", b"float c0")),
            ["x.ply", "element 'vertex'", "more than once"],
        ),
        (folder("fg", "x.xyz", b"1 2 3\n4 5 nan\n"), ["x.xyz", "point 1", "not finite"]),
        (folder("fh", "x.pcd", pcd(good[0])[:-1]), ["x.pcd", "ends after"]),
        (
            folder("fi", "x.pcd", pcd(good[0]).replace(b"DATA binary", b"DATA binary_compressed")),
            ["x.pcd", "binary_compressed", "save it as binary"],
        ),
        (folder("fj", "x.obj", b"v 1 2 3\nf 1 2 3\n"), ["x.obj", "vertex 1 of 1"]),
        (folder("fk", "x.off", SQUARE[:30]), ["x.off", "line"]),
        (folder("fl", "x.ply", ply(good[0])), ["x.ply", "no column 'x'", "c0, c1, c2"]),
        (folder("fm", "x.csv", b"1e39,0,0\n"), ["x.csv", "point 0", "not finite"]),
    ]


def test_bad_input_is_one_line_that_names_the_file_the_place_and_the_way_out(tmp_path):
    for path, says in bad_files(tmp_path):
        with pytest.raises(DataError) as error:
            data.load(str(path))
        one_line(error, path.name, *says)
    assert not (tmp_path / "evil").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files in it"):
        data.load(str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataError, match=r"pipe\.csv: \.csv is no format"):
        data.load(str(tmp_path / "pipe.csv"))
    write_folder(tmp_path / "mixed", make_sets(0, 4), ["a", "", "b", "c"], ".npy")
    with pytest.raises(DataError, match=r"001\.npy is in no folder that is a label"):
        data.load(str(tmp_path / "mixed"))


def test_bad_sets_are_left_out_and_counted_if_asked(tmp_path, capsys):
    for path, _ in bad_files(tmp_path):
        if path.name in ("a.npz", "b.npz") or path.is_dir():
            splits = data.load(str(path), skip_bad=True)
            assert sum(map(len, splits)) == 6 - (not path.is_dir())
            said = capsys.readouterr().err.splitlines()
            assert said[0].startswith("data: left out: ")
            assert f"1 of {7 if path.is_dir() else 6} sets are left out as bad" in said[1]
    write_folder(tmp_path / "bad", make_sets(0, 4), [""] * 4, ".npy")
    for path in (tmp_path / "bad").iterdir():
        path.write_bytes(b"no")
    with pytest.raises(DataError, match="none of 4 sets can be used"):
        data.load(str(tmp_path / "bad"), skip_bad=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"points": (3, 5)}, "one number"),
        ({"points": 0}, "points=0"),
        ({"noise": -1}, "noise=-1"),
        ({"noise": np.inf}, "noise=inf"),
        ({"spare": 3}, "spare"),
        ({"category": "d"}, "no category 'd'"),
    ],
)
def test_wrong_options_for_own_sets_are_named(tmp_path, options, says):
    path, _ = save_ragged(tmp_path / "a.npz", 9, label=np.array(list("abc" * 3)))
    with pytest.raises(DataError, match=says):
        data.load(path, **options)
    with pytest.raises(DataError, match="noise"):
        data.load("synthetic", noise=0.1)


def mutate(body, seed):
    """Some bytes changed, cut or doubled."""
    rng, body = np.random.default_rng(seed), bytearray(body)
    for _ in range(rng.integers(1, 4)):
        at, how = int(rng.integers(len(body) + 1)), rng.integers(4)
        if how == 0:
            body[at : at + 1] = bytes(rng.integers(0, 256, 1, np.uint8))
        elif how == 1:
            del body[at : at + int(rng.integers(1, 50))]
        elif how == 2:
            body[at:at] = bytes(rng.integers(48, 58, int(rng.integers(1, 9)), np.uint8))
        else:
            body[at:at] = rng.choice([b"\n", b"-", b"e9", b"nan", b" ", b"\0", b",", b"9999999"])
    return bytes(body)


def attack(folder, seed):
    """Read one mutated file of every kind; anything but sets and DataError is a failure."""
    sets = make_sets(seed, 6, dim=3)
    x, mask = padded(sets)
    stream = io.BytesIO()
    np.savez(stream, x=x, mask=mask, label=np.arange(6))
    write_long(folder / "t.csv", sets, "abcabc")
    whole = {"t.csv": (folder / "t.csv").read_bytes(), "a.npz": stream.getvalue(), "a.npy": npy(x)}
    single = {k: make(sets[0]) for k, make in FILES.items()}
    single |= {".off": SQUARE, ".obj": b"v 0 0 0\nv 1 0 0\nv 1 1 0\nf 1 2 3\nf -1 -2 -3\n"}
    refused = 0
    with np.errstate(all="ignore"):
        for name, body in whole.items():
            (folder / name).write_bytes(mutate(body, seed))
            refused += _refused(lambda n=name: own_sets.read(folder / n, skip_bad=bool(seed % 2)))
        for kind, body in single.items():
            path = folder / f"x{kind[kind.rindex('.') :]}"
            path.write_bytes(mutate(body, seed))
            wanted = ("c0", "c1", "c2") if "ply" in kind or "pcd" in kind else None
            refused += _refused(lambda p=path, w=wanted: own_files.read_file(p, w, 16))
    return refused, len(whole) + len(single)


def _refused(read):
    try:
        read()
    except DataError:
        return True
    return False


def test_files_with_wrong_bytes_are_read_or_refused_in_one_line(tmp_path, capsys):
    counts = [attack(tmp_path, seed) for seed in range(12)]
    assert 0 < sum(c[0] for c in counts) < sum(c[1] for c in counts)


def test_an_array_larger_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path, _ = save_ragged(tmp_path / "a.npz")
    monkeypatch.setattr(reading.os, "sysconf", lambda name: 60)  # 3,600 bytes in all
    with pytest.raises(DataError) as error:
        data.load(path)
    one_line(error, path, "GiB", "in parts")


def test_an_empty_path_is_no_data():
    with pytest.raises(DataError, match="no data called ''"):
        data.load("")
