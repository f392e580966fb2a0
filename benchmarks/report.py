"""What the benchmarks share: timing, Markdown tables, and a section each in RESULTS.md."""

import datetime
import os
import platform
import re
import statistics
import time
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


def medians(calls, repeats, warm_up=True):
    """The median seconds of each call; every round runs all of them, in alternating order."""
    times = {name: [] for name in calls}
    for call in calls.values() if warm_up else ():
        call()
    for i in range(repeats):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


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
