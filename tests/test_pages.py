"""The pages of the three experiments hold what a script gives them, and what its run tells."""

import json

import numpy as np
import pytest
import torch
from test_viewer import coordinates, embedded

from solvers import SolverError
from support import pages
from support.options import UsageError

STORY = {"title": "a run"}


def sets(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def shown(path):
    (section,) = embedded(path)["sections"]
    return section, section["sets"]


@pytest.fixture
def run(tmp_path):
    """A folder as a run leaves it."""
    (tmp_path / "config.json").write_text('{"lr": 0.5}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return tmp_path


def test_a_flow_has_real_sets_beside_samples_with_labels_and_densities(run):
    real, samples, path = sets(3, 5, 2), sets(3, 5, 2) + 1, run / "view.html"
    mask = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    nats = lambda x: x.mean((1, 2)).double()  # noqa: E731
    how = {"real": real, "labels": ["a", "", "b"], "nats": nats, "run": run, "test": {"ppll": 1}}
    pages.flow_page(path, samples, mask, **how, **STORY)
    section, found = shown(path)
    assert [(s["name"], s["kind"]) for s in found[::3]] == [("1", "real"), ("1", "sample")]
    assert [s["points"] for s in found] == [5, 2, 1] * 2
    assert [s["label"] for s in found] == ["a", None, "b"] * 2
    wanted = [*nats(real).tolist(), *nats(samples).tolist()]
    assert [s["log_density"] for s in found] == pytest.approx(wanted)
    assert np.allclose(coordinates(section, found[4])[0], samples[1, :2], atol=1e-3)
    page = embedded(path)
    assert page["results"] == {"test": {"ppll": 1}, "config": {"lr": 0.5}}
    assert page["curves"] == [{"step": 1, "loss": 2.0}]


def test_a_way_from_noise_is_a_set_over_time_with_the_density_of_its_end(run):
    frames = sets(4, 2, 5, 3)
    pages.flow_page(run / "view.html", frames, run=run, nats=lambda x: x[:, 0, 0], **STORY)
    section, found = shown(run / "view.html")
    assert section["times"] == [0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1]
    assert np.allclose(coordinates(section, found[1]), frames[:, 1], atol=1e-3)
    assert found[1]["log_density"] == pytest.approx(frames[-1, 1, 0, 0].item())


def test_a_density_that_cannot_be_solved_leaves_a_page_without_it(run, capsys):
    def nats(x):
        raise SolverError("step 0 at t = 0.3")

    pages.flow_page(run / "view.html", sets(2, 3, 2), run=run, nats=nats, **STORY)
    assert [s["log_density"] for s in shown(run / "view.html")[1]] == [None, None]
    assert "no densities: step 0 at t = 0.3" in capsys.readouterr().err


def test_series_of_a_model_have_the_boxes_of_the_paper_and_given_ones_none(run):
    times, x = [0, 0.5, 1, 1.5], sets(4, 6, 2).numpy()
    x[1:, 2] = np.nan  # is there at the first time only
    x[:, 4] = np.nan  # is never there
    rows = [("1", "given", times[::2], x[::2]), ("1", "model", times, x)]
    pages.series_page(run / "view.html", rows, [0, 1], run=run, **STORY)
    section, found = shown(run / "view.html")
    assert [s["boxes"] for s in found] == [None, [None, "red", None, "green"]]
    assert [(s["points"], s["note"]) for s in found] == [(5, "")] * 2
    there = coordinates(section, found[1])
    assert np.isnan(there[:, 2, 0]).tolist() == [False, True, True, True]
    kept = np.delete(x, 4, 1)
    assert np.allclose(there, kept, atol=1e-3, equal_nan=True)


def test_boxes_know_a_trained_time_in_spite_of_rounding():
    assert pages.box(0.1 + 0.2, [0, 0.3, 1]) is None
    assert [pages.box(t, [0.5, 0.0]) for t in (-0.1, 0.2, 0.6)] == ["green", "red", "green"]


def test_a_classifier_shows_its_errors_first(run):
    x, mask = sets(3, 4, 3), torch.arange(4) < torch.tensor([4, 3, 2])[:, None]
    pages.cls_page(run / "view.html", x, mask, list("aba"), list("abc"), run=run, **STORY)
    found = shown(run / "view.html")[1]
    told = [(s["label"], s["predicted"], s["points"]) for s in found]
    assert told == [("a", "c", 2), ("a", "a", 4), ("b", "b", 3)]


def test_a_finished_run_brings_its_numbers_and_a_folder_without_one_brings_none(run, tmp_path):
    (run / "results.json").write_text('{"test": {"ppll": 2}, "config": {"lr": 1}}')
    pages.flow_page(run / "a.html", sets(1, 2, 2), run=run, **STORY)
    assert embedded(run / "a.html")["results"] == {"test": {"ppll": 2}, "config": {"lr": 0.5}}
    pages.flow_page(run / "b.html", sets(1, 2, 2), run=tmp_path / "none", **STORY)
    page = embedded(run / "b.html")
    assert (page["results"], page["curves"]) == ({}, [])


def test_a_damaged_results_file_is_one_line_that_names_it(run):
    (run / "results.json").write_text(json.dumps({})[:1])
    with pytest.raises(UsageError, match=r"results\.json"):
        pages.flow_page(run / "view.html", sets(1, 2, 2), run=run, **STORY)
    (run / "results.json").write_text("[1]")
    pages.flow_page(run / "view.html", sets(1, 2, 2), run=run, **STORY)
    assert embedded(run / "view.html")["results"]["results"] == [1]
