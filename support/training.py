"""What all experiments share: options, devices, the run directory, checkpoints, the loop.

    python train_x.py …                      one process; Ctrl-C or SIGTERM saves and exits
    python train_x.py … --resume             goes on where it stopped, bit for bit on a CPU
    torchrun --nproc-per-node 8 train_x.py … 8 processes share every batch

A run directory holds config.json (the options), metrics.jsonl (a line per evaluation), last.pt
(everything needed to go on), best.pt (weights and options of the best evaluation) and, at the end,
results.json; --evaluate adds evaluation.json. Files appear whole or not at all.

A script brings a model, a loss and an evaluation; `Run.fit` is the loop, and knows no more of them.
Exit codes (`command`): 0 done, 1 training failed, 2 wrong usage or data, 130 interrupted and saved.

Decisions
- The learning rate is a function of progress in [0, 1], set before every step. Progress is steps
  done / steps planned. With --minutes it is the share of the time until a twentieth has passed;
  then the measured speed gives the number of steps, and again at a quarter, half and so on (PLANS),
  because machines slow down. Such a run depends on the clock: another one has another plan.
- Several processes compute what one would with the same total batch: gradients are averaged
  (DistributedDataParallel), and batch normalisation uses the statistics of all processes
  (`synchronise`; torch's SyncBatchNorm wants a GPU). The order of sums differs, so the last digits
  do; and dropout or noise is drawn per process, so there only the distribution is the same.
- All processes read last.pt, so several machines need a common file system. torchrun has its own
  exit codes: 1 whenever a process failed.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import math
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from beyond.muon import Muon
from solvers import SolverError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

FORMAT = "exnode checkpoint 1"
OPTIMIZERS = {"adam": torch.optim.Adam, "muon": Muon}
SCHEDULES = ("halve", "cosine", "one-cycle")
PLANS = (0.05, 0.25, 0.5, 0.75, 0.9)  # progress at which --minutes fixes the number of steps
SAVE_SECONDS = 300  # between checkpoints within an epoch
SHOW_SECONDS = (0.5, 30)  # between progress lines: on a terminal, elsewhere
KEPT = (  # numbers of a Run that its checkpoint holds
    "step", "evaluated", "best", "losses", "plan", "evaluating", "logged",
)  # fmt: skip
PLACE_OPTIONS = (  # where, and what is done beside training: may change when a run goes on
    "out", "root", "resume", "cuda", "every", "load", "evaluate", "last", "runs", "sample",
    "path", "reconstruct", "at",
)  # fmt: skip


class UsageError(ValueError):
    """Something the user can put right: one line, exit code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on: what, where, and which checkpoint is good; exit code 1."""


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal, after saving; exit code 130."""


# ---------------------------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    def error(self, message):
        say(f"{self.prog}: {message}; --help lists the options")
        raise SystemExit(2)


def number(kind, low, below=math.inf):
    """An argparse type: an int or float that is at least `low` and below a finite limit."""

    def parse(text):
        value = kind(text)
        if not low <= value < below:
            limit = "infinite" if below == math.inf else f"not below {below}"
            raise argparse.ArgumentTypeError(f"{text} is less than {low} or {limit}")
        return value

    parse.__name__ = kind.__name__  # for argparse's own message
    return parse


def widths(text):
    """An argparse type: "128,128" is [128, 128]."""
    return [number(int, 1)(part) for part in text.split(",")]


