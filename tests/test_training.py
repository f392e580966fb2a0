"""training.py with a small model of batch normalisation and dropout, and with real signals."""

import contextlib
import ctypes
import io
import json
import math
import os
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
from toys import (
    ONE,
    contents,
    equal,
    fit,
    lines,
    signal_at,
    toy,
    toy_args,
    toy_batches,
    toy_evaluate,
    toy_loss,
)

from support import training
from support.training import Interrupted, TrainingError, UsageError

ROOT = Path(__file__).parent.parent


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_alike(folder):
    """The runs in whole/ and parts/ have the same metrics and checkpoints."""
    assert lines(folder / "whole") == lines(folder / "parts")
    for name in ("last.pt", "best.pt"):
        assert equal(*(contents(folder / run / name) for run in ("whole", "parts")))


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
    check_alike(tmp_path)


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
    check_alike(tmp_path)


def killed_between_log_and_save(out, evaluation):
    """A process of its own that goes on with a run and dies right after that line of metrics."""
    if (child := os.fork()) == 0:
        with contextlib.redirect_stderr(io.StringIO()):
            run = toy(out, resume=True)
            log, left = run.log, [evaluation]

            def log_and_die(metrics):
                log(metrics)
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            run.log = log_and_die
            fit(run)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1, 2])
def test_a_run_killed_twice_between_metrics_and_checkpoint_ends_bit_for_bit(
    tmp_path, first, second
):
    fit(toy(tmp_path / "whole"))
    for evaluation in (first, second):
        assert killed_between_log_and_save(tmp_path / "parts", evaluation) == signal.SIGKILL
    fit(toy(tmp_path / "parts", resume=True))
    check_alike(tmp_path)
    size = (tmp_path / "parts" / "metrics.jsonl").stat().st_size
    assert training.read_checkpoint(tmp_path / "parts" / "last.pt")["logged"] == size


def test_a_directory_is_one_process_s_from_the_first_look_until_results_are_written(tmp_path):
    """B looks and is slow to load its data: A cannot train in between, nor B after A."""
    with training.directory(toy_args(tmp_path, seed=1), ONE, "score"):
        before = files_of(tmp_path)
        for how in ({"seed": 0}, {"seed": 1, "resume": True}):
            with pytest.raises(UsageError, match="another process trains there"):
                toy(tmp_path, **how)
        assert files_of(tmp_path) == before
    fit(toy(tmp_path, seed=0))  # nothing was trained by B
    before = files_of(tmp_path)
    with pytest.raises(UsageError, match="holds a run"):
        toy(tmp_path, seed=1)
    assert files_of(tmp_path) == before
    with training.directory(toy_args(tmp_path, seed=0, resume=True), ONE, "score"):
        training.write_json(tmp_path / "results.json", {"test": {"score": 1.0}})
        with pytest.raises(UsageError, match="another process"):
            toy(tmp_path, seed=0, resume=True)
    with training.directory(toy_args(tmp_path, seed=0, resume=True), ONE, "score") as results:
        assert results == {"test": {"score": 1.0}}


