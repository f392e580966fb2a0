"""What the tests of the three scripts share: how to run them, and what they leave behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import data
from support import options, training

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def start(name, *words, launcher=(), **settings):
    """A process of its own."""
    command = [sys.executable, *launcher, str(ROOT / name), *map(str, words)]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=ENV, **pipes, **settings)


def stop_early(process, out, seconds):
    """SIGTERM so many seconds after the first evaluation; what the process said."""
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    return err


def call(module, capsys, *words):
    """Exit code and what was written to stderr, without a process of its own."""
    capsys.readouterr()
    try:
        code = training.command(lambda: module.main(list(map(str, words))), (data.DataError,))
    except SystemExit as e:
        code = e.code
    return code, capsys.readouterr().err


def lines(out):
    """metrics.jsonl, but for the times."""
    parsed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in parsed]


def check_help(module, capsys):
    """--help has every option in a group, with a sentence that any terminal can print."""
    with pytest.raises(SystemExit) as e:
        module.parse(["--help"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    text.encode("cp1252")
    _, *groups = re.split(r"\n(?=\S[^\n]*:\n)", text)
    titles = ["options", *options.GROUPS]
    assert [group.partition(":")[0] for group in groups] == titles
    listed = [
        word for group in groups for word in re.findall(r"\n  (-[^\n]*)((?:\n {4}[^\n]*)*)", group)
    ]
    for first, rest in listed[1:]:
        words = re.split(r"  +|\n +", first + rest)
        sentence = re.sub(r" \(default: [^)]+\)$", "", " ".join(words[1:]))
        assert re.fullmatch(r"[A-Z].*\.", sentence), (words[0], sentence)
        assert "None" not in sentence
    assert len(listed) == len(vars(module.parse([]))) + 1  # and --help itself