def options(description, name, epochs, batch_size, every=None):
    """A parser with the options that all experiments share."""
    parser = Parser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add, sources = parser.add_argument, ("synthetic", "mnist", "modelnet", "modelnet10")
    add("--data", choices=sources, default="synthetic", help="which sets; synthetic is built in")
    add("--root", default="data", help="folder with the data")
    add("--cuda", action="store_true", help="train on a GPU")
    add("--out", default=f"runs/{name}", help="run directory")
    add("--resume", action="store_true", help="go on with the run in --out, or start it")
    help = "of weights, order, draws and held-out sets"
    add("--seed", type=number(int, 0, below=2**63), default=0, help=help)
    add("--epochs", type=number(int, 1), default=epochs, help="passes over the training sets")
    help = "train this long instead of --epochs; the schedule fits; None: --epochs counts"
    add("--minutes", type=number(float, 0.01), help=help)
    help = "sets or series per step, over all processes"
    add("--batch-size", type=number(int, 2), default=batch_size, help=help)
    help = "muon needs fewer steps, each slower"
    add("--optimizer", choices=OPTIMIZERS, default="adam", help=help)
    add("--lr", type=number(float, 0), default=1e-3, help="largest learning rate")
    add("--schedule", choices=SCHEDULES, default="halve", help="of the learning rate")
    help = "decay of averaged weights, or 0 for none"
    add("--ema", type=number(float, 0, below=1), default=0.0, help=help)
    help = "steps from one evaluation to the next; None: an epoch"
    add("--every", type=number(int, 1), default=every, help=help)
    return parser


def parse_as_in(run, parser, argv, names=None):
    """The options, where those of a run directory are the defaults: all of them, or `names`."""
    config = read_config(run)
    if unknown := sorted(config.keys() - vars(parser.parse_args(argv)).keys()):
        raise UsageError(f"{run}: a run of another script; this one has no {', '.join(unknown)}")
    config = {k: v for k, v in config.items() if names is None or k in names}
    if none := [k for k, v in config.items() if v is None and parser.get_default(k) is not None]:
        raise UsageError(f"{run}/config.json: no value for {', '.join(none)}")
    parser.set_defaults(**{k: as_typed(v) for k, v in config.items()})
    read = parser.parse_args([])  # by the types of the options, as if typed
    parser.set_defaults(**{k: getattr(read, k) for k in config})
    return parser.parse_args(argv)


def as_typed(value):
    """An option's value as on the command line; yes, no and none have no text there."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, bool) else str(value)


def parse_finished(run, parser, argv, more=()):
    """The options of a finished run, but for what argv says; --out is the run."""
    parser.set_defaults(out=run)
    args = parse_as_in(run, parser, argv)
    names = ("resume", "epochs", "minutes", "optimizer", "lr", "schedule", "ema", "every", *more)
    refuse(parser, args, names, "is for training, not for --load")
    return args


def refuse(parser, args, names, why):
    """An error if one of these options is not at its default."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} {why}")


def say(text, end="\n"):
    """A line on stderr, of the first process only; on a terminal it replaces a progress line."""
    if os.environ.get("RANK", "0") == "0":
        clear = "\033[K" if sys.stderr.isatty() else ""
        print(f"{text}{clear}", end=end, file=sys.stderr, flush=True)


def watch(what, items, total=None):
    """The items, with a line about the time left every half minute."""
    total = len(items) if total is None else total
    began = shown = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown > SHOW_SECONDS[1]:
            shown, left = now, (now - began) / done * (total - done)
            say(f"{what}: {done} of {total}, {left:.0f} s left")


def check_memory(need, world, what):
    """An error, before the machine chokes, if so many bytes are more than it has."""
    if world.device.type == "cuda":
        have = torch.cuda.mem_get_info(world.device)[1]
    elif hasattr(os, "sysconf"):
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:  # on Windows
        return
    if need > have:
        need, have = (f"{size / 2**30:.0f} GiB" for size in (need, have))
        raise UsageError(f"{what}: takes about {need} of memory, and there are {have}")


