"""The scripts in docs/ run as they stand there and leave what they say."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from test_viewer import embedded

DOCS = Path(__file__).parent.parent / "docs"
SCRIPTS = sorted(DOCS.glob("[0-9]_*.py"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """What a script prints, and its pictures in tmp_path."""
    import torch

    def call(script):
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setattr(sys, "path", list(sys.path))
    before = torch.get_default_dtype()
    yield call
    torch.set_default_dtype(before)


def numbers(line):
    """What is written in figures in a line."""
    return [float(n) for n in re.findall(r"(?<![\w.])-?\d[\d.]*(?:e-?\d+)?", line)]


def test_theorem_1_holds_and_traces_agree(run, tmp_path):
    lines = dict(line.split(": ") for line in run(DOCS / "1_theorem.py").splitlines()[:4])
    assert numbers(lines["equivariance"])[0] < 1e-10
    assert numbers(lines["invertibility"])[0] < 1e-6
    for name, close in (("trace", 1e-8), ("log-determinant", 1e-5)):
        ours, autograd = numbers(lines[name])
        assert abs(ours) > 0.01
        assert ours == pytest.approx(autograd, abs=close)
    check_pages(tmp_path, "1_theorem")


def test_a_flow_tells_necklaces_from_strangers(run, tmp_path):
    (line,) = (s for s in run(DOCS / "2_own_sets.py").splitlines() if s.startswith("a necklace"))
    assert numbers(line)[0] > 90
    check_pages(tmp_path, "2_own_sets")


def test_sets_over_time_are_nearer_than_a_copy(run, tmp_path):
    lines = [s for s in run(DOCS / "3_over_time.py").splitlines() if s.startswith("radius")]
    for line in lines:
        *_, ours, copy = numbers(line)
        assert ours < copy, line
    assert len(lines) == 2
    check_pages(tmp_path, "3_over_time")


def check_pages(folder, name):
    assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert embedded(folder / f"{name}.html")["sections"][0]["sets"]


def test_every_script_has_its_test_and_its_name_in_the_first_line():
    assert [s.stem for s in SCRIPTS] == ["1_theorem", "2_own_sets", "3_over_time"]
    for script in SCRIPTS:
        assert f"python docs/{script.name}" in script.read_text().splitlines()[0]


def test_the_gallery_has_all_four_models_and_is_small():
    page, gallery = DOCS / "index.html", runpy.run_path(str(DOCS / "gallery.py"))
    assert page.stat().st_size < 1.5e6
    sections = embedded(page)["sections"]
    assert [s["name"] for s in sections] == [*gallery["FLOWS"], gallery["TURNING"]]
    assert [len(s["sets"]) for s in sections] == [6, 6, 12, 12]
    few = gallery["flow_sets"]("digits", "mnist", 2, 5, 3)
    assert [cloud.x.shape for cloud in few] == [(3, 5, 2)] * 2
    assert np.isfinite(few[0].x).all()
    (series,) = gallery["turning_sets"](1, 4, 4)
    assert (series.x.shape, series.boxes) == ((4, 4, 2), [None, None, None, "green"])
