"""The files of a run: written whole, and read with suspicion."""

import errno
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import contents, equal, fit, lines, toy, toy_args

from support import files, training
from support.training import UsageError

ROOT = Path(__file__).parent.parent


def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path):
    run, steps = toy(tmp_path), []
    run.save()
    for delay in (0.01, 0.05, 0.11, 0.2):
        if (child := os.fork()) == 0:
            while True:
                run.step += 1
                run.save()
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps.append(training.read_checkpoint(tmp_path / "last.pt")["step"])
        run.step = steps[-1]
    assert steps == sorted(steps)
    assert steps[-1] > 0


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


DAMAGES = ["truncated", "empty", "text", "foreign", "pickle", "partial", "version"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_one_is_refused_in_one_line(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    fit(toy(tmp_path / "run"))
    path = tmp_path / "run" / "last.pt"
    whole = path.read_bytes()
    broken = {"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"hello" * 99}
    if damage in broken:
        path.write_bytes(broken[damage])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(Trap(), protocol=2))  # as torch.save does
    else:
        format = {"partial": "exnode checkpoint 1", "version": "exnode checkpoint 2"}
        torch.save([1, 2] if damage == "foreign" else {"format": format[damage]}, path)
    with pytest.raises(UsageError, match=r"last\.pt: ") as info:
        toy(tmp_path / "run", resume=True)
    assert "\n" not in str(info.value)
    assert ("'exnode checkpoint 2'" in str(info.value)) == (damage == "version")
    assert not Path("trapped").exists()


def forge(out, **changes):
    """last.pt with other contents."""
    state = training.read_checkpoint(out / "last.pt")
    torch.save(state | changes, out / "last.pt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    fit(toy(out))
    return out


def copy_of(finished, out):
    return Path(shutil.copytree(finished, out, dirs_exist_ok=True))


ODD = [None, True, -5, 10**9, 1.5, math.nan, "foo", b"foo", [], {}, [1, 2], {"a": 1}, torch.ones(2)]
LAST = ["step", "evaluated", "best", "losses", "plan", "evaluating", "logged", "clock", "model"]
LAST += ["average", "optimizer", "random", "commits"]


@given(name=st.sampled_from(LAST), value=st.sampled_from(ODD))
def test_a_last_pt_with_odd_contents_is_one_line_or_harmless(
    finished, tmp_path_factory, name, value
):
    out = copy_of(finished, tmp_path_factory.mktemp("odd"))
    forge(out, **{name: value})
    try:
        fit(toy(out, resume=True))
    except UsageError as e:
        assert "\n" not in str(e)  # noqa: PT017
    else:
        assert name in ("best", "losses", "evaluating", "clock", "logged", "commits")


@pytest.mark.parametrize("step", [-5, 10**9, True, 1.0, "7"])
def test_a_step_that_no_run_of_these_options_has_is_refused(finished, tmp_path, step):
    forge(copy_of(finished, tmp_path), step=step)
    with pytest.raises(UsageError, match=r"last\.pt: not a last\.pt of this run"):
        toy(tmp_path, resume=True)


def test_an_optimiser_s_state_that_is_not_its_own_is_refused(finished, tmp_path):
    for change in ("shape", "name", "nan", "setting"):
        copy_of(finished, tmp_path)
        optimizer = training.read_checkpoint(tmp_path / "last.pt")["optimizer"]
        first = optimizer["state"][0]
        if change == "shape":
            first["exp_avg"] = torch.zeros(7)
        if change == "name":
            first["average"] = first.pop("exp_avg")
        if change == "nan":
            first["exp_avg"] *= math.nan
        if change == "setting":
            optimizer["param_groups"][0]["eps"] = "foo"
        forge(tmp_path, optimizer=optimizer)
        with pytest.raises(UsageError, match=r"not a last\.pt of this run"):
            toy(tmp_path, resume=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["best.pt", "last.pt"])
def test_weights_that_are_not_finite_are_not_loaded(finished, tmp_path, name, value):
    copy_of(finished, tmp_path)
    state = training.read_checkpoint(tmp_path / name)
    for weights in (state["model"], state.get("average", {})):
        if "0.weight" in weights:
            weights["0.weight"][0, 0] = value
    torch.save(state, tmp_path / name)
    model = toy(tmp_path / "new").model
    with pytest.raises(UsageError, match=r"not finite \(0\.weight\)"):
        (training.load_best if name == "best.pt" else training.load_last)(model, tmp_path)


@pytest.mark.parametrize("weights", [[1, 2], None, {"0.weight": "foo"}, {1: torch.ones(2)}])
def test_what_are_no_weights_is_one_line(tmp_path, weights):
    torch.save({"format": "exnode checkpoint 1", "model": weights}, tmp_path / "best.pt")
    with pytest.raises(UsageError, match=r"best\.pt: of another model") as e:
        training.load_best(toy(tmp_path / "new").model, tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["best.pt", "last.pt", "config.json", "metrics.jsonl"])
def test_a_pipe_in_place_of_a_file_does_not_hang(finished, tmp_path, name):
    copy_of(finished, tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    read = {"best.pt": lambda out: training.load_best(None, out)}
    with pytest.raises(UsageError, match=rf"{name}: (not a file|no such checkpoint)"):
        read.get(name, lambda out: toy(out, resume=True))(tmp_path)


FOREIGN = {
    "results.json": [b"[1, 2]", b'{"test": 7}', b'{"test": {}}', b"\xff\xfe", b"", b"null"],
    "metrics.jsonl": [b"\xff\x00binary", b"[1]\n", b"{half", b"[" * 100_000],
    "config.json": [b"[" * 100_000, b"[]", b"\xff", b'"text"'],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_one_line(finished, tmp_path, name):
    for foreign in FOREIGN[name]:
        copy_of(finished, tmp_path)
        (tmp_path / name).write_bytes(foreign)
        with pytest.raises(UsageError, match=name) as e:
            toy(tmp_path, resume=True)
        assert "\n" not in str(e.value)


def test_complete_runs_are_returned_as_they_are(tmp_path, capsys):
    fit(toy(tmp_path)).finish({"score": 0.5})
    with training.directory(
        toy_args(tmp_path, resume=True), training.World(None), "score"
    ) as found:
        assert found["test"] == {"score": 0.5}
    assert "is complete: score 0.5000" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- full disks
def test_a_file_that_becomes_too_large_leaves_the_one_before_and_no_part(tmp_path):
    """The system itself refuses, in the middle of writing."""
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    files.write_whole(path, lambda f: f.write(b"old"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError, match="file") as e:
            files.write_whole(path, lambda f: f.write(bytes(10**6)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert e.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_on_a_full_disk_is_one_line_and_goes_on_once_there_is_room(tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "none", disk], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"mounting a small disk: {made.stderr.decode().strip()}")
    try:
        fit(toy(tmp_path / "whole"))
        run = toy(disk / "run")
        (disk / "other").write_bytes(bytes(70_000))
        capsys.readouterr()
        assert training.command(lambda: fit(run)) == 1
        err = capsys.readouterr().err
        assert re.search(r"No space left on device: '.*/run/\w+\.\w+'\n$", err)
        assert "Traceback" not in err
        assert not list(disk.glob("run/*.part"))
        (disk / "other").unlink()
        fit(toy(disk / "run", resume=True))
        for name in ("last.pt", "best.pt"):
            assert equal(contents(tmp_path / "whole" / name), contents(disk / "run" / name))
        assert lines(tmp_path / "whole") == lines(disk / "run")
    finally:
        subprocess.run(["umount", disk], check=True)


# --------------------------------------------------------------------------------------- kept files
def test_no_kept_file_names_a_folder_of_the_machine_that_made_it():
    kept = [*ROOT.glob("results/*.json"), *ROOT.glob("pretrained/*/*")]
    assert len(kept) > 20
    for path in kept:
        if path.suffix == ".pt":
            text = json.dumps(training.read_checkpoint(path).get("config"))
        else:
            text = path.read_text()
        found = re.findall(r'"(?:--?[\w-]+=)?(/[^"]*|[A-Za-z]:\\[^"]*)"', text)
        assert not found, (path, found)