def keep_memory():
    """Let glibc keep what is freed: to have the system clear it again takes a sixth of a step."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped, and unmapped, by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing goes back to the system
        mallopt(-2, 2**26)  # M_TOP_PAD: ask for 64 MB at a time


def command(main, usage=()):
    """Run a script's main() and return its exit code; exceptions in `usage` are the user's."""
    name = Path(sys.argv[0]).name
    keep_memory()
    torch.set_flush_denormal(True)  # or the tails of sharp attention take a third of a CPU's time
    try:
        main()
    except (UsageError, *usage) as e:
        say(f"{name}: {e}")
        return 2
    except (TrainingError, SolverError, OSError) as e:
        if e.__cause__ is not None:
            traceback.print_exception(e.__cause__)
        say(f"{name}: {e}")
        return 1
    except KeyboardInterrupt as e:
        say(f"{name}: {str(e) or 'interrupted'}")
        return 130
    finally:
        torch.set_flush_denormal(False)
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------------------------- processes
@dataclass(frozen=True)
class World:
    """This process among those that train together, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def share(self):
        """What data.batches wants to know of this process."""
        return {"rank": self.rank, "world": self.size, "device": self.device}

    def sum(self, x):
        """Σ over processes of a tensor."""
        if self.size > 1:
            dist.all_reduce(x := x.to(self.device).clone())
        return x

    def gather(self, value):
        """The list of every process's value."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self):
        if self.size > 1:
            dist.barrier()


def connect(args):
    """The World that torchrun's environment and --cuda describe."""
    commit()  # before someone changes the files
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if args.cuda and torch.cuda.device_count() <= local:
        raise UsageError(
            f"--cuda: process {local} finds no GPU ({torch.cuda.device_count()} there); "
            "leave --cuda out to train on the CPU"
        )
    if size > 1 and (getattr(args, "sample", None) or getattr(args, "reconstruct", None)):
        raise UsageError("--sample and --reconstruct are for one process, without torchrun")
    if args.batch_size % size:
        raise UsageError(f"--batch-size {args.batch_size} is not a multiple of {size} processes")
    device = torch.device("cuda", local) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if args.cuda else "gloo")
    return World(device, rank, size)


class AllSum(torch.autograd.Function):
    """Σ over processes; so is its gradient."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(g := g.clone(memory_format=torch.contiguous_format))
        return g


def synchronise(model):
    """Let every PointNorm use the statistics of all processes."""
    for module in model.modules():
        if hasattr(module, "total"):
            module.total = AllSum.apply


# ------------------------------------------------------------------------------------ randomness
def seed(number, rank=0):
    """Seed torch, the only global stream of random numbers that is used."""
    torch.manual_seed((number + 7919 * rank) % 2**32)


def random_states():
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_states(states):
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


# ----------------------------------------------------------------------------- files of a run
def write(path, save):
    """Let save(file) fill a temporary file, which then takes the place of `path`, whole."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        save(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def make_folder(out):
    """--out, before anything is computed for it."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"--out {out}: {e.strerror}") from None


def write_json(path, value):
    write(path, lambda f: f.write((json.dumps(value, indent=1) + "\n").encode()))


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: {e}") from None


def read_config(run):
    """The options of a run directory."""
    config = read_json(Path(run) / "config.json")
    if not isinstance(config, dict):
        raise UsageError(f"{run}/config.json: not the options of a run")
    return config


def read_metrics(out):
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def read_checkpoint(path):
    """The dict in last.pt or best.pt; nothing in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such checkpoint") from None
    except (OSError, EOFError, LookupError, RuntimeError, ValueError, pickle.UnpicklingError) as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:120]
        raise UsageError(f"{path}: damaged, or no checkpoint of ours ({reason})") from None
    format = str(state.get("format")) if isinstance(state, dict) else ""
    (kind, _, version), (ours, _, wanted) = format.rpartition(" "), FORMAT.rpartition(" ")
    if kind != ours:
        raise UsageError(f"{path}: not a checkpoint of this program")
    if version != wanted:
        raise UsageError(f"{path}: of version {version}; this program reads version {wanted}")
    return state


def load_weights(model, weights, path):
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as e:
        why = " ".join(line.strip() for line in str(e).splitlines()[:2])
        raise UsageError(f"{path}: of another model ({why})") from None


