"""The README's examples run as they stand there."""

import importlib
import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
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
    names = re.findall(r"`(solvers|sets|exnode|data)\.(\w+)", table)
    assert len(names) > 15
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
