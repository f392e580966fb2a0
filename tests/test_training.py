"""training.py with a small model of batch normalisation and dropout, and with real signals."""

import argparse
import ctypes
import json
import math
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from support import training
from support.training import Interrupted, TrainingError, UsageError, World

STEPS = 5  # per epoch
ROOT = Path(__file__).parent.parent
ONE = World(torch.device("cpu"))


def toy_batches(epoch, start):
    for step in range(start, STEPS):
        g = torch.Generator().manual_seed(1000 * epoch + step)
        x = torch.randn(8, 3, generator=g)
        yield x, x.sum(-1, keepdim=True)


def toy_loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def toy_evaluate(model):
    x, y = next(toy_batches(999, 0))
    return {"score": -(model(x) - y).square().mean().item()}


def toy_args(out, resume=False, **options):
    options = {"seed": 3, "epochs": 3, "minutes": None, **options}
    return argparse.Namespace(out=str(out), resume=resume, cuda=False, **options)


def toy(out, resume=False, ema=0.9, lr=0.01, every=None, **options):
    args = toy_args(out, resume, **options)
    with training.directory(args, ONE, "score") as results:
        assert results is None
        training.seed(args.seed)
        model = nn.Sequential(
            nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        fall = training.one_cycle
        return training.Run(args, ONE, model, optimizer, fall, STEPS, ema=ema, every=every)


def fit(run, loss=toy_loss):
    run.fit(loss, toy_batches, toy_evaluate, best="score")
    return run


def signal_at(run, step, number=signal.SIGTERM):
    """A loss that sends this process a signal in a given step."""

    def loss(model, batch):
        if run.step == step:
            os.kill(os.getpid(), number)
        return toy_loss(model, batch)

    return loss


def lines(out):
    parsed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in parsed]


