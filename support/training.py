"""What all experiments share: processes, the run directory, checkpoints, the loop, exit codes.

    python train_x.py …                      one process; Ctrl-C or SIGTERM saves and exits
    python train_x.py --resume --out RUN     goes on where it stopped, bit for bit on a CPU
    torchrun --nproc-per-node 8 train_x.py … 8 processes share every batch

A run directory holds config.json (the options), metrics.jsonl (a line per evaluation), last.pt
(everything needed to go on), best.pt (weights and options of the best evaluation) and, at the end,
results.json; --evaluate adds evaluation.json. Files appear whole or not at all, and one process has
the directory to itself from the first look at it until results.json is there.

A script brings a model, a loss and an evaluation; `Run.fit` is the loop, and knows no more of them.
Exit codes (`command`): 0 done, 1 training failed, 2 wrong usage or data, 130 interrupted and saved.

Decisions
- The learning rate is a function of progress in [0, 1], set before every step. Progress is steps
  done / steps planned. With --minutes it is the share of the time until a twentieth has passed;
  then the measured speed gives the number of steps, and again at a quarter, half and so on (PLANS),
  because machines slow down. Such a run depends on the clock: another one has another plan.
- Several processes compute what one would with the same total batch: gradients are averaged
  (DistributedDataParallel), and batch normalisation uses the statistics of all processes: a module
  with an attribute `total` has it set to the sum over processes (torch's SyncBatchNorm requires a
  GPU). The order of sums differs, so the last digits do; and dropout or noise is drawn per process,
  so there only the distribution is the same.
- All processes read last.pt, so several machines need a common file system. torchrun has its own
  exit codes: 1 whenever a process failed.
- Files of a run may come from anywhere: nothing in them is executed, and whatever does not fit is
  one line. Weights that are not finite are neither saved nor loaded.
"""

import contextlib
import copy
import json
import math
import os
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solvers import SolverError
from support.checkpoints import (
    check_weights,
    curve,
    directory,
    load_best,
    load_last,
    load_model,
    load_weights,
    make_folder,
    read_checkpoint,
    read_metrics,
    read_sets,
    test_quantiles,
    write_checkpoint,
    write_evaluation,
    write_json,
    write_results,
    write_sets,
    write_table,
)
from support.options import OPTIMIZERS, UsageError, configuration, read_config
from support.processes import (
    AllSum,
    Interrupted,
    TrainingError,
    World,
    check_memory,
    command,
    commit,
    connect,
    random_states,
    restore_random_states,
    seed,
)
from support.progress import doing, duration, say, watch

__all__ = [  # what the scripts use from here beside what is defined here
    "UsageError", "World", "check_memory", "command", "connect", "curve", "directory", "load_best",
    "load_last", "load_model", "load_weights", "make_folder", "read_checkpoint", "read_config",
    "read_sets", "say", "test_quantiles", "watch", "write_evaluation", "write_sets", "write_table",
]  # fmt: skip
PLANS = (0.05, 0.25, 0.5, 0.75, 0.9)  # progress at which --minutes fixes the number of steps
SAVE_SECONDS = 300  # between checkpoints within an epoch
SHOW_SECONDS = (0.5, 30)  # between progress lines: on a terminal, elsewhere
LONG_SECONDS = 600  # a run that takes longer is announced after its first step
KEPT = (  # numbers of a Run that its checkpoint holds
    "step", "evaluated", "best", "losses", "plan", "evaluating", "logged",
)  # fmt: skip


# -------------------------------------------------------------------------------------- schedules
def schedule(name, intervals):
    """Share of the largest learning rate at a progress from 0 to 1; "halve" has intervals."""
    return {"halve": halve(intervals), "one-cycle": one_cycle}[name]


def halve(intervals):
    """Half as large in each of `intervals` equal intervals as in the one before."""
    return lambda progress: 0.5 ** min(int(progress * intervals + 1e-9), intervals - 1)