@pytest.mark.parametrize("runs", [1, 3])
def test_one_run_or_several_are_trained_once_each_in_their_own_directory(tmp_path, runs):
    trained = []

    def train(args, world):
        trained.append((args.seed, Path(args.out).name))
        results = {"test": {"score": 2.0 * args.seed}}
        training.write_json(Path(args.out) / "results.json", results)
        return results

    args = toy_args(tmp_path / "run", seed=4, runs=runs, batch_size=1)
    found = training.in_directory(args, train, "score")
    args.resume = True
    assert training.in_directory(args, train, "score") == found  # it is complete
    if runs == 1:
        assert (found, trained) == ({"test": {"score": 8.0}}, [(4, "run")])
    else:
        assert trained == [(4, "seed4"), (5, "seed5"), (6, "seed6")]
        assert (found["mean"], found["std"], found["score"]) == (10.0, 2.0, [8.0, 10.0, 12.0])


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
    before = files_of(tmp_path)
    with pytest.raises(UsageError, match="holds a run: add --resume"):
        toy(tmp_path)
    with pytest.raises(UsageError, match="other options: epochs 3 → 4, seed 3 → 5"):
        toy(tmp_path, resume=True, epochs=4, seed=5)
    assert files_of(tmp_path) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="not empty, and no run"):
        toy(tmp_path / "other")


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


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    run = toy(tmp_path, every=1)

    def spoil(metrics, log=run.log):  # after the evaluation, so that the next save meets it
        log(metrics)
        if run.step == 3:
            run.model[0].weight.data[0, 0] = math.nan

    run.log = spoil
    with pytest.raises(
        TrainingError, match=r"0\.weight is not finite after step 3; .*best\.pt"
    ) as e:
        fit(run)
    assert "\n" not in str(e.value)
    assert training.read_checkpoint(tmp_path / "last.pt")["step"] == 3  # before the evaluation
    assert all(v.isfinite().all() for v in contents(tmp_path / "last.pt")["model"].values())


def test_an_evaluation_that_is_not_finite_fails_and_names_a_checkpoint_that_is_good(tmp_path):
    def evaluate(model):
        return {"score": math.nan if run.step == 10 else 1.0 + run.step}

    run = toy(tmp_path)
    for _ in range(2):  # also when it goes on
        with pytest.raises(
            TrainingError, match=r"score nan in the evaluation after step 10.*best\.pt"
        ):
            run.fit(toy_loss, toy_batches, evaluate, best="score")
        assert training.read_checkpoint(tmp_path / "best.pt")["step"] == 5
        run = toy(tmp_path, resume=True)


def test_a_learning_rate_that_explodes_never_ends_well(tmp_path):
    run = toy(tmp_path, lr=1e30, every=1, ema=0.0)
    with pytest.raises(TrainingError, match=r"the last good checkpoint is .*/(last|best)\.pt"):
        fit(run)
    good = training.read_checkpoint(tmp_path / "best.pt")["model"]
    run.model.load_state_dict(good)
    assert math.isfinite(toy_evaluate(run.model.eval())["score"])


# ------------------------------------------------------------------------------------- evaluations
def test_a_run_whose_best_evaluation_is_the_first_says_so(tmp_path, capsys):
    run = toy(tmp_path / "a")
    run.fit(toy_loss, toy_batches, lambda model: {"score": -float(run.step)}, best="score")
    assert "no evaluation was better than that of step 0" in capsys.readouterr().err
    assert run.finish({})["best_step"] == 0
    run = fit(toy(tmp_path / "b"))
    assert "step 0" not in capsys.readouterr().err
    best = max(lines(tmp_path / "b"), key=lambda line: line["score"])
    assert run.finish({})["best_step"] == best["step"] > 0


def test_a_run_may_keep_its_last_weights_whatever_their_evaluation_is(tmp_path):
    run = toy(tmp_path, ema=0.0)
    worse = lambda model: {"score": -float(run.step)}  # noqa: E731
    run.fit(toy_loss, toy_batches, worse, best="score", keep="last")
    results = run.finish({})
    assert results["best_step"] == results["steps"] == -results["best"] > 0
    last = training.read_checkpoint(tmp_path / "last.pt")["model"]
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, last[name]), name


def test_a_run_shorter_than_every_is_evaluated_about_ten_times(tmp_path):
    run = fit(toy(tmp_path, epochs=8, every=1000))
    assert [line["step"] for line in lines(tmp_path)] == list(range(0, 41, 4))
    assert run.interval == 4


