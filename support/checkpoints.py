"""The files of a run: its folder, checkpoints, metrics and results, which may come from anywhere.

Nothing in a file is executed, whatever does not fit is one line, and weights that are not finite
are refused.
"""

import contextlib
import csv
import io
import json
import platform
import sys
from pathlib import Path

import numpy as np
import torch

from support.files import Busy, alone, write_whole
from support.options import (
    UsageError,
    configuration,
    read_config,
    read_json,
    read_text,
    relative,
    stages_before,
)
from support.processes import Interrupted, commit
from support.progress import say

FORMAT = "exnode checkpoint 1"


def make_folder(out):
    """--out, before anything is computed for it."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"--out {out}: {e.strerror}") from None


def write_json(path, value):
    write_whole(path, lambda f: f.write((json.dumps(value, indent=1) + "\n").encode()))


def write_sets(out, split):
    """sets.json: what the training sets are like, for whoever samples or scores by the run."""
    found = {"dim": split.dim, "sizes": split.sizes_by_class()}
    if split.times is not None:
        found["times"] = [float(np.nanmin(split.times)), float(np.nanmax(split.times))]
    write_json(Path(out) / "sets.json", found)


def read_sets(run):
    """The contents of sets.json, or None where a run has none."""
    path = Path(run) / "sets.json"
    if not path.exists():
        return None
    found = read_json(path)
    sizes = found.get("sizes") if isinstance(found, dict) else None
    if not isinstance(sizes, dict) or not all(map(is_sizes, sizes.values())) or not sizes:
        raise UsageError(f"{path}: not about the sets of a run")
    return found


def is_sizes(pairs):
    """Whether these are pairs of numbers of points and of sets."""
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        return False
    return all(type(v) is int and 0 < v < 10**9 for pair in pairs for v in pair)


def test_quantiles(run):
    """The 101 quantiles of log p / n in a finished run's test, or None where it has none."""
    path = Path(run) / "results.json"
    results = read_json(path) if path.exists() else {}
    test = results.get("test") if isinstance(results, dict) else None
    found = test.get("quantiles") if isinstance(test, dict) else None
    fine = isinstance(found, list) and len(found) == 101
    if not fine or not all(isinstance(v, int | float) for v in found):
        return None
    return np.array(found) - test.get("log_unit", 0.0)  # in the units that a model has


def write_table(out, name, head, rows):
    """A CSV file in --out; its path."""
    make_folder(out)
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(head)
    table.writerows([f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in rows)
    path = Path(out) / name
    write_whole(path, lambda f: f.write(text.getvalue().encode()))
    return path


def read_metrics(out, size=None):
    """The lines of metrics.jsonl, or those in its first bytes."""
    path = Path(out) / "metrics.jsonl"
    if size is not None and not path.exists():
        return []
    try:
        found = [json.loads(line) for line in read_text(path, size).splitlines()]
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, UsageError) else UsageError(f"{path}: {e}") from None
    if not all(isinstance(line, dict) for line in found):
        raise UsageError(f"{path}: not the evaluations of a run")
    return found


def curve(out, name, over="step"):
    """Where a number of metrics.jsonl is, and its values there."""
    pairs = [(line.get(over), line.get(name)) for line in read_metrics(out)]
    pairs = [pair for pair in pairs if all(isinstance(v, int | float) for v in pair)]
    return [at for at, _ in pairs], [value for _, value in pairs]


def read_checkpoint(path):
    """The dict in last.pt or best.pt; nothing in the file is executed."""
    if not Path(path).is_file():  # a pipe would wait for ever
        raise UsageError(f"{path}: no such checkpoint")
    with one_line(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != FORMAT:
            raise ValueError(f"in the format {state['format']!r}, not {FORMAT!r}")
        return state


@contextlib.contextmanager
def one_line(path):
    """Whatever the bytes of a stranger's checkpoint may raise, as one line."""
    try:
        yield
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:120]
        raise UsageError(f"{path}: damaged, or not of this program ({reason})") from None


def write_checkpoint(path, state):
    state = {"format": FORMAT, **state}
    write_whole(path, lambda f: torch.save(state, f))


def check_weights(weights, wanted, path):
    """An error unless these are finite tensors with the names, shapes and types of `wanted`."""

    def alike(a, b):
        kinds = [(type(v), v.shape, v.dtype, v.layout) for v in (a, b) if torch.is_tensor(v)]
        return len(kinds) == 2 and kinds[0][1:] == kinds[1][1:]

    if not isinstance(weights, dict):
        raise UsageError(f"{path}: of another model, or without weights")
    names = sorted(weights.keys() | wanted.keys(), key=str)
    if odd := [str(k) for k in names if not alike(weights.get(k), wanted.get(k))]:
        raise UsageError(f"{path}: of another model ({', '.join(odd[:3])} are not the same)")
    if odd := [k for k, v in weights.items() if not v.isfinite().all()]:
        raise UsageError(f"{path}: its weights are not finite ({', '.join(odd[:3])})")