def one_cycle(progress, warm=0.15):
    """From 1/25 up to 1 in the first 15 %, then down to 0, both along a cosine."""
    if progress < warm:
        return 1 - 0.96 * (1 + math.cos(math.pi * progress / warm)) / 2
    return (1 + math.cos(math.pi * (progress - warm) / (1 - warm))) / 2


# ------------------------------------------------------------------------------------------ a run
def begin(args, world, make, start, steps, intervals, groups=None):
    """The Run that the options describe, from its last checkpoint if it has one.

    make()        the model; start(model) gives it its first weights, if they are not random
    steps         batches per epoch
    intervals     of the schedule "halve"
    groups        groups(model, lr): its parameters as an optimiser takes them; if None, all alike
    """
    if args.decay and args.optimizer != "muon":
        raise UsageError("argument --decay: only with --optimizer muon")
    check_size(make, world)
    seed(args.seed)
    model = make()
    if not (Path(args.out) / "last.pt").exists():
        start(model)
    model.to(world.device)
    params = groups(model, args.lr) if groups else model.parameters()
    decay = {"decay": args.decay} if args.optimizer == "muon" else {}
    optimizer = OPTIMIZERS[args.optimizer](params, lr=args.lr, **decay)
    settings = {"ema": args.ema, "every": args.every, "clip": getattr(args, "clip", None)}
    falling = schedule(args.schedule, intervals)
    return Run(args, world, model, optimizer, falling, steps, **settings)


def check_size(make, world):
    """An error if weights, gradients and the two averages of Adam do not fit in memory."""
    with torch.device("meta"):
        size = sum(p.numel() for p in make().parameters())
    check_memory(16 * size, world, f"a model with {size:,} parameters")


def in_directory(args, train, number):
    """train(args, world) in --out, which this process has to itself; --runs K: for K seeds.

    What is returned are results: those of a run that is complete already, new ones, or of several.
    number: that of the test which says that results are those of such a run.
    """
    if args.runs > 1:
        return several(args, lambda one: in_directory(one, train, number), number)
    world = connect(args)
    with directory(args, world, number) as results:
        return results or train(args, world)


def several(args, train, number):
    """--runs K: mean and standard deviation of a number of the test over seeds."""
    world = connect(args)
    with directory(args, world, number) as results:
        if results:
            return results
        runs = []
        for k in range(args.seed, args.seed + args.runs):
            one = copy.copy(args)
            one.seed, one.out, one.runs = k, str(Path(args.out) / f"seed{k}"), 1
            runs.append(train(one))
            say(f"seed {k}: {number} {runs[-1]['test'][number]:.4f}, in {one.out}")
        values = [run["test"][number] for run in runs]
        results = {"mean": statistics.mean(values), "std": statistics.stdev(values)}
        say(f"test {number} {results['mean']:.4f} ± {results['std']:.4f}, {args.runs} runs")
        results |= {number: values, "runs": runs}
        if world.rank == 0:
            write_json(Path(args.out) / "results.json", results)
    return results


@torch.no_grad()
def renew_statistics(model, batches, forward):
    """Batch normalisation's running statistics anew, as means over `batches` of forward(model, b).

    Those of training lag behind the weights, and those of averaged weights were never theirs.
    """
    norms = [module for module in model.modules() if hasattr(module, "running_mean")]
    if not norms:
        return
    before, mode = [norm.momentum for norm in norms], model.training
    model.train()
    for i, batch in enumerate(batches):
        for norm in norms:
            norm.momentum = 1 / (i + 1)
        forward(model, batch)
    for norm, momentum in zip(norms, before):
        norm.momentum = momentum
    model.train(mode)


