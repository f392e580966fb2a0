"""What the benchmarks share: Markdown tables, and a section each in benchmarks/RESULTS.md."""

import datetime
import os
import platform
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"


def machine():
    """One line that says where and when the figures were measured."""
    import torch

    return (
        f"Measured {datetime.date.today()} on {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads."
    )


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_section(name, markdown):
    """Replace the text between <!-- name --> and <!-- /name --> in RESULTS.md, or append it."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Benchmarks\n"
    section = f"<!-- {name} -->\n{markdown.strip()}\n<!-- /{name} -->\n"
    pattern = re.compile(rf"<!-- {name} -->.*<!-- /{name} -->\n", re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}"
    RESULTS.write_text(text)
