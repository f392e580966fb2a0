"""Attacks on the three scripts, by the thousand: kills, mutated files, random command lines.

    python tests/attack.py --kills 200 --files 10000 --commands 1000 --seed 0

kills     short runs of each script are killed at random moments and, every second time, in the
          middle of a write, and go on by --resume until they end; they must end as a run that
          nobody killed: nothing lost, nothing of another run adopted.
files     files of runs, data and a person's own series with changed bytes or values: each reader
          returns something or raises its own error, of one line.
commands  random options: one line and exit code 2, or a run that begins.

Reports counts, and up to ten findings; the exit code is 1 if there were any. A small version runs
among the tests (test_attack.py).
"""
# ruff: noqa: E402

import argparse
import collections
import contextlib
import copy
import gzip
import importlib.util
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

import numpy as np
import torch

import data
import train_cls
import train_flow
import train_temporal
from support import checkpoints, files, meshes, mnist, modelnet, options, series_runs, training

SCRIPTS = {"cls": train_cls, "flow": train_flow, "temporal": train_temporal}
SHORT = {  # a few seconds each, with several evaluations
    "cls": "--model deepsets --points 6 --batch-size 180 --epochs 1 --every 2"
    " --category chair,vase",
    "flow": "--points 4 --blocks 1 --hidden 8 --heads 2 --objective matching --batch-size 540"
    " --epochs 1 --every 3 --test-sets 4 --ema 0.8 --tolerance 1e-2",
    "temporal": "--points 4 --times 0,1 --category 1 --hidden 8 --latent 2 --objective matching"
    " --batch-size 128 --epochs 1 --every 3 --valid-series 4 --test-series 4",
}
HANG = 60  # seconds that nothing here may take


class Hang(BaseException):
    """Something took longer than HANG seconds."""


@contextlib.contextmanager
def limited(seconds=HANG):
    def stop(number, frame):
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Tally:
    """Counts of what happened, and the findings."""

    def __init__(self):
        self.counts, self.findings = collections.Counter(), []

    def found(self, kind, what):
        self.counts[kind] += 1
        self.findings.append(f"{kind}: {what}")

    def judge(self, what, call):
        """Count how call() ends: fine, refused in one line, or a finding."""
        try:
            with limited(), contextlib.redirect_stderr(io.StringIO()) as err:
                code = call()
        except Hang:
            return self.found("hang", what)
        except SystemExit as e:
            code = e.code
        except (options.UsageError, data.DataError) as e:
            err, code = io.StringIO(f"{e}\n"), 2
        except BaseException:
            return self.found("traceback", f"{what}\n{traceback.format_exc()}")
        said = err.getvalue()
        if "Traceback" in said:
            return self.found("traceback", f"{what}\n{said}")
        if code == 2 and said.count("\n") != 1:
            return self.found("not one line", f"{what}\n{said}")
        self.counts["refused" if code == 2 else "accepted"] += 1


# ------------------------------------------------------------------------------------------- kills
def few(load, sets=1080):
    def load_few(args):
        return data.Splits(*(split.some(sets) for split in load(args)))

    return load_few


@contextlib.contextmanager
def small_data():
    """Fewer sets, so that a run takes seconds."""
    names = {train_cls: "load_sets", train_flow: "load_sets", train_temporal: "load_series"}
    before = {module: getattr(module, name) for module, name in names.items()}
    for module, name in names.items():
        setattr(module, name, few(before[module]))
    try:
        yield
    finally:
        for module, name in names.items():
            setattr(module, name, before[module])


