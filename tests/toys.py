"""A small model of batch normalisation and dropout, and what a run of it leaves behind."""

import argparse
import json
import os
import signal

import torch
from torch import nn

from support import training

STEPS = 5  # per epoch
ONE = training.World(torch.device("cpu"))


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


def fit(run, loss=toy_loss, evaluate=toy_evaluate):
    run.fit(loss, toy_batches, evaluate, best="score")
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
