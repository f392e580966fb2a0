"""The page of sets: it holds what it was given, and a real browser turns, zooms and plays it."""

import base64
import json
import re
import time
from types import SimpleNamespace

import browser
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import viewer
from support.viewer import Cloud

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;{{data}}"
LEFT, RIGHT = "\ue012", "\ue014"  # arrow keys, as WebDriver names them


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def embedded(path):
    """What a page holds."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text()
    )
    return json.loads(text, parse_constant=no_constant)


def page_of(folder, sets, title="a page", **settings):
    path = folder / "view.html"
    viewer.write(path, sets, title=title, **settings)
    return embedded(path)


def coordinates(section, shown):
    """(F, n, d), NaN where a point is not drawn."""
    q = np.frombuffer(base64.b64decode(shown["data"]), "<u2").astype(float)
    q = q.reshape(-1, shown["points"], section["dim"])
    v = np.where(q == 65535, np.nan, q * 8 / 65534 - 4)
    return np.array(section["centre"]) + section["half"] * v


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# ------------------------------------------------------------------------ what the page holds
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3)),
    scale=st.sampled_from([1e-30, 1.0, 1e300]),
    shift=st.floats(-10, 10),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 9),
)
@example(shape=(1, 30, 3), scale=1e307, shift=10.0, dtype=np.float64, seed=0)
def test_coordinates_are_those_given_to_a_part_of_the_window(
    tmp_path_factory, shape, scale, shift, dtype, seed
):
    scale = scale if dtype == np.float64 else min(scale, 1e30)
    x = ((normal(*shape, seed=seed) + shift) * scale).astype(dtype)
    (section,) = page_of(tmp_path_factory.getbasetemp(), [x])["sections"]
    (shown,) = section["sets"]
    found = coordinates(section, shown)
    assert found.shape == x.shape
    assert (
        np.abs(found / scale - x.astype(float) / scale).max() <= 5 * section["half"] / 65534 / scale
    )
    assert not shown["note"]


def test_points_that_are_not_finite_or_too_far_are_left_out_and_counted(tmp_path):
    x = normal(100, 3)
    x[3], x[5, 1], x[7], x[9, 0], x[11, 2] = np.nan, np.inf, 1e300, -1e5, 36
    (section,) = page_of(tmp_path, [x])["sections"]
    found = coordinates(section, section["sets"][0])[0]
    assert np.flatnonzero(np.isnan(found).any(-1)).tolist() == [3, 5, 7, 9, 11]
    assert section["sets"][0]["note"] == "2 not finite, 3 too far"
    assert 36 / 8 < section["half"] < 36 / 4


def test_the_window_holds_most_sets_though_one_diverged(tmp_path):
    sets = [normal(50, 2, seed=i) for i in range(8)]
    (section,) = page_of(tmp_path, [*sets, normal(50, 2) * 1e200])["sections"]
    assert 1 < section["half"] < 12
    assert "too far" in section["sets"][-1]["note"]
    assert not any(shown["note"] for shown in section["sets"][:-1])


def test_the_window_is_that_of_the_data_though_they_come_from_wider_noise(tmp_path):
    for end, widest in ((0.7, 0.7), (0.1, 0.5)):  # of the half-width of the noise
        x = np.stack([normal(500, 2) * s for s in np.linspace(1, end, 9)])
        (way,) = page_of(tmp_path, [x])["sections"]
        (series,) = page_of(tmp_path, [Cloud(x, times=range(9))])["sections"]
        assert way["half"] == pytest.approx(widest * series["half"], rel=0.2)
        assert not way["sets"][0]["note"]


def test_a_few_points_on_either_side_stay_in_the_window(tmp_path):
    for side in (-3.0, 3.0):
        x = np.r_[0.1 * normal(96, 1), np.full((4, 1), side)]
        (section,) = page_of(tmp_path, [x])["sections"]
        assert section["half"] > 2.5
        assert not section["sets"][0]["note"]


@pytest.mark.parametrize("x", [np.zeros((1, 3)), np.full((1, 2), 1e308), np.full((4, 3), np.nan)])
def test_a_window_of_no_size_becomes_one(tmp_path, x):
    (section,) = page_of(tmp_path, [x])["sections"]
    assert section["half"] == 1


def test_extremes_of_both_signs_do_not_overflow(tmp_path):
    x = np.array([[-1.7e308, 0], [1.7e308, 0], [0, 1.7e308]])
    (section,) = page_of(tmp_path, [x])["sections"]
    assert np.isfinite(section["half"])
    (section,) = page_of(tmp_path, [x[:2], x[1:]])["sections"]
    assert np.isfinite(section["half"])


def test_a_million_points_are_thinned_and_the_page_says_so(tmp_path):
    x = np.arange(3e6, dtype=np.float32).reshape(-1, 3)
    (section,) = page_of(tmp_path, [x])["sections"]
    (shown,) = section["sets"]
    assert shown["points"] == viewer.MOST_POINTS
    assert shown["note"] == "20,000 of 1,000,000 points"
    found = coordinates(section, shown)[0]
    assert np.abs(found.mean(0) - x.mean(0)).max() < 0.02 * section["half"]
    assert (np.diff(found[:, 0]) >= 0).all()


def test_all_sets_share_the_room_of_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "MOST_NUMBERS", 600)
    monkeypatch.setattr(viewer, "MOST_SETS", 2)
    page = page_of(tmp_path, [normal(5, 100, 2), normal(100, 2), normal(100, 2)])
    shown = page["sections"][0]["sets"]
    assert [s["points"] for s in shown] == [50, 50]
    assert page["all"] == 3


def test_a_point_of_a_series_keeps_its_place_when_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "MOST_POINTS", 10)
    x = np.stack([normal(100, 2), normal(100, 2) + 0.5])
    (section,) = page_of(tmp_path, [x])["sections"]
    found = coordinates(section, section["sets"][0])
    assert np.allclose(found[1] - found[0], 0.5, atol=1e-3)


def test_lines_and_many_axes_are_said(tmp_path):
    line, seven = page_of(tmp_path, [normal(9, 1), normal(9, 7)])["sections"]
    assert (line["dim"], seven["dim"]) == (1, 3)
    assert seven["sets"][0]["note"] == "axes 1–3 of 7"
    assert np.allclose(coordinates(seven, seven["sets"][0])[0], normal(9, 7)[:, :3], atol=1e-3)


def test_sections_share_their_window_and_times_only_within(tmp_path):
    sets = [
        Cloud(normal(3, 20, 2), section="a", times=[0, 0.5, 1]),
        Cloud(1000 * normal(20, 2), section="b"),
        Cloud(normal(2, 20, 2), section="a", times=[0.1 + 0.2, 0.9]),
    ]
    a, b = page_of(tmp_path, sets)["sections"]
    assert (a["name"], b["name"], b["times"]) == ("a", "b", [])
    assert a["half"] < 10 < b["half"]
    assert a["times"] == [0, 0.3, 0.5, 0.9, 1]
    assert [s["frame"] for s in a["sets"]] == [[0, 1, 1, 2, 2], [0, 0, 0, 1, 1]]


def test_a_way_from_noise_opens_at_its_end_and_a_series_at_its_start(tmp_path):
    assert page_of(tmp_path, [normal(4, 9, 2), normal(9, 2)])["end"]
    assert not page_of(tmp_path, [Cloud(normal(4, 9, 2), times=range(4)), normal(9, 2)])["end"]


def test_words_labels_and_numbers_arrive_as_given(tmp_path):
    cloud = Cloud(normal(5, 2), "n", "real", label=3, predicted="5", log_density=np.float32(0.5))
    results = {"test": {"ppll": np.float64(2), "bad": float("nan")}, "path": tmp_path}
    curves = [{"step": 0, "loss": None}, {"step": 1, "loss": float("inf")}]
    page = page_of(tmp_path, [cloud], about="why", results=results, curves=curves)
    shown = page["sections"][0]["sets"][0]
    words = ("name", "kind", "label", "predicted", "log_density", "times", "boxes", "note")
    assert [shown[word] for word in words] == ["n", "real", "3", "5", 0.5, None, None, ""]
    assert page["results"] == {"test": {"ppll": 2, "bad": "nan"}, "path": str(tmp_path)}
    assert page["curves"] == [{"step": 0, "loss": None}, {"step": 1, "loss": "inf"}]
    assert page["about"] == "why"


def test_hostile_names_stay_data(tmp_path):
    cloud = Cloud(normal(5, 2), HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    words = {"about": HOSTILE, "results": {HOSTILE: HOSTILE}, "curves": [{HOSTILE: 1.0}]}
    page = page_of(tmp_path, [cloud], title=HOSTILE, **words)
    assert page["sections"][0]["sets"][0]["label"] == HOSTILE
    assert page["results"] == {HOSTILE: HOSTILE}
    hostile = (tmp_path / "view.html").read_text()
    page_of(tmp_path, [Cloud(normal(5, 2))])
    calm = (tmp_path / "view.html").read_text()
    for tag in ("<script", "</script", "<img"):
        assert hostile.count(tag) == calm.count(tag), tag


def test_a_name_that_is_no_text_of_unicode_can_be_written(tmp_path):
    page = page_of(tmp_path, [Cloud(normal(2, 2), "\udc80")], title="\udc80")
    assert page["sections"][0]["sets"][0]["name"] == "\udc80"


@pytest.mark.parametrize(
    ("cloud", "why"),
    [
        (Cloud(np.zeros(3)), r"set 0 has shape \(3,\)"),
        (Cloud(np.zeros((3, 0))), "shape"),
        (Cloud(np.zeros((0, 3, 2))), "F > 0"),
        (Cloud([["a", "b"]]), "set 0 is not an array of numbers"),
        (Cloud(np.zeros((2, 3, 2)), times=[0]), "want 2 finite numbers"),
        (Cloud(np.zeros((2, 3, 2)), times=[0, np.nan]), "want 2 finite numbers"),
        (Cloud(np.zeros((2, 3, 2)), boxes=["red"]), "boxes"),
        (Cloud(np.zeros((1, 3, 2)), boxes=["blue"]), "'red' and 'green'"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_that_names_it(tmp_path, cloud, why):
    with pytest.raises(ValueError, match=why):
        viewer.write(tmp_path / "view.html", [cloud], title="")
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------------ in a real browser
@pytest.fixture(scope="module")
def window():
    if lacking := browser.missing():
        pytest.skip(f"no {lacking} on this machine: Debian's chromium and chromium-driver")
    with browser.chromium() as found:
        found.resize(1280, 900)
        yield found


@pytest.fixture
def see(window, tmp_path):
    """Open the page of some sets; whatever a test does, the console stays empty."""

    def look(sets, title="a page", **settings):
        viewer.write(tmp_path / "view.html", sets, title=title, **settings)
        window.open(tmp_path / "view.html")
        return SimpleNamespace(
            pixels=lambda k=0: window.run(PIXELS, k),
            where=lambda k=0: window.run(WHERE, k),
            words=lambda css="figcaption": window.run(WORDS, css),
            run=window.run,
        )

    window.prefer("light")
    yield look
    assert window.console() == []


PIXELS = """  // once all that was asked for is drawn
const frame = () => new Promise(requestAnimationFrame);
await frame();
await frame();
return document.querySelectorAll('canvas')[arguments[0]].toDataURL();"""
WORDS = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent);"
WHERE = """  // the middle of what is drawn, from 0 to 1 across and down
const canvas = document.querySelectorAll('canvas')[arguments[0]], size = canvas.width;
const copy = new OffscreenCanvas(size, size).getContext('2d', { willReadFrequently: true });
copy.drawImage(canvas, 0, 0);
const { data } = copy.getImageData(0, 0, size, size);
let sum = 0, x = 0, y = 0;
for (let p = 0; p < size * size; p++)
  if (data[4 * p + 3]) { sum++; x += p % size; y += Math.floor(p / size); }
