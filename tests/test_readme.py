"""The README's examples run as they stand there, its numbers are those of runs, its models load."""

import importlib
import json
import re
import statistics
from pathlib import Path

import pytest
import torch

import train_flow
import train_temporal
from support import models, training

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
MODULES = [importlib.import_module(name) for name in ("exnode", "sets", "solvers", "data")]
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split("import ")[1].split()[0])
def test_example_runs_as_printed(code):
    exec(compile(code, "README.md", "exec"), {})


def test_every_part_has_an_example():
    for name in (
        "odeint",
        "AttentionField",
        "ExNODE",
        "SetClassifier",
        "SetFlow",
        "TemporalSetVAE",
    ):
        assert any(name in code for code in EXAMPLES)


def test_every_name_in_the_map_of_the_paper_exists():
    table = README.split("## From the paper to the code")[1].split("\n## ")[0]
    names = [n for n in re.findall(r"`([.\w]+)(?![.\w/])", table) if not n.endswith(".py")]
    assert len(names) > 25
    owner = None
    for name in names:
        *path, last = name.removeprefix(".").split(".")
        if not name.startswith("."):  # else beside the one before
            owner = next(o for o in (find_owner(m, path) for m in MODULES) if hasattr(o, last))
        assert hasattr(owner, last), name


def find_owner(module, path):
    """What a dotted path stands for in a module, whose own name it may begin with; or None."""
    for k, part in enumerate(path):
        if k or part != module.__name__:
            module = getattr(module, part, None)
    return module


def test_every_linked_number_is_that_of_its_run():
    pattern = r"\[\**(−?[\d.]+)\**(?: ± ([\d.]+))?\]\((?:\.\./)?(results/[\w./-]+\.json)\)"
    links = re.findall(pattern, README + RESULTS)
    assert len(links) > 20
    for number, error, path in links:
        test = json.loads((ROOT / path).read_text())["test"]
        between = test.get("chamfer", {}).get("interpolation", {}).get("model")
        value = test.get("accuracy") or test.get("ppll") or between
        for text, true in ((number, value), (error, test.get("standard_error"))):
            if text:
                decimals = len(text.partition(".")[2])
                assert text == f"{true:.{decimals}f}".replace("-", "−"), path


def test_every_row_of_distances_is_that_of_its_run():
    rows = re.findall(r"^(\|.*\[json\]\(\.\./(results/[\w-]+\.json)\).*)$", RESULTS, re.MULTILINE)
    assert rows
    for row, path in rows:
        kinds = json.loads((ROOT / path).read_text())["test"]["chamfer"].values()
        assert all(f"{kind['model']:.4f}" in row for kind in kinds), path


def test_every_mean_over_seeds_is_that_of_its_runs():
    rows = [row for row in RESULTS.splitlines() if row.startswith("| ExNODE") and "**0." in row]
    assert len(rows) == 2
    for row in rows:
        paths = re.findall(r"\((?:\.\./)?(results/[\w-]+\.json)\)", row)
        found = [json.loads((ROOT / p).read_text())["test"]["accuracy"] for p in paths]
        assert f"{statistics.mean(found):.4f} ± {statistics.stdev(found):.4f}" in row


@pytest.mark.parametrize("run", sorted((ROOT / "pretrained").iterdir()), ids=lambda run: run.name)
def test_a_pretrained_model_gives_labels_or_sets_from_a_fresh_clone(run, tmp_path):
    assert f"pretrained/{run.name}" in README
    config, where = training.read_config(run), ["--load", str(run), "--out", str(tmp_path)]
    if "model" in config:
        dim, classes = (2, 10) if config["data"] == "mnist" else (3, 40)
        model = models.CLASSIFIERS[config["model"]](dim, classes)
        training.load_best(model, run)
        made = model.eval()(torch.rand(2, config["points"], dim))
        assert made.shape == (2, classes)
    elif "latent" in config:
        how = ["--sample", "2", "--times", "0,0.6", "--points", "9"]
        made = torch.from_numpy(train_temporal.main([*where, *how])["sets"])
        assert made.shape == (2, 2, 9, 2)
    else:
        made = train_flow.main([*where, "--sample", "2", "--points", "9"])["samples"]
        assert made.shape[:2] == (2, 9)
    assert made.isfinite().all()
    assert made.std() > 0.01