def equal(a, b):
    """Equal tensor for tensor, number for number."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def contents(path):
    """A checkpoint but for the times in it."""
    state, times = training.read_checkpoint(path), ("clock", "evaluating", "logged")
    return {k: v for k, v in state.items() if k not in times}


# ---------------------------------------------------------------------------------------- resuming
@pytest.mark.parametrize("step", [0, 2, 4, 5, 7, 14])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_ends_bit_for_bit_like_one_that_was_not(tmp_path, step, number):
    fit(toy(tmp_path / "whole"))
    run = toy(tmp_path / "parts")
    with pytest.raises(Interrupted, match=rf"step {step + 1}, saved in .*last.pt"):
        fit(run, signal_at(run, step, number))
    torch.rand(7)  # whatever happens in between
    fit(toy(tmp_path / "parts", resume=True))
    for name in ("last.pt", "best.pt"):
        assert equal(contents(tmp_path / "whole" / name), contents(tmp_path / "parts" / name))
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


def test_a_killed_run_repeats_what_it_had_done_since_its_last_checkpoint(tmp_path):
    fit(toy(tmp_path / "whole"))
    run = toy(tmp_path / "parts")

    def loss(model, batch):
        if run.step == 7:
            raise KeyError("killed")
        return toy_loss(model, batch)

    with pytest.raises(KeyError):
        fit(run, loss)
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as f:
        f.write('{"step": 10, "half a li')
    fit(toy(tmp_path / "parts", resume=True))
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert equal(contents(tmp_path / "whole/last.pt"), contents(tmp_path / "parts/last.pt"))


def test_results_name_every_version_of_the_code_that_a_run_had(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "commit", lambda: "first")
    run = toy(tmp_path)
    with pytest.raises(Interrupted):
        fit(run, signal_at(run, 2))
    monkeypatch.setattr(training, "commit", lambda: "second")
    run = fit(toy(tmp_path, resume=True))
    assert run.finish({})["commit"] == "first, second"


def test_the_loss_falls_and_the_best_weights_are_loaded(tmp_path):
    run = fit(toy(tmp_path, epochs=30, ema=0.0))
    table = lines(tmp_path)
    assert sum(line["loss"] for line in table[-10:]) / 10 < 0.5 * table[1]["loss"]
    assert toy_evaluate(run.model)["score"] == run.best == max(line["score"] for line in table)
    assert table[-1]["lr"] == pytest.approx(0.01 * training.one_cycle(149 / 150))
    results = run.finish({"score": 1.0})
    assert results == json.loads((tmp_path / "results.json").read_text())
    wanted = {"test", "config", "seed", "seconds", "commit", "versions", "command", "steps"}
    assert wanted <= results.keys()
    assert results["steps"] == 150


def test_the_average_follows_the_weights_at_once_and_then_ever_more_slowly(tmp_path):
    run = toy(tmp_path, ema=0.8)
    wanted, update = run.average["0.weight"].clone(), run.update

    def watched(*args):
        told = update(*args)
        decay = min(0.8, (1 + run.step) / (10 + run.step))
        wanted.copy_(decay * wanted + (1 - decay) * run.model[0].weight.detach())
        return told

    run.update = watched
    fit(run)
    torch.testing.assert_close(run.average["0.weight"], wanted)
    last = contents(tmp_path / "last.pt")["model"]["0.weight"]
    assert (last - wanted).abs().max() > 1e-4


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    with training.directory(toy_args(tmp_path), ONE, "score"):
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(UsageError, match="another process trains there"):
            toy(tmp_path, resume=True)
        assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    fit(toy(tmp_path, resume=True))


def test_a_run_from_before_an_option_goes_on_where_that_is_off(tmp_path):
    fit(toy(tmp_path))
    toy(tmp_path, resume=True, new=0.0)
    with pytest.raises(UsageError, match=r"other options: new None → 0\.5"):
        toy(tmp_path, resume=True, new=0.5)
    with pytest.raises(UsageError, match="other options: minutes None → False"):
        toy(tmp_path, resume=True, minutes=False)  # no is not the same as unsaid


def test_weights_of_other_shapes_are_told_by_name_before_anything_else_is_restored(tmp_path):
    fit(toy(tmp_path))
    state = contents(tmp_path / "last.pt")
    for part in ("model", "average"):
        state[part]["0.weight"] = torch.zeros(2, 3)
    torch.save(state, tmp_path / "last.pt")
    with pytest.raises(UsageError, match=r"of another model .*0\.weight"):
        toy(tmp_path, resume=True)


def test_a_second_run_or_one_with_other_options_leaves_the_directory_as_it_was(tmp_path):
    fit(toy(tmp_path))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="holds a run: add --resume"):
        toy(tmp_path)
    with pytest.raises(UsageError, match="other options: epochs 3 → 4, seed 3 → 5"):
        toy(tmp_path, resume=True, epochs=4, seed=5)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="not empty, and no run"):
        toy(tmp_path / "other")


# ------------------------------------------------------------------------------------- checkpoints
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
    assert ("of version 2; this program reads" in str(info.value)) == (damage == "version")
    assert not Path("trapped").exists()


# ---------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_before_it_touches_the_weights(tmp_path, bad, where):
    run = toy(tmp_path)

    def loss(model, batch):
        value = toy_loss(model, batch)
        if run.step == 8 and where == "loss":
            return value * bad
        if run.step == 8:
            model[0].weight.register_hook(lambda g: g * bad)
        return value

    with pytest.raises(TrainingError, match=r"at step 9 \(epoch 2\), learning rate 0.00\d+") as e:
        fit(run, loss)
    assert str(tmp_path / "last.pt") in str(e.value)
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert training.read_checkpoint(tmp_path / "last.pt")["step"] == 5


def test_exit_codes_and_lines(capsys):
    def fail(error):
        def main():
            raise error

        code = training.command(main, usage=(ZeroDivisionError,))
        return code, capsys.readouterr().err.count("\n")

    assert training.command(lambda: {}) == 0
    assert fail(UsageError("no")) == fail(ZeroDivisionError("no")) == (2, 1)
    assert fail(TrainingError("nan")) == (1, 1)
    assert fail(Interrupted("saved")) == fail(KeyboardInterrupt()) == (130, 1)


# --------------------------------------------------------------------------------------- schedules
def test_schedules_fit_any_budget():
    halve = training.halve(6)
    assert [halve(epoch / 120) for epoch in (0, 19.99, 20, 40, 60, 80, 100, 120)] == [
        1, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32,
    ]  # fmt: skip
    one_cycle = training.one_cycle
    assert [one_cycle(p) for p in (0, 0.075, 0.15, 0.575, 1)] == pytest.approx(
        [0.04, 0.52, 1, 0.5, 0]
    )


def test_minutes_fix_a_plan_that_fits_and_that_a_resumed_run_keeps(tmp_path):
    def slow(model, batch):
        time.sleep(0.005)
        return toy_loss(model, batch)

    run = toy(tmp_path / "a", minutes=2 / 60)
    fit(run, slow)
    assert 1 < run.clock < 10  # two seconds, on a machine that others load
    assert run.step == run.total
    assert run.plans == len(training.PLANS)
    assert run.progress() > 0.9
    assert lines(tmp_path / "a")[-1]["lr"] < 3e-4

    run = toy(tmp_path / "b", minutes=2 / 60)
    with pytest.raises(Interrupted):
        fit(run, lambda *a: (time.sleep(0.005), signal_at(run, 60)(*a))[1])
    again = toy(tmp_path / "b", minutes=2 / 60, resume=True)
    assert (again.plan, again.plans) == (run.plan, run.plans)
    assert again.step == 61
    assert fit(again).step == again.total


def test_a_machine_that_slows_down_does_not_stretch_the_minutes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slower(model, batch):
        now[0] += 0.1 if run.step < 200 else 0.3
        return toy_loss(model, batch)

    run = toy(tmp_path, minutes=1)
    fit(run, slower)
    assert 55 < run.clock < 62
    assert 300 < run.step < 350  # 200 in 20 seconds, the rest in 40
    assert run.step == run.total
    assert run.progress() == 1
    assert lines(tmp_path)[-1]["lr"] < 2e-5  # of 0.01, in the last of few steps


# --------------------------------------------------------------------------------------- processes
SCRIPT = """
import argparse, sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
from support import training
from sets import PointNorm