def aim(rng):
    """Make this process kill itself in the middle of one of its next writes."""
    left = rng.randrange(12)

    def shot(call):
        def shoot(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if left == -1:  # right after it
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return shoot

    files.os.replace, files.os.fsync = shot(os.replace), shot(os.fsync)
    training.Run.log = shot(training.Run.log)


def attempt(module, words, rng, aimed, delay):
    """A forked process that runs the script; its exit status, negative if it was killed."""
    if (child := os.fork()) == 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)
        if aimed:
            aim(rng)
        code = 99
        with contextlib.suppress(BaseException):
            code = training.command(lambda: module.main(words), (data.DataError,))
        os._exit(code)
    end = time.monotonic() + (HANG if aimed else delay)
    while time.monotonic() < end:
        if (status := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(status[1])
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None if aimed else -signal.SIGKILL


def state_of(out):
    """All that a run leaves, but for times, and folders in it."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    test = json.loads((out / "results.json").read_text())["test"]
    test.get("samples", {}).pop("seconds_per_sample", None)
    weights = {}
    for name in ("last.pt", "best.pt"):
        state = training.read_checkpoint(out / name)
        weights |= {f"{name} {k}": v.tolist() for k, v in state["model"].items()}
    return {"metrics.jsonl": lines, "test": test, **weights}


def kills(count, rng, tally, folder):
    with small_data():
        whole = {}
        for name, module in SCRIPTS.items():
            out, begun = folder / f"{name}-whole", time.monotonic()
            words = [*SHORT[name].split(), "--out", str(out)]
            assert attempt(module, words, rng, False, 10 * HANG) == 0, f"{words} does not run"
            whole[name] = state_of(out), time.monotonic() - begun
        number = 0
        while tally.counts["kills"] < count:
            name = rng.choice(list(SCRIPTS))
            out, number = folder / f"{name}-{number}", number + 1
            finish(name, out, whole[name], rng, tally, count)
            shutil.rmtree(out)


def finish(name, out, whole, rng, tally, count):
    """One run, killed again and again; then compared with the whole one."""
    state, seconds = whole
    words, first = [*SHORT[name].split(), "--resume", "--out", str(out)], True
    for tries in range(100):
        more = tally.counts["kills"] < count and tries < 15  # then it may end
        aimed = rng.random() < 0.5 and more
        delay = rng.uniform(0, seconds) if more else 10 * HANG
        typed = words if first or rng.random() < 0.5 else ["--resume", "--out", str(out)]
        code = attempt(SCRIPTS[name], typed, rng, aimed, delay)
        rng.random()  # a forked process has drawn from a copy of this stream
        first = not (out / "config.json").exists()
        if code == -signal.SIGKILL:
            tally.counts["kills"] += 1
            tally.counts["aimed kills"] += aimed
        elif code == 0:
            break
        else:
            return tally.found("hang" if code is None else "lost run", f"{name}: exit code {code}")
    tally.counts["runs that ended"] += 1
    if differ := [k for k, v in state_of(out).items() if json.dumps(v) != json.dumps(state[k])]:
        tally.found(
            "lost or adopted state", f"{name} in {out}: not as the run that nobody killed: {differ}"
        )


# ------------------------------------------------------------------------------------------- files
ODD = [None, True, -5, 10**9, 10**30, 1.5, math.nan, "foo", "", [], {}, [1, 2], {"a": 1}]


def changed_bytes(content, rng):
    """The same file with some bytes changed, cut off, repeated or put in."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(content) + 1), rng.choice((1, 1, 4, 64))
        way = rng.randrange(5)
        if way == 0:
            content[at : at + size] = rng.randbytes(size)
        elif way == 1:
            content[at : at + size] = b""
        elif way == 2:
            content[at:at] = rng.choice(
                (b"0", b"-", b"9" * 30, b"\xff", b"\n", b"nan", b"[" * 5000)
            )
        elif way == 3:
            del content[at:]
        else:
            content[at:at] = content[at : at + size]
    return bytes(content)


def changed_value(value, rng):
    """The same nested value with one of its parts replaced by something odd."""
    value = copy.copy(value)
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = changed_value(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        value[at] = changed_value(value[at], rng)
        return value
    if isinstance(value, torch.Tensor) and rng.random() < 0.5:
        return rng.choice((value * math.nan, value[None], value.to(torch.complex64), value.int()))
    return rng.choice(ODD)


def off_cube():
    corners = [f"{x} {y} {z}" for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    faces = ["3 0 1 2", "3 1 2 3", "4 4 5 7 6", "3 0 1 4"]
    return "\n".join(["OFF", "8 4 0", *corners, *faces, ""]).encode()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def hdf5(path):
    import h5py

    with h5py.File(path, "w") as f:
        f["data"] = np.random.default_rng(0).normal(size=(4, 32, 3)).astype("f4")
        f["label"] = np.full((4, 1), 8, "u1")
    return path.read_bytes()


class Readers:
    """Every reader, with a file that it accepts."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        words = [*SHORT["cls"].split(), "--out", str(self.run)]
        with small_data(), contextlib.redirect_stderr(io.StringIO()):
            train_cls.main(words)
            self.args = train_cls.parse(words)
            self.args.resume = True
            self.model = train_cls.make_model(self.args, train_cls.load_sets(self.args).test)
        self.run_files = {p.name: p.read_bytes() for p in self.run.iterdir()}
        series = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("f4")
        idx = b"".join(n.to_bytes(4, "big") for n in (0x803, 3, 28, 28)) + bytes(3 * 784)
        self.readers = {
            "best.pt": (self.run_files["best.pt"], self.best),
            "last.pt": (self.run_files["last.pt"], self.last),
            "config.json": (self.run_files["config.json"], self.config),
            "metrics.jsonl": (self.run_files["metrics.jsonl"], self.last),
            "results.json": (self.run_files["results.json"], self.results),
            "own.npy": (npy(series), lambda path: series_runs.read_series(path, 2)),
            "idx": (idx, lambda path: mnist.read_idx(path, 3)),
            "idx.gz": (gzip.compress(idx), lambda path: mnist.read_idx(path, 3)),
            "cube.off": (off_cube(), lambda path: meshes.read_off(path.read_bytes(), path)),
            "cache.npz": (self.cache(), modelnet.read_cache),
        }
        if importlib.util.find_spec("h5py"):
            tree = folder / "modelnet40_ply_hdf5_2048"
            tree.mkdir()
            self.readers["ply_data_train0.h5"] = (hdf5(tree / "ply_data_train0.h5"), self.hdf5)

    def cache(self):
        points = np.random.default_rng(0).normal(size=(2, 9, 3))
        points -= points.mean(1, keepdims=True)
        points /= np.linalg.norm(points, axis=-1).max(1)[:, None, None]
        modelnet.write_cache(self.folder / "whole.npz", points.astype("f4"))
        return (self.folder / "whole.npz").read_bytes()

    def hdf5(self, path):
        list(modelnet._hdf5(path.parent, "chair", "train"))

    def best(self, path):
        training.load_best(self.model, path.parent)

    def last(self, path):
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        args = copy.copy(self.args)
        args.out = str(path.parent)
        steps = training.read_checkpoint(self.run / "last.pt")["plan"][2]
        training.Run(args, training.World(torch.device("cpu")), model, optimizer, None, steps)
        training.load_last(model, path.parent)
        training.curve(path.parent, "loss")

    def config(self, path):
        train_cls.parse(["--load", str(path.parent), "--evaluate"])
        train_cls.parse(["--resume", "--out", str(path.parent)])

    def results(self, path):
        checkpoints.read_results(path.parent, "accuracy")

    def place(self, name, content):
        """A file with that content, among the others of its run or data."""
        here = self.folder / "here"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        if name in self.run_files:
            for other, whole in self.run_files.items():
                (here / other).write_bytes(whole)
        (here / name).write_bytes(content)
        return here / name

    def mutate(self, name, rng):
        content = self.readers[name][0]
        if name.endswith(".json") and rng.random() < 0.5:
            return json.dumps(changed_value(json.loads(content), rng)).encode()
        if name.endswith(".pt") and rng.random() < 0.7:
            state = torch.load(io.BytesIO(content), weights_only=True)
            file = io.BytesIO()
            torch.save(changed_value(state, rng), file)
            return file.getvalue()
        return changed_bytes(content, rng)


def mutated_files(count, rng, tally, folder):
    readers = Readers(folder)
    names = list(readers.readers)
    for name in names:  # each accepts the file as it is
        with contextlib.redirect_stderr(io.StringIO()):
            readers.readers[name][1](readers.place(name, readers.readers[name][0]))
    for k in range(count):
        name = names[k % len(names)]
        path = readers.place(name, readers.mutate(name, rng))
        before = tally.counts.copy()

        def read(name=name, path=path):
            readers.readers[name][1](path)
            return 0

        tally.judge(f"{name}, number {k}", read)
        tally.counts[f"files {name}"] += 1
        if tally.counts["traceback"] + tally.counts["hang"] > before["traceback"] + before["hang"]:
            kept = Path(tempfile.gettempdir()) / f"finding-{k}-{name}"
            shutil.copy(path, kept)
            tally.findings[-1] = f"{kept}: {tally.findings[-1]}"


# ---------------------------------------------------------------------------------------- commands
WORDS = ["0", "1", "2", "7", "-1", "0.5", "1e-3", "1e30", "1e300", "nan", "inf", "1000000000"]
WORDS += ["", "foo", "ω", "chair", "digits", "1,2", "16,16", "0:1:0.1", "a" * 300, "/proc/x", "\0"]
WORDS += ["runs/none", "pretrained/shapes", "pretrained/turning", "pretrained/chair", "--lr"]


def command_line(parser, rng):
    """Some options of a script, mostly with values that they have."""
    actions = [a for a in parser._actions if a.option_strings and a.dest not in ("help", "out")]
    words = []
    for action in rng.sample(actions, rng.choice((1, 2, 3, 5))):
        words.append(rng.choice(action.option_strings))
        if action.nargs != 0:
            value = rng.choice(list(action.choices)) if action.choices else str(action.default)
            words.append(rng.choice(WORDS) if rng.random() < 0.5 else value)
    if rng.random() < 0.1:
        words.append(rng.choice(WORDS))
    return words


def begin_only(self, *args, **kwargs):
    raise training.Interrupted("began")


def random_commands(count, rng, tally, folder):
    parsers, shared, fit = {}, options.shared, training.Run.fit
    for name, module in SCRIPTS.items():
        options.shared = lambda *a, name=name, **k: parsers.setdefault(name, shared(*a, **k))
        module.parse([])
    options.shared, training.Run.fit = shared, begin_only
    try:
        for k in range(count):
            name = rng.choice(list(SCRIPTS))
            words = [*command_line(parsers[name], rng), "--out", str(folder / f"out{k}")]

            def call(words=words, name=name):
                return training.command(lambda: SCRIPTS[name].main(words), (data.DataError,))

            with small_data():
                tally.judge(f"train_{name}.py {' '.join(words)!r}", call)
            tally.counts["commands"] += 1
            shutil.rmtree(folder / f"out{k}", ignore_errors=True)
    finally:
        training.Run.fit = fit


def attack(counts, seed):
    """The tally of so many kills, files and commands."""
    tally, rng = Tally(), random.Random(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, what in (
            ("files", mutated_files),
            ("commands", random_commands),
            ("kills", kills),
        ):
            place = Path(folder) / name
            place.mkdir()
            if counts.get(name):
                what(counts[name], rng, tally, place)
    return tally


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("kills", "files", "commands", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0)
    args = vars(parser.parse_args())
    tally = attack(args, args["seed"])
    for finding in tally.findings[:10]:
        print(finding)
    for name, number in sorted(tally.counts.items()):
        print(f"{number:8} {name}")
    print(f"{len(tally.findings):8} findings")
    return bool(tally.findings)


if __name__ == "__main__":
    sys.exit(main())
