"""The README's examples run as they stand there, its numbers are those of runs, its models load."""

import importlib
import json
import re
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


def test_every_result_in_a_table_is_that_of_a_run():
    pattern = r"^(\|.*\]\((?:\.\./)?(results/[\w./-]+\.json)\).*)$"
    rows = re.findall(pattern, RESULTS, re.MULTILINE)
    assert rows
    for row, path in rows:
        results = json.loads((ROOT / path).read_text())
        if "mean" in results:
            numbers = [f"{results['mean']:.4f}", f"{results['std']:.4f}"]
        elif "chamfer" in results["test"]:  # a column per kind of time
            numbers = [f"{v['model']:.4f}" for v in results["test"]["chamfer"].values()]
        elif "accuracy" in results["test"]:
            numbers = [f"{results['test']['accuracy']:.4f}"]
        else:
            numbers = [f"{results['test'][name]:.3f}" for name in ("ppll", "standard_error")]
        for number in numbers:
            assert number.replace("-", "−") in row


def test_every_number_of_the_summary_is_that_of_its_run():
    links = re.findall(r"\[(−?[\d.]+)\]\((results/[\w./-]+\.json)\)", README)
    assert len(links) > 6
    for number, path in links:
        test = json.loads((ROOT / path).read_text())["test"]
        between = test.get("chamfer", {}).get("interpolation", {}).get("model")
        value = test.get("accuracy") or test.get("ppll") or between
        decimals = len(number.partition(".")[2])
        assert f"{value:.{decimals}f}".replace("-", "−") == number, path


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