class Model(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)
        self.norm = PointNorm(8) if norm else None
    def forward(self, x, mask):
        h = self.first(x)
        h = torch.tanh(self.norm(h, mask) if self.norm else h)
        return (self.last(h) * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True)

def main():
    for norm in (False, True):
        args = argparse.Namespace(out=f"{{sys.argv[1]}}/{{norm}}", resume=False, cuda=False,
                                  seed=0, epochs=2, minutes=None, batch_size=8)
        world = training.connect(args)
        training.make_folder(args.out)
        training.seed(0)
        model = Model(norm).double()
        def batches(epoch, start):
            for step in range(start, 4):
                g = torch.Generator().manual_seed(10 * epoch + step)
                x = torch.randn(8, 5, 3, generator=g, dtype=torch.float64)
                mask = torch.rand(8, 5, generator=g) < 0.7
                mask[:, 0] = True
                yield x[world.rank :: world.size], mask[world.rank :: world.size]
        def loss(model, batch):
            return (model(*batch) - batch[0][:, 0].sum(-1, keepdim=True)).square().mean()
        def evaluate(model):
            total = world.sum(sum(loss(model, b) for b in batches(9, 0)))
            return {{"score": -total.item() / world.size}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = training.Run(args, world, model, optimizer, training.one_cycle, 4)
        run.fit(loss, batches, evaluate, best="score")
        run.finish({{}})
sys.exit(training.command(main))
"""


def launch(processes, *command):
    """Start so many processes as torchrun would, and wait for them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    started = []
    for rank in map(str, range(processes)):
        env = {**os.environ, **address, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
        env |= {"RANK": rank, "LOCAL_RANK": rank}
        started.append(subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=env))
    return [process.wait(timeout=120) for process in started]


def test_two_processes_compute_what_one_does_with_the_same_batch(tmp_path, monkeypatch):
    script = tmp_path / "toy.py"
    script.write_text(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")))
    assert launch(2, script, tmp_path / "2") == [0, 0]
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "1")])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script))
    for norm in ("False", "True"):
        one, two = (training.read_checkpoint(tmp_path / n / norm / "last.pt") for n in "12")
        for name, value in one["model"].items():
            torch.testing.assert_close(two["model"][name], value, rtol=1e-9, atol=1e-12)
        a, b = (lines(tmp_path / n / norm)[-1] for n in "12")
        assert a == pytest.approx(b, rel=1e-9)
        assert len(two["random"]) == 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_stays_with_the_process():
    code = (
        "import resource, torch\nfrom support import processes\n"
        "processes.keep_memory()\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "torch.ones(2**24), torch.ones(2**24)\n"  # 64 MB, or 16,384 pages each
        "before = faults()\n"
        "for _ in range(10): torch.ones(2**24)\n"
        "print(faults() - before)"
    )
    faults = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)
    assert int(faults) < 3 * 2**14