class Objective(nn.Module):
    """The loss as a module: DistributedDataParallel only sees what goes through forward."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch):
        return self.loss(self.model, batch)


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
        self.part = "step"  # of the loop: or an evaluation
        self.commits = [commit()]  # one, or several where a run went on with changed code
        if world.size > 1:
            for module in model.modules():
                if hasattr(module, "total"):
                    module.total = AllSum.apply
            seed(args.seed, world.rank)
        if args.resume and os.path.lexists(self.out / "last.pt"):
            self.restore(read_checkpoint(self.out / "last.pt"))
        self.first, self.saved, self.saved_step = self.step, self.clock, self.step
        self.began = self.shown = time.monotonic()
        self.started = self.began - self.clock

    seconds = property(lambda self: time.monotonic() - self.started)
    total = property(lambda self: self.plan[2] if self.plan else math.inf)
    plans = property(lambda self: sum(p <= self.plan[1] for p in PLANS) if self.plan else 0)

    @property
    def interval(self):
        """Steps from one evaluation to the next; `looks` of them in a run shorter than --every."""
        return self.every if self.every <= self.total else max(self.total // self.looks, 1)

    @property
    def looks(self):
        """Evaluations in a short run: ten, or those that fit into a fifth of its minutes."""
        if not self.budget or not self.evaluating:
            return 10
        return min(max(int(0.2 * self.budget / self.evaluating), 1), 10)

    def fit(self, loss, batches, evaluate, best, keep="best", advice=""):
        """Train for the planned steps, then load the weights of the best evaluation, or the last.

        loss(model, batch)     mean over the sets of a batch
        batches(epoch, start)  this process's share of an epoch's batches, from number `start` on
        evaluate(model)        {name: number} on held-out sets, equal in all processes; the run
                               keeps the weights with the largest number called `best`, or
                               with keep="last" those that it evaluated last
        advice                 what to do if the run would take long
        """
        objective = partial(loss, self.model)
        if self.world.size > 1:  # a loss may leave parameters out, such as those of the last update
            objective = Objective(self.model, loss)
            objective = DistributedDataParallel(objective, find_unused_parameters=True)
        with self.signals():
            while self.step < self.total or self.evaluated < self.step:
                if self.evaluated < self.step and self.due():
                    self.evaluate(evaluate, best, keep)
                    continue
                for batch in batches(*divmod(self.step, self.steps)):
                    self.advance(objective, batch, advice)
                    if self.due():
                        break
        state = read_checkpoint(self.out / "best.pt")
        load_weights(self.model, state.get("model"), self.out / "best.pt")
        self.best_step = state.get("step")
        if self.best_step == 0:
            say("no evaluation was better than that of step 0: what is tested was not trained here")
        self.model.eval()

    def due(self):
        """Whether an evaluation belongs here."""
        return self.step % self.interval == 0 or self.step == self.total

    def progress(self):
        if self.plan is None:
            return min(self.clock / self.budget, 1.0)
        step, progress, total = self.plan
        return progress + (1 - progress) * (self.step - step) / max(total - step, 1)

    def advance(self, objective, batch, advice):
        """One step, and whatever is due after it."""
        try:
            with doing(f"step {self.step + 1}" + (f" of {self.total}" if self.plan else "")):
                loss, self.clock, stop = self.update(objective, batch)
        except (ArithmeticError, RuntimeError, ValueError) as e:
            lr, epoch = self.optimizer.param_groups[0]["lr"], self.step // self.steps + 1
            self.fail(e, f"at step {self.step + 1} (epoch {epoch}), learning rate {lr:g}")
        self.step, self.losses = self.step + 1, (self.losses[0] + loss, self.losses[1] + 1)
        if self.step == self.first + 1:
            self.announce(advice)
        if self.budget:
            self.make_plan()
        self.show()
        if stop or self.clock - self.saved > SAVE_SECONDS:
            self.save()
        if stop:
            where = f"step {self.step}, saved in {self.out / 'last.pt'}"
            raise Interrupted(f"interrupted at {where}; the same command with --resume goes on")

    def announce(self, advice):
        """After the first step: how long the run will take, if that is long."""
        each = time.monotonic() - self.began - self.paused
        steps = self.total - self.first
        whole = steps * (each + self.evaluating / self.interval)
        if whole > LONG_SECONDS and not self.budget:
            text = f"a step takes {duration(each)}, so {steps:,} steps take about {duration(whole)}"
            say(f"{text}; {advice}" if advice else text)

    def fail(self, error, where):
        """End training with one line, after a traceback if the error is of no known kind."""
        known = isinstance(error, FloatingPointError | SolverError | UsageError)
        proven = self.out / ("last.pt" if self.step > self.saved_step else "best.pt")
        good = f"the last good checkpoint is {proven}"
        if not proven.exists():
            good = "no checkpoint is good"
        elif proven.name == "best.pt":
            good += f", and --finetune {self.out} starts from it"
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
        with self.world.autocast():  # for the products of Muon
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
        each, left = taken / (measured or self.step), self.budget - self.clock - self.evaluating
        more = int(left / (each + self.evaluating / self.every))
        if self.step + more < self.every:  # then as many evaluations as `interval` has
            more = int((left - (1 - self.progress()) * self.looks * self.evaluating) / each)
        self.plan = (self.step, self.progress(), self.step + max(more, 0))
        self.probe = (self.step, trained)

    def evaluate(self, evaluate, best, keep):
        """A line in metrics.jsonl, and best.pt if it is the best so far, or the last is kept."""
        self.save()  # an evaluation may fail
        begun, where = time.monotonic(), f"evaluation after step {self.step}"
        self.part = "evaluation"
        weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        if self.average:  # evaluate the average in place of the weights
            self.model.load_state_dict(self.average)
        try:
            with torch.no_grad(), doing(where):
                metrics = evaluate(self.model.eval())
                if odd := [f"{k} {v}" for k, v in metrics.items() if not math.isfinite(v)]:
                    raise FloatingPointError(f"not finite: {', '.join(odd)}")
        except (ArithmeticError, RuntimeError, ValueError) as e:
            self.fail(e, f"in the {where}")
        kept = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        self.model.train()
        self.part = "step"
        taken = torch.tensor(time.monotonic() - begun, dtype=torch.float64)
        self.evaluating = self.world.sum(taken).item() / self.world.size
        self.paused += self.evaluating
        self.log(metrics)
        self.evaluated, self.losses = self.step, (0.0, 0)
        if keep == "last" or metrics[best] > self.best:
            self.best = metrics[best]
            self.write_best(kept, metrics)
        self.save()
        if self.world.sum(torch.tensor(float(self.stop))).item():
            where = f"{where}, saved in {self.out / 'last.pt'}"
            raise Interrupted(f"interrupted at the {where}; the same command with --resume goes on")

    def write_best(self, weights, metrics):
        state = {"model": weights, "step": self.step, "metrics": metrics}
        if self.world.rank == 0:
            write_checkpoint(self.out / "best.pt", state | {"config": configuration(self.args)})

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
                f.seek(0, os.SEEK_END)
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
    def signals(self):
        """Ctrl-C and SIGTERM ask the loop to save and stop; a second one stops at once."""

        def ask(number, frame):
            self.stop = True
            if self.world.rank == 0:  # not by print, which this may have interrupted
                os.write(2, f"\nstopping after this {self.part}; again to stop now\n".encode())
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
        weights = self.model.state_dict()
        for name, value in [*weights.items(), *(self.average or {}).items()]:
            if not value.isfinite().all():
                self.fail(FloatingPointError(f"{name} is not finite"), f"after step {self.step}")
        state = {name: getattr(self, name) for name in (*KEPT, "average", "commits")}
        state |= {"clock": self.seconds, "model": weights}
        state["optimizer"] = self.optimizer.state_dict()
        state["random"] = self.world.gather(random_states())
        if self.world.rank == 0:
            write_checkpoint(self.out / "last.pt", state)
        self.saved, self.saved_step = self.clock, self.step

    def restore(self, state):
        """All that last.pt holds; whatever does not fit this run is one line."""
        path = self.out / "last.pt"
        load_weights(self.model, state.get("model"), path)
        if self.average:
            check_weights(state.get("average"), self.average, path)
            blend(self.average, state["average"], 1.0)
        try:
            self.check(state)
            for name in (*KEPT, "clock"):
                setattr(self, name, state[name])
            self.commits = list(dict.fromkeys([*state.get("commits", ()), *self.commits]))
            self.optimizer.load_state_dict(state["optimizer"])
            rehearse(self.optimizer)
            states = state["random"]
            if not isinstance(states, list) or not states:
                raise ValueError("no states of random numbers")
            if len(states) == self.world.size:
                restore_random_states(states[self.world.rank])
        except Exception as e:  # the file may hold anything
            reason = f"{type(e).__name__}: {e}".splitlines()[0][:120]
            raise UsageError(f"{path}: not a last.pt of this run ({reason})") from None
        read_metrics(self.out, self.logged)  # a mistake shows before training
        if len(states) != self.world.size:
            say(f"{path} is of {len(states)} processes, so random numbers are drawn anew")
            seed(self.args.seed + self.step, self.world.rank)

    def check(self, state):
        """An error if the numbers in last.pt cannot be those of this run."""
        step, plan, (loss, count) = state["step"], state["plan"], state["losses"]
        both = self.optimizer.state_dict(), state["optimizer"]
        groups = list(zip(*(part["param_groups"] for part in both), strict=True))
        fits = {
            "plan": plan == self.plan or (self.budget and between(plan[0], 0, plan[2], int)
                                          and between(plan[1], 0, 1)),
            "step": between(step, 0, plan[2] if plan else 2**53, int),
            "evaluated": between(state["evaluated"], -1, step, int),
            "losses": between(loss) and between(count, 0, step, int),
            "best": state["best"] == -math.inf or between(state["best"]),
            "evaluating": between(state["evaluating"], 0),
            "logged": between(state["logged"], 0, 2**53, int),
            "clock": between(state["clock"], 0),
            "random": all(isinstance(states, dict) for states in state["random"]),
            "commits": all(isinstance(c, str | None) for c in state.get("commits", ())),
            "optimizer": all(b.get(k, v) == v for a, b in groups
                             for k, v in a.items() if k not in ("lr", "initial_lr")),
        }  # fmt: skip
        if wrong := [name for name, right in fits.items() if not right]:
            raise ValueError(f"impossible {', '.join(wrong)}")

    def finish(self, test, **more):
        """Write and return results.json; test is None for a run that others go on from."""
        parameters = sum(p.numel() for p in self.model.parameters())
        results = {} if test is None else {"test": test}
        results |= {"parameters": parameters, **more, "best": self.best}
        results |= {"best_step": self.best_step, "steps": self.step}
        results |= {"epochs": self.step / self.steps, "seconds": round(self.clock, 1)}
        results["commit"] = ", ".join(filter(None, self.commits)) or None
        return write_results(self.out / "results.json", results, self.args, self.world)


def between(value, low=-math.inf, high=math.inf, kind=(int, float)):
    """Whether this is a finite number of that kind within these limits."""
    number = isinstance(value, kind) and not isinstance(value, bool)
    return number and math.isfinite(value) and low <= value <= high


def rehearse(optimizer):
    """Let a copy of the optimiser take a step: a state that is not its own shows here."""
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    twin.step()
    for p, state in twin.state.items():
        if not all(torch.as_tensor(v).isfinite().all() for v in (p, *state.values())):
            raise ValueError("the optimiser's state is not finite")


def blend(average, state, share):
    """average ← average + share (state − average), for the entries that are not counters."""
    for name, value in state.items():
        if average[name].is_floating_point() and share < 1:
            average[name].lerp_(value, share)
        else:
            average[name].copy_(value)
