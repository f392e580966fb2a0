"""The process that trains, alone or among others: exit codes, signals, memory, torchrun, seeds.

Exit codes: 0 done, 1 training failed, 2 wrong usage or data, 130 interrupted and saved.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from solvers import SolverError
from support.options import PROJECT, UsageError
from support.progress import doing, pulse, say


class TrainingError(RuntimeError):
    """Training cannot go on: what, where, and which checkpoint is good; exit code 1."""


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal, after saving; exit code 130."""


def check_memory(need, world, what):
    """An error, before memory is full, if `need` bytes are more than the machine has."""
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


@contextlib.contextmanager
def interruptible():
    """SIGTERM is Ctrl-C: both raise KeyboardInterrupt, wherever the process is."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(main, usage=()):
    """Run a script's main() and return its exit code; exceptions in `usage` are the user's."""
    name = Path(sys.argv[0]).name
    keep_memory()
    torch.set_flush_denormal(True)  # or the tails of sharp attention take a third of a CPU's time
    try:
        with interruptible(), pulse(), doing(name):
            main()
    except (UsageError, *usage) as e:
        say(f"{name}: {e}")
        return 2
    except (TrainingError, SolverError, FloatingPointError, OSError) as e:
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


@functools.cache
def commit():
    """The version of this code as the process starts: a commit, + if files have changed since."""
    git = ("git", "-C", str(PROJECT))
    try:
        head = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL)
        changes = subprocess.check_output([*git, "status", "--porcelain", "-uno"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.decode().strip() + ("+" if changes else "")


@dataclass(frozen=True)
class World:
    """This process among those that train together, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1
    amp: bool = False

    def autocast(self):
        """With --amp, matrix products in bfloat16 within."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    @property
    def share(self):
        """What data.batches asks of this process."""
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
    amp = getattr(args, "amp", False) and has_bfloat16(device)
    if getattr(args, "amp", False) and not amp:
        say(f"--amp: this {device.type} has no bfloat16, so all is computed in float32")
    return World(device, rank, size, amp)


def has_bfloat16(device):
    """Whether a device multiplies in bfloat16 by instructions of its own, not by emulation."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()  # by the names that x86 and ARM have for it
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


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
