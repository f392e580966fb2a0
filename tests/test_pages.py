"""The pages of the three experiments hold what a script gives them, and what its run tells."""

import json

import numpy as np
import pytest
import torch
from test_viewer import coordinates, embedded

import train_cls
import train_flow
import train_temporal
from solvers import SolverError
from support import flow_pictures, pages
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
    assert [s["label"] for s in found] == ["a", "", "b"] * 2
    wanted = [*nats(real).tolist(), *nats(samples).tolist()]
    assert [s["log_density"] for s in found] == pytest.approx(wanted)
    assert np.allclose(coordinates(section, found[4])[0], samples[1, :2], atol=1e-3)
    page = embedded(path)
    assert page["results"] == {"test": {"ppll": 1}, "config": {"lr": 0.5}}
    assert page["curves"] == [{"step": 1, "loss": 2.0}]


def test_a_way_from_noise_is_a_set_over_time_with_the_density_of_its_end(run):
    frames, third = sets(4, 2, 5, 3), sets(1, 5, 3)
    samples = torch.cat([frames[-1], third])
    how = {"way": frames, "nats": lambda x: x[:, 0, 0], "run": run}
    pages.flow_page(run / "view.html", samples, **how, **STORY)
    section, found = shown(run / "view.html")
    assert [len(coordinates(section, s)) for s in found] == [4, 4, 1]
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


# ----------------------------------------------------------------------------------- the scripts
TINY = ["--minutes", "0.01", "--batch-size", "16", "--category", "1,7"]
FLOW = [*TINY, "--objective", "matching", "--blocks", "1", "--hidden", "8", "--heads", "2"]
FLOW += ["--points", "6", "--test-sets", "8"]
VAE = [*TINY, "--objective", "matching", "--points", "6", "--latent", "4", "--hidden", "8"]
VAE += ["--valid-series", "2", "--test-series", "2"]


def kinds(path):
    """How many sets of each kind a page has, and its first section."""
    section, found = shown(path)
    names = [s["kind"] for s in found]
    return {kind: names.count(kind) for kind in dict.fromkeys(names)}, section


def test_a_flow_leaves_a_page_of_its_run_of_samples_and_of_an_evaluation(tmp_path, capsys):
    out = tmp_path / "run"
    results = train_flow.main([*FLOW, "--condition", "label", "--out", str(out)])
    assert f"{out / 'view.html'}: open it in a browser" in capsys.readouterr().err
    load = ["--load", str(out), "--out", str(out)]
    train_flow.main([*load, "--sample", "7", "--path", "--label", "7"])
    train_flow.main([*load, "--evaluate", "--test-sets", "8"])
    for name in ("view", "evaluation"):
        counts, section = kinds(out / f"{name}.html")
        assert counts == {"real": 8, "sample": 8}
        assert len(section["times"]) == flow_pictures.PAGE_FRAMES
        assert {s["label"] for s in section["sets"]} == {"1", "7"}
        assert all(isinstance(s["log_density"], float) for s in section["sets"])
    page = embedded(out / "view.html")
    assert page["results"]["test"]["ppll"] == results["test"]["ppll"]
    assert page["results"]["config"] == results["config"]
    assert page["curves"][0]["step"] == 0
    counts, section = kinds(out / "samples-7x6-seed0.html")
    assert counts == {"sample": 7}
    assert [len(s["frame"]) for s in section["sets"]] == [len(section["times"])] * 7
    assert {s["label"] for s in section["sets"]} == {"7"}


def test_series_leave_a_page_of_their_run_of_samples_and_of_reconstructions(tmp_path):
    out = tmp_path / "run"
    train_temporal.main([*VAE, "--out", str(out)])
    load = ["--load", str(out), "--out", str(out)]
    train_temporal.main([*load, "--sample", "3", "--times", "0:1.5:0.25"])
    np.save(tmp_path / "mine.npy", sets(2, 3, 5, 2).numpy())
    train_temporal.main([*load, "--reconstruct", str(tmp_path / "mine.npy"), "--times", "0,0.3,2"])
    train_temporal.main([*load, "--evaluate", "--test-series", "2"])
    for name in ("view", "evaluation"):
        counts, section = kinds(out / f"{name}.html")
        assert counts == {"true": 4, "model": 4, "sample": 8}
        assert section["times"][::10] == [0, 0.5, 1, 1.5]
        assert section["sets"][0]["boxes"] is None
        assert (
            section["sets"][4]["boxes"][10:] == [None, *["red"] * 4] * 2 + [None] + ["green"] * 10
        )
    counts, section = kinds(out / "samples-3x6-seed0.html")
    assert counts == {"sample": 3}
    assert section["sets"][0]["boxes"] == [None] * 5 + ["green"] * 2
    counts, section = kinds(out / "mine-reconstructed.html")
    assert counts == {"given": 2, "model": 2}
    assert section["sets"][2]["boxes"] == [None, "red", "green"]


def test_a_classifier_leaves_a_page_of_its_run_and_of_an_evaluation(tmp_path):
    out = tmp_path / "run"
    words = ["--model", "deepsets", "--category", "digits", "--points", "9", "--epochs", "1"]
    results = train_cls.main([*words, "--batch-size", "600", "--out", str(out)])
    train_cls.main(["--load", str(out), "--evaluate"])
    for name in ("view", "evaluation"):
        found = shown(out / f"{name}.html")[1]
        assert len(found) == train_cls.PAGE_SETS
        right = [s["label"] == s["predicted"] for s in found]
        assert right == sorted(right)
        assert {s["label"] for s in found} <= set("0123456789")
        page = embedded(out / f"{name}.html")
        assert page["results"]["test"]["accuracy"] == results["test"]["accuracy"]