return [x / sum / size, y / sum / size];"""
CHOOSE = """
const select = document.querySelector('#colour');
select.value = arguments[0];
select.dispatchEvent(new Event('change'));"""
CENTRE = """
const box = document.querySelectorAll('canvas')[arguments[0]].getBoundingClientRect();
return [box.x + box.width / 2, box.y + box.height / 2].map(Math.round);"""


def centre(page, k=0):
    return page.run(CENTRE, k)


def wait_for(condition, seconds=30):
    """Poll, for as long as a slow machine may take."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_dragging_turns_all_sets_of_a_section_and_no_other(window, see):
    sets = [Cloud(normal(200, 3, seed=i), section="ab"[i // 2]) for i in range(3)]
    page = see(sets)
    before = [page.pixels(k) for k in range(3)]
    assert len(set(before)) == 3
    window.drag((*centre(page), 40, 10))
    after = [page.pixels(k) for k in range(3)]
    assert [a != b for a, b in zip(after, before)] == [True, True, False]
    window.press("0")
    assert [page.pixels(k) for k in range(3)] == before


@pytest.mark.parametrize("pointer", ["mouse", "touch"])
def test_what_is_in_front_follows_the_pointer(window, see, pointer):
    front = np.array([0.52, -0.85, 0.0])
    page = see([np.r_[0.1 * normal(80, 3) + front, 0.1 * normal(40, 3) - front]])
    page.pixels()
    x, _ = page.where()
    window.drag((*centre(page), 30, 0), pointer=pointer)
    page.pixels()
    assert page.where()[0] > x + 0.02


def test_up_is_y_in_2d_and_z_in_3d_and_right_is_x(see):
    flat = np.array([[-1.0, -1.0], [0.8, 0.9], [0.9, 0.8], [1.0, 1.0]])
    solid = np.array([[0.0, 0.0, z] for z in (-1.0, 0.8, 0.9, 1.0)])
    page = see([Cloud(flat), Cloud(solid), Cloud(flat[:, :1])])
    page.pixels()
    (x, y), (_, z), (_, middle) = (page.where(k) for k in range(3))
    assert x > 0.55
    assert y < 0.48
    assert z < 0.45
    assert middle == pytest.approx(0.5, abs=0.01)


def test_scrolling_zooms_a_set_that_was_clicked_and_else_the_page(window, see):
    page = see([normal(100, 2) for _ in range(40)])
    before = page.pixels()
    window.scroll(*centre(page), 50)
    wait_for(lambda: page.run("return scrollY") > 0)
    assert page.pixels() == before
    page.run("scrollTo(0, 0)")
    window.drag((*centre(page), 0, 0))
    assert page.pixels() == before
    window.scroll(*centre(page), -50)
    wait_for(lambda: page.pixels() != before)
    assert page.run("return scrollY") == 0


def test_two_fingers_zoom(window, see):
    page = see([normal(100, 3)])
    before = page.run("return cells[0].camera")
    x, y = centre(page)
    window.drag((x - 20, y, -40, 0), (x + 20, y, 40, 0), pointer="touch")
    after = page.run("return cells[0].camera")
    assert after.pop("zoom") > 2 * before.pop("zoom")
    assert after == before


def test_keys_turn_zoom_enlarge_and_reset(window, see):
    page = see([normal(100, 3), normal(100, 3)])
    first = page.pixels()
    page.run("document.querySelector('canvas').focus()")
    seen = {first}
    for key in (RIGHT, "\ue013", "+", "\ue007"):  # right, up, larger, Enter
        window.press(key)
        seen.add(page.pixels())
    assert len(seen) == 5
    assert page.run("return document.querySelectorAll('figure.large').length") == 1
    window.press("\ue007", "0", "-", "+")
    assert page.pixels() == first


def test_playing_moves_points_and_pausing_stops_them(window, see):
    frames = np.stack([normal(100, 3) * s for s in np.linspace(1, 0.1, 12)])
    page = see([Cloud(frames), Cloud(frames[0])])
    end, still = page.pixels(), page.pixels(1)
    assert page.words("output") == ["t = 1"]
    assert page.run("play(); return step") == 0  # from the end, at once
    page.run("play()")
    window.press(" ")
    seen = set()
    wait_for(lambda: seen.add(page.pixels()) or len(seen) > 3)
    window.press(" ")
    assert page.run("return document.querySelector('#play').ariaLabel") == "Play"
    step = page.run("return step")
    here = page.pixels()
    time.sleep(0.3)
    assert (page.run("return step"), page.pixels()) == (step, here)
    page.run("show(steps)")
    assert page.pixels() == end
    assert page.pixels(1) == still


def test_playing_begins_again_after_the_last_frame(window, see):
    page = see([Cloud(normal(3, 50, 2), times=[1, 2, 3])])
    page.run("document.querySelector('#play').click()")
    seen = [1]

    def again():
        if (t := page.run("return step")) != seen[-1]:
            seen.append(t)
        return 2 in seen and seen[-1] < 2

    wait_for(again)


def test_series_wear_the_boxes_of_the_paper_at_their_times(window, see):
    boxes, times = [None, "red", None, "green"], [0, 0.5, 1, 1.5]
    model = Cloud(normal(4, 20, 2), "one", "model", times=times, boxes=boxes)
    given_ = Cloud(normal(2, 20, 2), "one", "given", times=[0, 1])
    page = see([given_, model])
    page.run("document.querySelector('#slider').focus()")
    found = []
    for _ in times:
        found.append((page.run("return cells[1].figure.className"), *page.words()))
        window.press(RIGHT)
    assert found == [
        ("", "one · given\nt = 0", "one · model\nt = 0"),
        ("red", "one · given\nt = 0", "one · model\nt = 0.5 · interpolated"),
        ("", "one · given\nt = 1", "one · model\nt = 1"),
        ("green", "one · given\nt = 1", "one · model\nt = 1.5 · extrapolated"),
    ]
    assert page.words("#legend span") == ["interpolated", "extrapolated"]


def test_sections_with_other_times_play_side_by_side(see):
    sets = [Cloud(normal(n, 9, 2), section=str(n), times=range(n)) for n in (3, 5)]
    page = see([*sets, normal(9, 2)])
    page.run("show(2)")
    assert page.words("output") == ["50 %"]
    assert page.words() == ["\nt = 1", "\nt = 2", "\n"]


def test_colour_is_by_depth_by_log_density_or_by_label(see):
    x = normal(60, 3)
    words = [("a", 1.0), ("b", 1.0), ("a", 2.0), (None, float("nan"))]
    page = see([Cloud(x, label=label, log_density=value) for label, value in words])

    def colours(mode):
        page.run(CHOOSE, mode)
        seen = [page.pixels(k) for k in range(4)]
        return [seen.index(pixels) for pixels in seen]

    assert colours("kind") == [0, 0, 0, 0]
    plain = page.pixels(3)
    assert colours("density") == [0, 0, 2, 3]
    assert page.pixels(3) == plain
    assert page.run("return document.querySelector('#legend').textContent") == "12 nats per point"
    assert colours("label") == [0, 1, 0, 3]
    assert page.words("#legend span") == ["a", "b"]


def test_labels_true_and_predicted_are_told_apart(see):
    page = see([Cloud(normal(9, 3), label="cup", predicted=p) for p in ("cup", "bowl")])
    assert page.words() == ["cup\n✓ predicted cup", "cup\n✗ predicted bowl"]
    assert page.words(".wrong") == ["✗ predicted bowl"]


def test_a_kind_can_be_hidden_and_shown(see):
    page = see([Cloud(normal(50, 2), kind=kind) for kind in ("real", "sample")])
    heights = "return cells.map(c => c.figure.offsetHeight > 0)"
    assert page.pixels(0) != page.pixels(1)
    page.run("document.querySelector('[type=checkbox]').click()")
    assert page.run(heights) == [False, True]
    page.run("document.querySelector('[type=checkbox]').click()")
    assert page.run(heights) == [True, True]


def test_dark_and_light_follow_the_preference(window, see):
    page = see([normal(200, 3)])
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = (page.pixels(), page.run(ground))
    window.prefer("dark")
    wait_for(lambda: page.pixels() != light[0] and page.run(ground) != light[1])
    window.prefer("light")
    wait_for(lambda: (page.pixels(), page.run(ground)) == light)


def test_results_and_curves_are_beside_the_sets(see):
    results = {
        "test": {"ppll": 1.23456, "confusion": [[1, 0], [0, 1]], "times": [0, 1]},
        "seconds": 3,
    }
    curves = [{"step": k, "epoch": k / 2, "loss": None if k < 2 else 1 / k} for k in range(9)]
    page = see([normal(9, 3)], results=results, curves=curves)
    assert page.words("tr") == ["ppll1.235", "confusion2 entries", "times0,1", "seconds3"]
    assert page.words("details[open] > summary") == ["test"]
    assert page.words("svg") == ["loss0.125 to 0.5step 28"]


def test_hostile_names_are_shown_as_text(see):
    cloud = Cloud(normal(9, 2), *[HOSTILE] * 5)
    words = {"about": HOSTILE, "results": {HOSTILE: HOSTILE}, "curves": [{HOSTILE: 1.0}] * 2}
    page = see([cloud, normal(9, 3)], title=HOSTILE, **words)
    assert page.words("h1, title, b") == [HOSTILE] * 3
    assert page.words("h2")[0] == HOSTILE
    assert page.words("img, script:nth-of-type(n + 3)") == []


def test_pages_of_odd_sets_open(see):
    assert see([]).words("p") == ["There are no sets."]
    odd = [
        np.zeros((1, 3)),
        np.zeros((0, 2)),
        np.full((5, 2), np.nan),
        normal(9, 1),
        normal(9, 1, 5),
    ]
    page = see([*odd, np.array([[1e300, 0], [0, 1.0]])])
    assert page.words()[0] == "\n"
    assert "\nno points" in page.words()
    assert page.run("return cells.every(c => c.canvas.width > 0)")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_points_that_are_not_there_are_not_drawn_however_far_one_zooms_out(window, see):
    x = normal(6, 2)
    page = see([x, np.r_[x, np.full((2, 2), np.nan)]])
    window.press(*"----------")
    assert page.pixels(0) == page.pixels(1)


def test_many_points_are_drawn_coarsely_only_while_they_move(window, see):
    page = see([normal(20_000, 3) for _ in range(3)])
    width = "return cells[0].canvas.width"
    page.pixels()
    fine = page.run(width)
    page.run("moving = true; change()")
    page.pixels()
    assert page.run(width) == pytest.approx(fine / 2, abs=1)
    window.drag((*centre(page), 9, 9))
    page.pixels()
    assert page.run(width) == fine


def test_what_is_out_of_sight_is_drawn_when_it_comes_into_sight(see):
    page = see([normal(100, 2) for _ in range(60)])
    assert page.pixels(0) != page.pixels(59)
    page.run("cells[59].canvas.scrollIntoView()")
    wait_for(lambda: page.pixels(59) == page.pixels(0))


def test_a_page_fits_a_telephone(window, see):
    window.resize(400, 800, 2)
    try:
        frames = Cloud(normal(5, 30, 3), "name" * 30, "kind", "section" * 20, label="label" * 20)
        page = see([frames, Cloud(normal(9, 3), kind="real", log_density=1.0)], title="title" * 30)
        assert page.run("return document.documentElement.scrollWidth <= 400")
    finally:
        window.resize(1280, 900)