def load_best(model, run, new=()):
    """The best weights of a run directory, but for names that begin as in `new`: they stay."""
    path = Path(run) / "best.pt"
    state = read_checkpoint(path).get("model", {})
    kept = {k: v for k, v in state.items() if not k.startswith(tuple(new))}
    mine = {k: v for k, v in model.state_dict().items() if k.startswith(tuple(new))}
    load_weights(model, kept | mine, path)


def load_last(model, run):
    """The weights at the end of a run, averaged if it averages them."""
    path = Path(run) / "last.pt"
    state = read_checkpoint(path)
    load_weights(model, state.get("average") or state.get("model"), path)


def configuration(args):
    """The options that a run's numbers depend on."""
    return {k: v for k, v in sorted(vars(args).items()) if k not in PLACE_OPTIONS}


def prepare(args, world):
    """Make or check the run directory --out; the results, if the run in it is complete."""
    out, config = Path(args.out), configuration(args)
    if world.rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            there = {path.name for path in out.iterdir() if path.suffix != ".part"}
            if there <= {"config.json"}:  # nothing has been trained here yet
                write_json(out / "config.json", config)
                there = set()
        except OSError as e:
            raise UsageError(f"--out {out}: {e.strerror}") from None
        if there and "config.json" not in there:
            raise UsageError(f"--out {out} is not empty, and no run: name another directory")
        if there and not args.resume:
            raise UsageError(f"--out {out} holds a run: add --resume, or name another directory")
        off = {k: v for k, v in config.items() if not v}  # as in a run from before that option
        before = off | read_config(out)
        names = sorted(before.keys() | config.keys())
        differ = [k for k in names if before.get(k) != config.get(k)]
        if differ:
            differ = ", ".join(f"{k} {before.get(k)} → {config.get(k)}" for k in differ)
            raise UsageError(f"--resume: the run in {out} has other options: {differ}")
    world.wait()
    return read_json(out / "results.json") if (out / "results.json").exists() else None


