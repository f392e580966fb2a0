"""A set flow at work, as the options of its run say: conditions, solvers, log p of sets, samples.

Every function reads the options, `args`, of `train_flow.py`.
"""

from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

import data
import exnode
from sets import count
from solvers import METHODS
from support import training

SAMPLE_STEPS = 4  # of rk4, in the whole chain or one per block, for samples after matching
EXPLODED = 1e4  # deviations of the data, beyond which no point of a sample can be


def read_run(args):
    """The model with the best weights of --load RUN."""
    kind = exnode.SetFlow, "of a set flow"
    return training.load_model("--load", args.load, exnode.load, *kind)


def condition(args, model, batch):
    """What a flow is conditioned on, `(B, c)`: labels as one-hot vectors, the context, or None."""
    if args.condition == "label":
        classes = model.blocks[0].field.context
        if batch.label.max() >= classes:
            raise training.UsageError(f"--load {args.load}: has {classes} classes, the sets more")
        return F.one_hot(batch.label, classes).to(batch.x.dtype)
    return batch.context if args.condition else None


def dopri5(tolerance):
    """The solver of all evaluations."""
    return {"method": "dopri5", "rtol": tolerance, "atol": tolerance}


def sampler(args):
    """The solver of samples: dopri5, or for a flow trained by matching a few steps of rk4.

    Those are SAMPLE_STEPS, or one for each block of a longer chain. Steps even in t come as close
    to the solution as dopri5 at 1e-3 does: benchmarks/sampling.py.
    """
    if args.objective != "matching":
        return dopri5(args.tolerance)
    steps = -(-SAMPLE_STEPS // args.blocks)  # in each block
    return {"method": "rk4", "options": {"step_size": 0.5 / steps}}


def test_trace(args):
    """The trace of evaluations: --trace, or the exact one where that is cheap."""
    usual = "hutchinson" if args.field == "transformer" else "exact"
    return {"trace": args.trace if args.trace in exnode.TRACES else usual, "probes": args.probes}


def check_memory(args, world, points, sets=1, whole=0, *, training_too=False, pairs=False):
    """Estimated peak bytes for `sets` sets of `points` points; pairs: attention's exact trace.

    whole: numbers of the output, beside them. Backpropagation keeps 20 evaluations by dopri5.
    """
    kept = (12 + 4 * args.probes) * max(args.hidden)  # numbers per point
    if training_too:
        kept = (26 + 4 * args.probes) * sum(args.hidden) + 3 * args.spare
    if training_too and args.objective == "likelihood" and args.gradient == "backprop":
        evaluations = 20 if args.method == "dopri5" else len(METHODS[args.method].b) * args.steps
        kept = max(kept, 2.5 * sum(args.hidden) * args.blocks * evaluations)
    need = 4 * (whole + sets * points * kept + 8 * pairs * points**2)
    training.check_memory(need, world, f"{sets} sets of {points} points at once")


@torch.no_grad()
def log_probs(args, model, split, world, solver, stats=None, wrong=False):
    """log p per point of each set of a split; wrong: conditioned on what belongs to another set."""
    how = {"generator": torch.Generator(world.device).manual_seed(world.rank), "stats": stats}
    how |= {"solver": solver, **test_trace(args)}
    batches = data.batches(split, args.batch_size, training=False, workers=1, **world.share)
    total, parts = data.steps(split, args.batch_size, training=False), []
    for batch in training.watch("likelihood", batches, total):
        given = condition(args, model, batch)
        given = given.roll(1, -1 if args.condition == "label" else 0) if wrong else given
        log_p = model.log_prob(batch.x, batch.mask, given, **how).double()
        parts.append((log_p / count(batch.x, batch.mask)).tolist())
    values = np.empty(len(split))
    for rank, mine in enumerate(world.gather(parts)):
        for k, part in enumerate(mine):  # as data.batches shares a batch
            values[k * args.batch_size : (k + 1) * args.batch_size][rank :: world.size] = part
    return values + split.log_unit


def draw_sets(args, model, sets, points, mask=None, context=None):
    """`(sets, points, d)` samples by --seed, the same on any device."""
    how = {"solver": sampler(args), "progress": partial(training.watch, "sampling")}
    noise = torch.Generator().manual_seed(args.seed)
    x = model.sample(sets, points, noise, context, mask, **how)
    far = model.to_units(x, mask).abs().max().item()
    if not far < EXPLODED:  # fixed steps, unlike dopri5, do not notice
        raise FloatingPointError(f"samples lie up to {far:.3g} deviations from the data's mean")
    return x


def draw_like(args, model, split):
    """All sets of a split, their mask, and as many samples of the same sizes and conditions."""
    batch = split.batch(device=model.mean.device)
    given = condition(args, model, batch)
    made = draw_sets(args, model, len(split), batch.x.shape[1], batch.mask, given)
    return batch.x, batch.mask, made