def test_a_long_run_says_after_its_first_step_how_long_it_takes(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(model, batch):
        now[0] += 90.0
        return toy_loss(model, batch)

    run = toy(tmp_path)
    run.fit(slow, toy_batches, toy_evaluate, best="score", advice="take a faster way")
    err = capsys.readouterr().err
    assert "a step takes 90 s, so 15 steps take about 22 min; take a faster way\n" in err
    fit(toy(tmp_path / "quick"))
    assert "a step takes" not in capsys.readouterr().err


def test_statistics_are_renewed_as_means_over_the_batches(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    batches = [torch.randn(7, 3, dtype=torch.float64) for _ in range(5)]
    training.renew_statistics(model.eval(), batches, lambda model, x: model(x))
    h = torch.stack([model[0](x) for x in batches])
    torch.testing.assert_close(model[1].running_mean, h.mean((0, 1)))
    torch.testing.assert_close(model[1].running_var, h.var(1).mean(0))
    assert not model.training
    assert model[1].momentum == 0.1


# ----------------------------------------------------------------------------------------- signals
def test_a_first_signal_says_that_the_run_stops_after_this_step(tmp_path, capfd):
    run = toy(tmp_path)
    with pytest.raises(Interrupted):
        fit(run, signal_at(run, 2))
    err = capfd.readouterr().err
    assert "stopping after this step; again to stop now" in err


def test_a_signal_in_an_evaluation_stops_after_it(tmp_path, capfd):
    run = toy(tmp_path)

    def evaluate(model):
        os.kill(os.getpid(), signal.SIGTERM)
        return toy_evaluate(model)

    with pytest.raises(Interrupted, match="evaluation after step 0, saved"):
        run.fit(toy_loss, toy_batches, evaluate, best="score")
    assert "stopping after this evaluation; again to stop now" in capfd.readouterr().err
    assert training.read_checkpoint(tmp_path / "last.pt")["evaluated"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_outside_of_the_loop_is_one_line_and_exit_code_130(tmp_path, capsys, number):
    def load():
        with training.directory(toy_args(tmp_path), ONE, "score"):
            os.kill(os.getpid(), number)
            time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    assert training.command(load) == 130
    err = capsys.readouterr().err
    assert err.endswith("interrupted; the same command with --resume goes on from the start\n")
    assert err.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) == before
    fit(toy(tmp_path, resume=True))


def test_a_second_signal_stops_at_once_and_the_run_goes_on_from_its_checkpoint(tmp_path, capsys):
    fit(toy(tmp_path / "whole"))

    def train():
        with training.directory(toy_args(tmp_path / "parts"), ONE, "score"):
            pass
        run = toy(tmp_path / "parts", resume=True)

        def loss(model, batch):
            for _ in range(2 if run.step == 7 else 0):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            return toy_loss(model, batch)

        fit(run, loss)

    assert training.command(train) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert training.read_checkpoint(tmp_path / "parts" / "last.pt")["step"] == 5
    fit(toy(tmp_path / "parts", resume=True))
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


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


def test_minutes_fix_a_plan_that_fits_and_that_a_resumed_run_keeps(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(model, batch):
        now[0] += 0.02
        return toy_loss(model, batch)

    run = fit(toy(tmp_path / "a", minutes=2 / 60), slow)
    assert 1.9 < run.clock < 2.1
    assert run.step == run.total
    assert run.plans == len(training.PLANS)
    assert run.progress() > 0.9
    assert lines(tmp_path / "a")[-1]["lr"] < 3e-4

    now[0] = 0.0
    run = toy(tmp_path / "b", minutes=2 / 60)
    with pytest.raises(Interrupted):
        fit(run, lambda *a: (slow(*a), signal_at(run, 60)(*a))[1])
    again = toy(tmp_path / "b", minutes=2 / 60, resume=True)
    assert (again.plan, again.plans) == (run.plan, run.plans)
    assert again.step == 61
    assert fit(again, slow).step == again.total


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


def test_slow_evaluations_leave_the_minutes_to_training(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(model, batch):
        now[0] += 0.1
        return toy_loss(model, batch)

    def evaluate(model):
        now[0] += 10  # ten of them would take more than the minute
        return toy_evaluate(model)

    run = fit(toy(tmp_path, minutes=1, every=10**6), slow, evaluate)
    assert 45 < run.clock < 60
    assert run.step > 250
    assert len(lines(tmp_path)) < 5


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
    assert int(faults) < 5 * 2**14