@functools.cache
def commit():
    """The version of this code as the process starts: a commit, + if files have changed since."""
    git = ("git", "-C", str(Path(__file__).parent.parent))
    try:
        head = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL)
        changes = subprocess.check_output([*git, "status", "--porcelain", "-uno"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.decode().strip() + ("+" if changes else "")


# -------------------------------------------------------------------------------------- schedules
def schedule(name, intervals):
    """Share of the largest learning rate at a progress from 0 to 1; "halve" has intervals."""
    return {"halve": halve(intervals), "cosine": cosine, "one-cycle": one_cycle}[name]


def halve(intervals):
    """Half as large in each of so many equal intervals as in the one before."""
    return lambda progress: 0.5 ** min(int(progress * intervals + 1e-9), intervals - 1)


def cosine(progress):
    return 0.5 * (1 + math.cos(math.pi * progress))


def one_cycle(progress, warm=0.15):
    """From 1/25 up to 1 in the first 15 %, then down to 0, both along a cosine."""
    if progress < warm:
        return 1 - 0.96 * cosine(progress / warm)
    return cosine((progress - warm) / (1 - warm))


# ------------------------------------------------------------------------------------------- loop
class Objective(nn.Module):
    """The loss as a module: DistributedDataParallel only sees what goes through forward."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch):
        loss = self.loss(self.model, batch)
        if dist.is_initialized():  # DistributedDataParallel waits for those that a step leaves out
            loss = loss + 0 * sum(p.sum() for p in self.model.parameters())
        return loss


class Run:
    """A model in training: everything that a checkpoint holds, and the loop.

    schedule  progress in [0, 1] → factor of the optimiser's learning rate
    steps     batches per epoch
    every     steps from one evaluation to the next; None: an epoch
    ema       decay of an average of the weights, which is then what is evaluated and kept as best
    clip      largest gradient norm; None: any
    """

    def __init__(
        self, args, world, model, optimizer, schedule, steps, ema=0.0, clip=None, every=None,
    ):  # fmt: skip
        self.args, self.world, self.model, self.optimizer = args, world, model, optimizer
        self.schedule, self.steps, self.every, self.decay = schedule, steps, every or steps, ema
        self.clip = math.inf if clip is None else clip
        self.out, self.budget = Path(args.out), 60 * (args.minutes or 0)
        self.average = {k: v.clone() for k, v in model.state_dict().items()} if ema else None
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        # (step, progress there, steps in all): the line that progress follows from that step on
        self.plan = None if args.minutes else (0, 0.0, args.epochs * steps)
        self.step, self.evaluated, self.best, self.losses = 0, -1, -math.inf, (0.0, 0)
        self.logged = self.evaluating = 0  # bytes in metrics.jsonl; seconds an evaluation takes
        self.probe = None  # (step, seconds without evaluations) at the last plan
        self.paused = 0.0  # seconds of evaluations in this process
        self.clock, self.stop = 0.0, False  # seconds of training so far, agreed by all processes
        self.commits = [commit()]  # one, or several where a run went on with changed code
        if world.size > 1:
            synchronise(model)
            seed(args.seed, world.rank)
        if (self.out / "last.pt").exists():
            self.restore(read_checkpoint(self.out / "last.pt"))
        self.first, self.saved = self.step, self.clock
        self.began = self.shown = time.monotonic()
        self.started = self.began - self.clock

    seconds = property(lambda self: time.monotonic() - self.started)
    total = property(lambda self: self.plan[2] if self.plan else math.inf)
    plans = property(lambda self: sum(p <= self.plan[1] for p in PLANS) if self.plan else 0)

    def fit(self, loss, batches, evaluate, best):
        """Train for the planned steps, then load the weights of the best evaluation.

        loss(model, batch)     mean over the sets of a batch
        batches(epoch, start)  this process's share of an epoch's batches, from number `start` on
        evaluate(model)        {name: number} on held-out sets, equal in all processes; the run
                               keeps the weights with the largest number called `best`
        """
        objective = Objective(self.model, loss)
        if self.world.size > 1:
            objective = DistributedDataParallel(objective)
        with self.alone(), self.signals():
            if self.step == 0 and self.world.rank == 0:  # another start may have left its own since
                write_json(self.out / "config.json", configuration(self.args))
            while self.step < self.total or self.evaluated < self.step:
                if self.evaluated < self.step and self.due():
                    self.evaluate(evaluate, best)
                    continue
                for batch in batches(*divmod(self.step, self.steps)):
                    self.advance(objective, batch)
                    if self.due():
                        break
            if self.world.sum(torch.tensor(float(self.stop))).item():  # in the last evaluation
                raise Interrupted(f"interrupted, saved in {self.out / 'last.pt'}; --resume goes on")
        if not (self.out / "best.pt").exists():
            raise TrainingError(f"no evaluation in {self.out} gave a finite {best}")
        load_best(self.model, self.out)
        self.model.eval()

    def due(self):
        """Whether an evaluation belongs here."""
        return self.step % self.every == 0 or self.step == self.total

    def progress(self):
        if self.plan is None:
            return min(self.clock / self.budget, 1.0)
        step, progress, total = self.plan
        return progress + (1 - progress) * (self.step - step) / max(total - step, 1)

    def advance(self, objective, batch):
        """One step, and whatever is due after it."""
        try:
            loss, self.clock, stop = self.update(objective, batch)
        except (ArithmeticError, RuntimeError, ValueError) as e:
            lr, epoch = self.optimizer.param_groups[0]["lr"], self.step // self.steps + 1
            self.fail(e, f"at step {self.step + 1} (epoch {epoch}), learning rate {lr:g}")
        self.step, self.losses = self.step + 1, (self.losses[0] + loss, self.losses[1] + 1)
        if self.budget:
            self.make_plan()
        self.show()
        if stop or self.clock - self.saved > SAVE_SECONDS:
            self.save()
        if stop:
            where = f"step {self.step}, saved in {self.out / 'last.pt'}"
            raise Interrupted(f"interrupted at {where}; the same command with --resume goes on")

    def fail(self, error, where):
        """End training with one line, after a traceback if the error is of no known kind."""
        known = isinstance(error, (FloatingPointError, SolverError))
        good = f"the last good checkpoint is {self.out / 'last.pt'}"
        raise TrainingError(f"{error} {where}; {good}") from (None if known else error)

    def update(self, objective, batch):
        """θ ← θ − lr · Adam(∇ loss), or another optimiser; what the processes agree on."""
        factor = self.schedule(self.progress())
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        loss = objective(batch)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip).item()
        told = torch.tensor([loss.item(), self.seconds, self.stop], dtype=torch.float64)
        loss, clock, stop = (self.world.sum(told) / self.world.size).tolist()
        if not math.isfinite(loss + norm):
            raise FloatingPointError(f"loss is {loss:g} and the norm of its gradient {norm:g}")
        self.optimizer.step()
        if self.average:
            decay = min(self.decay, (1 + self.step) / (10 + self.step))  # forget the start sooner
            blend(self.average, self.model.state_dict(), 1 - decay)
        return loss, clock, stop

    def make_plan(self):
        """At PLANS: as many steps, with their evaluations, as fit into what is left of the budget.

        Speed is that of ten steps or more since the plan before, without a slow first step.
        """
        trained = self.clock - self.paused
        self.probe = self.probe or (self.step, trained)
        measured = self.step - self.probe[0]
        due = self.plans < len(PLANS) and self.progress() >= PLANS[self.plans]
        if not due or (measured < 10 and self.clock < self.budget / 2):
            return
        taken = trained - self.probe[1] if measured else self.clock
        each = taken / (measured or self.step) + self.evaluating / self.every
        more = int((self.budget - self.clock - self.evaluating) / each)
        self.plan = (self.step, self.progress(), self.step + max(more, 0))
        self.probe = (self.step, trained)

    def evaluate(self, evaluate, best):
        """A line in metrics.jsonl, and best.pt if it is the best so far."""
        self.save()  # an evaluation may fail
        begun = time.monotonic()
        weights = self.model.state_dict()
        if self.average:  # evaluate the average in place of the weights
            weights = {k: v.clone() for k, v in weights.items()}
            self.model.load_state_dict(self.average)
        try:
            with torch.no_grad():
                metrics = evaluate(self.model.eval())
        except (ArithmeticError, RuntimeError, ValueError) as e:
            self.fail(e, f"in the evaluation after step {self.step}")
        kept = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        self.model.train()
        taken = torch.tensor(time.monotonic() - begun, dtype=torch.float64)
        self.evaluating = self.world.sum(taken).item() / self.world.size
        self.paused += self.evaluating
        self.log(metrics)
        self.evaluated, self.losses = self.step, (0.0, 0)
        if metrics[best] > self.best:
            self.best = metrics[best]
            state = {"format": FORMAT, "model": kept, "config": configuration(self.args)}
            if self.world.rank == 0:
                state |= {"step": self.step, "metrics": metrics}
                write(self.out / "best.pt", lambda f: torch.save(state, f))
        self.save()

    def log(self, metrics):
        loss = self.losses[0] / self.losses[1] if self.losses[1] else None
        lr = self.optimizer.param_groups[0]["lr"]
        line = {"step": self.step, "epoch": self.step / self.steps, "loss": loss, "lr": lr}
        line |= {**metrics, "seconds": round(self.seconds, 2)}
        numbers = (f"{k} {v:.4g}" for k, v in line.items() if isinstance(v, float))
        say(", ".join(numbers))
        if self.world.rank == 0:
            with open(self.out / "metrics.jsonl", "ab") as f:
                f.truncate(min(self.logged, f.tell()))  # what a killed run wrote since last.pt
                f.write(json.dumps(line).encode() + b"\n")
                self.logged = f.tell()

    def show(self):
        """Loss, speed and time left: in place on a terminal, else a line now and then."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self.shown < SHOW_SECONDS[0 if terminal else 1]:
            return
        self.shown = now
        rate = (self.step - self.first) / max(now - self.began, 1e-9)
        left = (self.total - self.step) / rate if self.plan else self.budget - self.clock
        text = f"epoch {self.step / self.steps:.2f}"
        text += f" of {self.total / self.steps:.4g}" if self.plan else ""
        text += f", loss {self.losses[0] / self.losses[1]:.4f}, {rate:.2f} steps/s"
        left = f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"
        say(f"{text}, {left} left", end="\r" if terminal else "\n")

    @contextlib.contextmanager
    def alone(self):
        """Two processes must not train in one directory, each overwriting the other's files."""
        path = self.out / ".lock"
        if fcntl is None or self.world.rank:
            yield
            return
        with open(path, "w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"--out {self.out}: another process trains there") from None
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def signals(self):
        """Ctrl-C and SIGTERM ask the loop to save and stop; a second one stops at once."""

        def ask(number, frame):
            self.stop = True
            if self.world.size == 1:  # torchrun repeats the terminal's
                signal.signal(number, before[number])

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def save(self):
        """last.pt: all that the rest of the run depends on."""
        self.saved = self.clock
        state = {name: getattr(self, name) for name in (*KEPT, "average", "commits")}
        state |= {"format": FORMAT, "epoch": self.step // self.steps, "clock": self.seconds}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["random"] = self.world.gather(random_states())
        if self.world.rank == 0:
            write(self.out / "last.pt", lambda f: torch.save(state, f))

    def restore(self, state):
        path = self.out / "last.pt"
        load_weights(self.model, state.get("model"), path)
        try:
            for name in KEPT:
                setattr(self, name, state[name])
            self.clock = state["clock"]
            self.commits = list(dict.fromkeys([*state.get("commits", ()), *self.commits]))
            self.optimizer.load_state_dict(state["optimizer"])
            if self.average:
                blend(self.average, state["average"], 1.0)
            states = state["random"]
        except (KeyError, TypeError, ValueError) as e:
            raise UsageError(f"{path}: not a last.pt of this run ({e!r})") from None
        if len(states) == self.world.size:
            restore_random_states(states[self.world.rank])
        else:
            say(f"{path} is of {len(states)} processes, so random numbers are drawn anew")
            seed(self.args.seed + self.step, self.world.rank)

    def finish(self, test, **more):
        """Write and return results.json."""
        parameters = sum(p.numel() for p in self.model.parameters())
        results = {"test": test, "parameters": parameters, **more, "best": self.best}
        results |= {"steps": self.step, "epochs": self.step / self.steps}
        results["seconds"] = round(self.clock, 1)
        results["commit"] = ", ".join(filter(None, self.commits)) or None
        return write_results(self.out / "results.json", results, self.args, self.world)


def write_results(path, results, args, world):
    """Write and return results with what it takes to repeat them."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    results.setdefault("commit", commit())
    results |= {"config": configuration(args), "seed": args.seed}
    results |= {"versions": versions | {"numpy": np.__version__}, "command": sys.argv}
    results |= {"device": str(world.device), "processes": world.size}
    if world.rank == 0:
        write_json(path, results)
    world.wait()
    return results


def write_evaluation(test, args, world):
    """Write and return evaluation.json in --out, which is the --load RUN if not said otherwise."""
    path = Path(args.out) / "evaluation.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = write_results(path, {"test": test}, args, world)
    except OSError as e:
        found = json.dumps(test)
        raise UsageError(f"--out {args.out}: {e.strerror}; the test found {found}") from None
    say(f"{path} has the details")
    return results


def blend(average, state, share):
    """average ← average + share (state − average), for the entries that are not counters."""
    for name, value in state.items():
        if average[name].is_floating_point() and share < 1:
            average[name].lerp_(value, share)
        else:
            average[name].copy_(value)