def load_weights(model, weights, path):
    check_weights(weights, model.state_dict(), path)
    model.load_state_dict(weights)


def load_best(model, run, new=()):
    """The best weights of a run directory, but for names that begin as in `new`: they stay."""
    path = Path(run) / "best.pt"
    weights, mine = read_checkpoint(path).get("model"), model.state_dict()
    if new and isinstance(weights, dict):
        weights = {k: v for k, v in weights.items() if not str(k).startswith(tuple(new))}
        weights |= {k: v for k, v in mine.items() if k.startswith(tuple(new))}
    load_weights(model, weights, path)


def load_model(option, run, load, kind, what):
    """load(run), the trained model of a run, if it is of the class `kind`: that is, `what`."""
    try:
        model = load(run)
    except ValueError as e:
        raise UsageError(f"{option}: {e}") from None
    if not isinstance(model, kind):
        raise UsageError(f"{option} {run}: of another model, not {what}")
    return model


def load_last(model, run):
    """The weights at the end of a run, averaged if it averages them."""
    path = Path(run) / "last.pt"
    state = read_checkpoint(path)
    load_weights(model, state.get("average") or state.get("model"), path)


@contextlib.contextmanager
def directory(args, world, number):
    """Have --out to this process; what is there: the results if the run is complete, or None.

    number: that of the test which says that results are those of a run.
    """
    out = Path(args.out)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            make_folder(out)
            try:
                stack.enter_context(alone(out))
                look(args, out)
            except Busy:
                raise UsageError(f"--out {out}: another process trains there") from None
            except OSError as e:
                raise UsageError(f"--out {out}: {e.strerror}") from None
        world.wait()
        try:
            yield read_results(out, number)
        except KeyboardInterrupt as e:
            if isinstance(e, Interrupted):
                raise
            there = f"from {out / 'last.pt'}" if (out / "last.pt").exists() else "from the start"
            raise Interrupted(f"interrupted; the same command with --resume goes on {there}") from e


def look(args, out):
    """Start a run in a folder that has none, or check that the one there may go on."""
    config = configuration(args)
    there = {path.name for path in out.iterdir() if not path.is_dir()}
    there = {name for name in there if not name.endswith(".part")}
    if there <= {"config.json", "sets.json"}:  # nothing has been trained here yet
        write_json(out / "config.json", config)
    elif "config.json" not in there:
        raise UsageError(f"--out {out} is not empty, and no run: name another directory")
    elif not args.resume:
        raise UsageError(f"--out {out} holds a run: add --resume, or name another directory")
    off = {k: v for k, v in config.items() if not v}  # as in a run from before that option
    before = off | read_config(out)
    names = sorted((before.keys() | config.keys()) - {"every"})  # which may change on the way
    differ = [k for k in names if before.get(k) != config.get(k) and (before.get(k) or k in config)]
    if differ:
        differ = ", ".join(f"{k} {before.get(k)} → {config.get(k)}" for k in differ)
        raise UsageError(f"--resume: the run in {out} has other options: {differ}")


def read_results(out, number):
    """results.json of a complete run, or None."""
    path = out / "results.json"
    if not path.exists():
        return None
    results = read_json(path)
    test = results.get("test", results) if isinstance(results, dict) else None
    if not isinstance(test, dict) or not isinstance(test.get(number), int | float | list):
        raise UsageError(f"{path}: not the results of this run")
    value = test[number]
    say(f"{out} is complete: {number} {value if isinstance(value, list) else f'{value:.4f}'}")
    return results


def write_results(path, results, args, world):
    """Write and return results with what it takes to repeat them."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    results.setdefault("commit", commit())
    results |= {"config": configuration(args), "seed": args.seed}
    if getattr(args, "finetune", None):
        results["before"] = stages_before(args.finetune)
    results |= {"versions": versions | {"numpy": np.__version__}}
    results |= {"command": [relative(word) for word in sys.argv]}
    results |= {"device": str(world.device), "processes": world.size}
    if world.rank == 0:
        write_json(path, results)
    world.wait()
    return results


def training_of(run):
    """What the results.json of a run says of its training, if there is one."""
    try:
        found = read_json(Path(run) / "results.json")
    except UsageError:
        return {}
    names = ("parameters", "best", "best_step", "steps", "epochs", "seconds", "commit", "command")
    known = (
        {name: found[name] for name in names if name in found} if isinstance(found, dict) else {}
    )
    return {"trained": known} if known else {}


def write_evaluation(test, args, world):
    """Write and return evaluation.json in --out, which is the --load RUN if not said otherwise."""
    path = Path(args.out) / "evaluation.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = write_results(path, {"test": test} | training_of(args.load), args, world)
    except OSError as e:
        found = json.dumps(test)
        raise UsageError(f"--out {args.out}: {e.strerror}; the test found {found}") from None
    say(f"{path} has the details")
    return results
