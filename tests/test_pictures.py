"""Pictures: what is written can be read back, and what is drawn is where it should be."""

import os
import string
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import pictures
from support.pictures import COLOURS, GAP, LINE, MARGIN, PANEL, confusion, curves, point_grid, text


def chunks(path):
    """(kind, data) of each chunk of a PNG file, its checksums verified."""
    data, found = path.read_bytes(), []
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (
            zlib.crc32(kind + body),
        )
        found.append((kind, body))
        at += 12 + size
    return found


def decode(header, body):
    """Pixels from a header and compressed rows without a filter."""
    w, h, depth, kind, *rest = struct.unpack(">IIBBBBB", header)
    assert (depth, rest) == (8, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(h, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape((h, w, 3) if kind == 2 else (h, w))


def dark(pixels):
    """How much darker than the cell each pixel is, (h, w)."""
    return np.maximum(PANEL - pixels.astype(float).mean(-1), 0)


def inside(pixels, cell=112):
    return pixels[MARGIN : MARGIN + cell, MARGIN : MARGIN + cell]


# ------------------------------------------------------------------------------- files
@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_png_reads_back_as_exactly_its_pixels(tmp_path_factory, h, w, grey, seed):
    shape = (h, w) if grey else (h, w, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path_factory.mktemp("png") / "a.png"
    pictures.write_png(path, pixels)
    (_, header), (_, body), _ = found = chunks(path)
    assert [kind for kind, _ in found] == [b"IHDR", b"IDAT", b"IEND"]
    np.testing.assert_array_equal(decode(header, body), pixels)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_animation_has_its_chunks_in_order_and_numbered_without_a_gap(tmp_path, count):
    frames = np.random.default_rng(0).integers(0, 256, (count, 4, 6, 3)).astype(np.uint8)
    seconds = [0.04 * (1 + k) for k in range(count)]
    pictures.write_apng(tmp_path / "a.png", frames, seconds)
    (_, header), (first, control), *rest, last = chunks(tmp_path / "a.png")
    assert (first, control, last) == (b"acTL", struct.pack(">II", count, 0), (b"IEND", b""))
    kinds = [b"fcTL", b"IDAT"] + [b"fcTL", b"fdAT"] * (count - 1)
    assert [kind for kind, _ in rest] == kinds
    numbers = [struct.unpack(">I", body[:4])[0] for kind, body in rest if kind != b"IDAT"]
    assert numbers == list(range(len(numbers)))
    for k in range(count):
        _, w, h, x, y, ms, unit, *ways = struct.unpack(">5I2H2B", rest[2 * k][1])
        assert (w, h, x, y, unit, ways) == (6, 4, 0, 0, 1000, [0, 0])
        assert ms == round(1000 * seconds[k])
        body = rest[2 * k + 1][1]
        np.testing.assert_array_equal(decode(header, body[4:] if k else body), frames[k])


def test_a_failed_write_leaves_the_old_picture_and_nothing_else(tmp_path, monkeypatch):
    path, pixels = tmp_path / "a.png", np.zeros((2, 2), np.uint8)
    pictures.write_png(path, pixels)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        pictures.write_png(path, pixels + 1)
    assert os.listdir(tmp_path) == ["a.png"]
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------- point sets
@given(st.floats(-1, 1), st.floats(-1, 1), st.sampled_from([1.0, 2.0, 3.7]))
def test_the_centre_of_mass_of_a_dot_is_where_its_point_is(x, y, dot):
    ink = dark(inside(point_grid([[np.array([[x, y]])]], limits=(-1, 1), dot=dot)))
    i, j = np.mgrid[:112, :112] + 0.5
    room = 56 - dot - 4
    assert (ink * j).sum() / ink.sum() == pytest.approx(56 + room * x, abs=0.15)
    assert (ink * i).sum() / ink.sum() == pytest.approx(56 - room * y, abs=0.15)
    assert ink.sum() / (PANEL - np.mean(COLOURS["blue"])) == pytest.approx(np.pi * dot**2, rel=0.1)


def test_all_sets_of_a_picture_have_one_scale_unless_told_and_all_their_points_are_in_it():
    small, large = np.array([[-1.0, 0], [1, 0]]), np.array([[-4.0, 0], [4, 0]])
    both = point_grid([[small, large]], dot=2)
    apart = [
        np.ptp(np.flatnonzero(dark(inside(p)).any(0))) for p in (both, point_grid([[small]], dot=2))
    ]
    assert apart[0] - 4 == pytest.approx((apart[1] - 4) / 4, abs=2)
    limited = point_grid([[large]], limits=(-2, 2))
    assert not dark(inside(limited)).any()


def test_a_picture_does_not_change_its_points():
    points = np.random.default_rng(0).normal(size=(20, 2))
    before = points.copy()
    point_grid([[points]])
    np.testing.assert_array_equal(points, before)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_of_two_points_in_a_line_of_sight_the_nearer_is_drawn_over_and_is_darker(order):
    look = {"limits": (-2, 2), "dot": 6, "view": (0, 0)}  # along y
    ends, apart = np.array([[0.0, -1, 0], [0, 1, 0]]), np.array([[-1.0, 0, 0], [1, 0, 0]])
    both = inside(point_grid([[(ends + apart)[order]]], **look))
    left, right = both[:, :56], both[:, 56:]
    assert dark(left).sum() > 1.3 * dark(right).sum()
    hidden = inside(point_grid([[ends[order]]], **look))
    np.testing.assert_array_equal(hidden[50:62, 50:62], left[50:62, 27:39])


def test_z_is_up_and_a_view_turns_about_it():
    up = pictures.look(np.array([[0.0, 0, 1]]), (-30, 25))
    assert up[0, 1] > 0.9
    np.testing.assert_allclose(up, pictures.look(np.array([[0.0, 0, 1]]), (70, 25)))
    points = np.random.default_rng(0).normal(size=(9, 3))
    seen = pictures.look(points, (50, 20))
    np.testing.assert_allclose(np.linalg.norm(seen, axis=1), np.linalg.norm(points, axis=1))
    right_up_near = pictures.look(np.eye(3), (0, 0))
    np.testing.assert_allclose(right_up_near, [[1, 0, 0], [0, 0, -1], [0, 1, 0]], atol=1e-12)


@pytest.mark.parametrize("name", ["red", "green"])
def test_a_frame_has_its_colour_all_around_its_set_and_nowhere_else(name):
    points = np.random.default_rng(0).normal(size=(30, 2))
    plain = point_grid([[points, points]])
    framed = point_grid([[points, points]], frames=[[None, name]])
    x = MARGIN + 112 + GAP
    cell = framed[MARGIN : MARGIN + 112, x : x + 112]
    for edge in (cell[:3], cell[-3:], cell[:, :3], cell[:, -3:]):
        assert (edge == COLOURS[name]).all()
    changed = (plain != framed).any(-1)
    cell_changed = changed[MARGIN : MARGIN + 112, x : x + 112]
    assert not cell_changed[3:-3, 3:-3].any()
    assert changed.sum() == cell_changed.sum()


def test_titles_and_labels_change_only_their_own_strips():
    sets = [[np.random.default_rng(k).normal(size=(30, 2)) for k in range(3)]] * 2
    plain = point_grid(sets)
    titled = point_grid(sets, titles=["one", "a title much too long for its cell", ""])
    np.testing.assert_array_equal(titled[MARGIN + LINE :], plain[MARGIN:])
    assert (titled[MARGIN : MARGIN + LINE] < 128).any()
    assert (titled[:MARGIN] == 255).all()
    gap = MARGIN + 112 + GAP + 112 + GAP // 2
    assert (titled[: MARGIN + LINE, gap:] == 255).all()
    labelled = point_grid(sets, row_labels=["data", "ours"])
    wide = labelled.shape[1] - plain.shape[1]
    np.testing.assert_array_equal(labelled[:, wide + MARGIN :], plain[:, MARGIN:])
    assert (labelled[:, :wide] < 128).any()


def test_a_cell_may_be_empty_and_rows_of_unequal_length():
    points = np.zeros((1, 2))
    picture = point_grid([[points, None], [points], [np.zeros((0, 3)), None]])
    assert picture.shape == (2 * MARGIN + 3 * 112 + 2 * GAP, 2 * MARGIN + 2 * 112 + GAP, 3)
    assert (picture[:, MARGIN + 112 :] == 255).all()


# ------------------------------------------------------------------------------- letters
def test_every_printable_character_has_a_glyph_of_its_own_and_a_space_has_no_ink():
    printable = string.digits + string.ascii_letters + string.punctuation + "µ²−±×→…□"
    assert {" ", *printable} == set(pictures.GLYPHS)
    for unit in (pictures.UNIT, pictures.SMALL):
        drawn = {c: text(c, unit) for c in printable}
        assert len({(ink.shape, ink.tobytes()) for ink in drawn.values()}) == len(drawn)
        assert min(ink.max() for ink in drawn.values()) > 0.5
        for c, ink in drawn.items():  # none touches its neighbours
            assert ink[0].max() + ink[-1].max() < 1, c
            assert ink[:, 0].max() + ink[:, -1].max() < 1, c
    assert not text(" ").any()
    np.testing.assert_array_equal(text("é"), text("□"))


@given(st.text(max_size=60), st.integers(20, 200))
def test_text_is_cut_to_the_width_there_is(line, width):
    assert text(line, width=width).shape[1] <= width
    if text(line).shape[1] <= width:
        np.testing.assert_array_equal(text(line, width=width), text(line))


# ------------------------------------------------------------------------------- curves
@example(0.0, 1.0, 11, 1)
@given(
    st.floats(-1e6, 1e6), st.floats(1e-4, 1e6), st.integers(3, 12), st.sampled_from([0, 1]),
)  # fmt: skip
def test_ticks_are_few_round_numbers_that_cover_the_range(low, length, most, least):
    high = low + length if not least else np.floor(low) + np.ceil(length)
    low = low if not least else np.floor(low)
    marks = pictures.ticks(low, high, most, least=least)
    step = marks[1] - marks[0]
    assert 2 <= len(marks) <= most + 1
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= high - 1e-6 * step
    assert step >= least
    mantissa = step / 10 ** np.floor(np.log10(step * (1 + 1e-6)))
    assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5)) < 1e-2
    np.testing.assert_allclose(marks / step, np.rint(marks / step), atol=1e-2)


@example(999999999999.998, 1.0)
@given(st.floats(1e-12, 1e12), st.floats(1, 1e12))
def test_logarithmic_ticks_are_powers_of_ten_or_their_double_and_half_and_cover(low, factor):
    marks = pictures.ticks(low, low * factor, log=True)
    assert 2 <= len(marks) <= 9
    assert marks[0] <= low * (1 + 1e-9)
    assert marks[-1] >= low * factor * (1 - 1e-9)
    assert {f"{m:.6e}"[0] for m in marks} <= set("125")


@pytest.mark.parametrize(
    ("low", "high", "names"),
    [
        (0.52, 0.89, ["0.5", "0.6", "0.7"]),
        (1, 120, ["0", "20", "40"]),
        (-3, 4, ["−3", "−2", "−1"]),
        (0, 17000, ["0", "2,500", "5,000"]),
        (0, 3e-7, ["0", "5e−08", "1e−07"]),
        (7, 7, ["6.25", "6.50", "6.75"]),
    ],
)
def test_ticks_are_named_as_a_person_would(low, high, names):
    assert pictures.tick_names(pictures.ticks(low, high))[:3] == names


def ink_of(pixels, colour):
    """Where pixels have exactly this colour."""
    return (pixels == np.array(COLOURS[colour], np.uint8)).all(-1)


def test_curves_rise_where_their_values_rise_and_have_a_colour_each():
    x = np.arange(100)
    picture = curves({"up": (x, x / 100), "down": (x, 1 - x / 100)}, "epoch", "loss", "Two lines")
    for colour, sign in (("blue", -1), ("orange", 1)):
        i, j = np.nonzero(ink_of(picture, colour)[80:])  # below the legend
        assert np.corrcoef(i, j)[0, 1] * sign > 0.99


def test_a_gap_is_left_where_a_value_is_not_finite_and_a_value_between_gaps_is_a_dot():
    x, y = np.arange(101.0), np.full(101, 0.5)
    y[[0, -1]] = 0, 1
    y[20:50] = y[51:80] = np.nan
    y[60] = np.inf
    drawn = ink_of(curves({"": (x, y)}), "blue")[80:].any(0)
    columns = np.flatnonzero(drawn)
    left, right = columns.min(), columns.max()
    at = lambda k: round(left + (right - left) * k / 100)  # noqa: E731
    assert drawn[at(3) : at(18)].all()
    assert drawn[at(82) : at(97)].all()
    assert drawn[at(50)]
    assert not drawn[at(22) : at(48)].any()
    assert not drawn[at(52) : at(78)].any()


def test_a_straight_line_on_a_logarithmic_axis_is_exponential():
    x = np.arange(1, 61)
    picture = curves({"": (x, 10.0 ** (-x / 10))}, log_y=True)
    i, j = np.nonzero(ink_of(picture, "blue")[60:])
    assert np.corrcoef(i, j)[0, 1] > 0.999


def test_curves_of_one_value_or_many_series_or_long_ones_are_drawn():
    rng = np.random.default_rng(0)
    assert ink_of(curves({"one": ([3], [2.0])}), "blue").sum() > 40  # a dot, and the legend
    many = {f"series {k}": (np.arange(30), rng.normal(size=30)) for k in range(12)}
    picture = curves(many, title="Many")
    assert all(ink_of(picture, c).any() for c in COLOURS)
    curves({"long": (np.arange(20_000), rng.normal(size=20_000))})
    curves({"none": ([], []), "all gaps": ([1, 2], [np.nan, np.nan]), "some": ([1, 2], [3, 4])})


# ------------------------------------------------------------------------------- confusion
@pytest.mark.parametrize("classes", [1, 6, 10, 40])
def test_the_diagonal_of_a_diagonal_matrix_is_blue_and_all_else_white(classes):
    picture = confusion(7 * np.eye(classes), [f"class_{k}" for k in range(classes)])
    blue, red = ink_of(picture, "blue"), ink_of(picture, "red")
    cell = int(np.clip(480 / classes, 15, 64))
    i, j = np.nonzero(blue)
    last = i < i.min() + cell * classes  # not the key below
    i, j = i[last] - i.min(), j[last] - j[last].min()
    assert (i // cell == j // cell).all()
    assert len(set(i // cell)) == classes
    assert len(i) > 0.5 * classes * (cell - 1) ** 2
    assert np.nonzero(red)[0].min(initial=10**6) > np.nonzero(blue)[0].min() + cell * classes


def test_shades_are_shares_of_the_row_whatever_its_count_and_a_row_may_be_empty():
    few, many = np.array([[3, 1], [0, 0]]), np.array([[300, 100], [0, 0]])
    names = ["yes", "no"]
    np.testing.assert_array_equal(confusion(few, names), confusion(many, names))
    assert (confusion(few, names) != confusion(few.T, names)).any()


# ------------------------------------------------------------------------------- errors
GOOD, NAN = np.zeros((3, 2)), np.array([[0, 0], [0, np.nan]])
PIXELS = np.zeros((2, 2, 3), np.uint8)
WRONG = {
    "empty grid": lambda _: point_grid([]),
    "holds no set": lambda _: point_grid([[], []]),
    r"rows\[0\]\[1\] has shape \(3, 4\)": lambda _: point_grid([[GOOD, np.zeros((3, 4))]]),
    r"rows\[1\]\[0\] has shape \(3,\)": lambda _: point_grid([[GOOD], [np.zeros(3)]]),
    r"rows\[0\]\[0\]: point 1 is not finite": lambda _: point_grid([[NAN]]),
    "row_labels has 2 entries, not 1": lambda _: point_grid([[GOOD]], row_labels=["a", "b"]),
    r"titles\[0\] has 2 entries, not 1": lambda _: point_grid([[GOOD]], titles=["a", "b"]),
    r"frames\[0\] has 1 entries, not 2": lambda _: point_grid([[GOOD] * 2], frames=[["red"]]),
    "no colour 'mauve'": lambda _: point_grid([[GOOD]], frames=[["mauve"]]),
    "low < high": lambda _: point_grid([[GOOD]], limits=(1, 1)),
    "cell=5": lambda _: point_grid([[GOOD]], cell=5),
    "dot=-1": lambda _: point_grid([[GOOD]], dot=-1),
    "series 'a': x .* one common length": lambda _: curves({"a": ([1, 2], [1, 2, 3])}),
    r"series 'a': x\[1\] is not finite": lambda _: curves({"a": ([1, np.nan], [1, 2])}),
    "series 'a': 0.0 has no place": lambda _: curves({"a": ([1, 2], [0, 2])}, log_y=True),
    "no curves": lambda _: curves({}),
    "no finite value": lambda _: curves({"a": ([1], [np.nan])}),
    "too small": lambda _: curves({"a": ([1], [1])}, size=(60, 60)),
    r"matrix has shape \(2, 3\)": lambda _: confusion(np.zeros((2, 3)), ["a", "b"]),
    "1 names for 2 classes": lambda _: confusion(np.eye(2), ["a"]),
    "negative": lambda _: confusion(-np.eye(2), ["a", "b"]),
    "want uint8": lambda path: pictures.write_png(path, PIXELS.astype(float)),
    r"want uint8 \(h, w, 3\)": lambda path: pictures.write_png(path, PIXELS[..., :2]),
    r"pixels are uint8 \(2,\)": lambda path: pictures.write_png(path, PIXELS[0, :, 0]),
    r"pixels are uint8 \(0, 2, 3\)": lambda path: pictures.write_png(path, PIXELS[:0]),
    "no frames": lambda path: pictures.write_apng(path, []),
    "differ in size": lambda path: pictures.write_apng(path, [PIXELS, PIXELS[:1]]),
    "1 frames but 2 seconds": lambda path: pictures.write_apng(path, [PIXELS], [1, 1]),
    "at most 65": lambda path: pictures.write_apng(path, [PIXELS], 0),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_drawn_is_named(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        WRONG[message](tmp_path / "a.png")
    assert not os.listdir(tmp_path)
