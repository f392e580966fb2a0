"""data.py and support/splits.py: recipes and units, readers of MNIST, splits and batches."""

import gzip
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    REAL,
    idx,
    in_folder,
    make_mnist,
    make_modelnet,
    needs_mnist,
    one_line,
)

import data
from data import DataError, Random


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
@given(st.lists(st.integers(0, 30), min_size=12, max_size=80), st.integers(0, 99))
def test_identical_sets_are_never_on_two_sides(sets, seed):
    sets = np.array([*sets, 31, 32])
    a, b = data.hold_out(sets, 0.2, seed)
    assert not set(sets[a]) & set(sets[b])
    assert len(b) > 0
    assert sorted([*a, *b]) == list(range(len(sets)))


@pytest.mark.parametrize("count", [100, 200])
@pytest.mark.parametrize("category", [None, "shapes"])
def test_some_sets_are_of_all_classes_wherever_they_stand(category, count):
    split = data.load(category=category).test
    some = split.some(count)
    share = np.bincount(some.labels[some.index], minlength=len(split.classes)) / count
    assert share == pytest.approx(np.full(len(share), 1 / len(share)), abs=0.1)
    assert set(split.some(50).index) < set(some.index)
    assert (np.diff(some.index) > 0).all()
    assert (split.some().index == split.some(10**6).index).all()
    unread = split.some(50, after=50)
    assert len(unread) == 50
    assert set(unread.index) == set(split.some(100).index) - set(split.some(50).index)
    assert len(split.some(after=60)) == len(split) - 60


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
