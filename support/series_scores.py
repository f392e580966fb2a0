"""How good a model of series is: its reconstructions beside rivals, its samples beside real series.

    Fig. 7, reconstructions at any time     distances_at_times; own_distances of own series
    do they stay the digit that they are    recognition
    Fig. 5, 6, samples that turn            score_samples: 1-NNA, MMD, COV; turned back; one label

The paper shows pictures only. x is `(B, T, n, d)`, as in support/series.py. A mean over series
stands with its standard error.
"""

from functools import partial

import numpy as np
import torch

import data
from support import training
from support.metrics import chamfer, sample_scores, with_error
from support.series import (
    at_times,
    full_mask,
    generator,
    is_own,
    kind_of,
    moving,
    shared_batches,
    tested_times,
)

SCORED = 200  # series that are sampled and scored, at most


# -------------------------------------------------------------------------------- reconstructions
@torch.no_grad()
def distances_at_times(model, split, args, world):
    """Chamfer distances to the true set at each of tested_times: of model, copy and floor."""
    trained, at = args.times, tested_times(args.times)
    nearest = [min(range(len(trained)), key=lambda i: abs(trained[i] - t)) for t in at]
    total = torch.zeros(3, len(at), dtype=torch.float64, device=world.device)
    draws = generator(args, world)
    three = at_times(split, [*trained, *at, *at])  # what is given, the truth, one more draw of it
    for batch in shared_batches(three, args, world, "reconstruction"):
        x, truth, again = batch.x.split([len(trained), len(at), len(at)], 1)
        made = model.reconstruct(x, trained, at, **moving(args, draws))
        for k, rival in enumerate((made, x[:, nearest], again)):
            for i in range(len(at)):  # one by one, for their (B, n, n) distances
                total[k, i] += chamfer(rival[:, i], truth[:, i]).double().sum()
    rows = (world.sum(total) / len(split)).T.tolist()
    names = ("t", "kind", "model", "copy", "floor")
    return [dict(zip(names, (t, kind_of(t, trained), *row))) for t, row in zip(at, rows)]


def mean_by_kind(rows):
    """Of the rows of distances_at_times, means over the times of a kind."""
    means = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        means[kind] = {k: sum(r[k] for r in mine) / len(mine) for k in ("model", "copy", "floor")}
    return means


@torch.no_grad()
def own_distances(model, split, args, world):
    """Mean Chamfer distances of model and copy to observed sets, and to those left out."""
    total = torch.zeros(2, 3, dtype=torch.float64, device=world.device)
    draws = generator(args, world)
    for batch in shared_batches(split, args, world, "reconstruction"):
        mask = full_mask(batch)
        batch = batch._replace(mask=mask, t=batch.t.expand(mask.shape[:2]))
        seen = mask.any(-1)
        place, sets = seen.cumsum(1), seen.sum(1, keepdim=True)  # 1 is the first observed set
        inner = seen & (place % 2 == 0) & (place < sets)
        total[0] += sum_distances(model, batch, seen, seen & (sets > 1), draws)
        total[1] += sum_distances(model, batch, seen & ~inner, inner, draws)
    means = {}
    for kind, (mine, copy, sets) in zip(("reconstruction", "interpolation"), world.sum(total)):
        if sets:
            means[kind] = {"model": (mine / sets).item(), "copy": (copy / sets).item()}
    return means


def sum_distances(model, batch, given, wanted, draws):
    """Sums over `wanted` sets (B, T) of the distances of model and copy; how many sets these are.

    Only `given` sets are seen. A reconstruction has as many points as its set.
    """
    x, mask, _, t, _ = batch
    if not wanted.any():
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    z0 = model.encode(x, t, mask & given[..., None]).mean
    made = model.decode(z0, t, x.shape[-2], draws, mask=mask & wanted[..., None])
    near = nearest(t, given)
    found = []
    for i in range(x.shape[1]):  # one by one, for their (B, n, n) distances
        rows = wanted[:, i].nonzero()[:, 0]
        true, there, other = x[rows, i], mask[rows, i], (rows, near[rows, i])
        rivals = ((made[rows, i], there), (x[other], mask[other]))
        each = [chamfer(rival, true, its, there).double().sum() for rival, its in rivals]
        found.append(torch.stack([*each, each[0].new_tensor(len(rows))]))
    return torch.stack(found).sum(0)


def nearest(t, given):
    """For each set at times t (B, T), which other one of the given sets is nearest in time."""
    gap = (t[:, :, None] - t[:, None, :]).abs()
    same = torch.eye(t.shape[1], dtype=torch.bool, device=t.device)
    return gap.masked_fill(same | ~given[:, None, :], torch.inf).argmin(-1)


# ------------------------------------------------------------------------------- digits that turn
def turned_back(x, times):
    """Digits at times t, turned by −πt: upright, if they turned as the data do."""
    back = -np.pi * np.asarray(times, np.float64)
    return torch.from_numpy(data.rotate_clockwise(x.cpu().numpy(), back)).to(x.device)


def labels_of(classifier, x, times):
    """Labels (B, T) of digits, turned back, by a classifier of sets on the unit square."""
    return classifier(turned_back(x, times) / 2 + 0.5).argmax(-1)


@torch.no_grad()
def recognition(model, classifier, split, args, world):
    """Shares of sets, turned back, that the classifier labels as the given ones, or rightly."""
    total, draws = torch.zeros(3, dtype=torch.float64, device=world.device), generator(args, world)
    digits = torch.tensor([int(name) for name in split.classes])
    labels = partial(labels_of, classifier, times=split.times)
    for x, _, label, t, _ in shared_batches(split, args, world, "recognition"):
        made = model.reconstruct(x, t, args.times, **moving(args, draws))
        given, made, true = labels(x), labels(made), digits.to(label.device)[label, None]
        pairs = ((made, given), (made, true), (given, true))
        total += torch.stack([(a == b).double().mean(-1).sum() for a, b in pairs])
    names = ("as_given", "right", "given_right")
    return dict(zip(names, (world.sum(total) / len(split)).tolist()))


def distance_turned_back(x, times):
    """Chamfer distances (B,) of the later sets of series, turned back, to the first, on average."""
    first, *later = turned_back(x, times).unbind(1)
    return torch.stack([chamfer(sets, first) for sets in later]).mean(0)


def one_label(classifier, x, times):
    """Whether series (B,) have one label at all times."""
    labels = labels_of(classifier, x, times)
    return (labels == labels[:, :1]).all(-1)


# ---------------------------------------------------------------------------------------- samples
@torch.no_grad()
def score_samples(model, split, args, world, classifier=None):
    """Samples beside as many series of a split; None for series without common times.

    The points of a sample are drawn anew at each time, as those of a real series are.
    """
    split = split.some(SCORED)
    if split.times.ndim > 1 or len(split) < 2:
        return None
    batch = next(data.batches(split, len(split), training=False, device=world.device))
    if not full_mask(batch).any(-1).all():
        return None
    x, mask, times = batch.x, batch.mask, split.times.tolist()
    how = {"generator": generator(args, world), "mask": mask}
    how["progress"] = partial(training.watch, "sampling")
    made, rows = model.sample(len(x), times, x.shape[-2], **how), []
    for i, t in enumerate(times):
        there = None if mask is None else mask[:, i]
        rows.append({"t": t, **sample_scores(made[:, i], x[:, i], there)})
    found = {"series": len(x), "prior": args.prior or "normal", "at_times": rows}
    if is_own(args):
        return found
    both = {"samples": made, "real": x}
    if len(times) > 1:
        each = {name: distance_turned_back(a, times) for name, a in both.items()}
        found["turned_back"] = {name: with_error(values) for name, values in each.items()}
    if classifier:
        each = {name: one_label(classifier, a, times) for name, a in both.items()}
        found["one_label"] = {name: with_error(values) for name, values in each.items()}
    return found


# ------------------------------------------------------------------------------------ on the screen
def show(metrics):
    """The table of a test, on stderr."""
    form = "ELBO {elbo:.4f} ± {standard_error:.4f}: log-likelihood {log_likelihood:.4f}, "
    form += "KL {kl:.1f} from the {prior} prior; {units}"
    training.say(f"test {form.format(**metrics)}")
    if (off := metrics.get("tolerance_error")) is not None:
        training.say(f"at the solver's tolerance, series are off by up to {off:.2g} nats per point")
    for i, (kind, row) in enumerate(metrics["chamfer"].items()):
        if not i:
            training.say(f"{'Chamfer distance':24}" + "".join(f"{name:>11}" for name in row))
        training.say(f"{kind:24}" + "".join(f"{value:11.5g}" for value in row.values()))
    if share := metrics.get("recognised"):
        form = "reconstructions labelled as the given sets {as_given:.3f}, rightly {right:.3f}; "
        training.say((form + "given sets rightly {given_right:.3f}").format(**share))
    scores = metrics.get("samples", {})
    for row in scores.get("at_times", ()):
        form = "samples at t = {t:g}: 1-NNA {1-NNA:.3f}, MMD {MMD:.4g}, COV {COV:.3f}"
        training.say(form.format(**row))
    for name in ("turned_back", "one_label"):
        if found := scores.get(name):
            pairs = (f"{k} {v['mean']:.4g} ± {v['standard_error']:.2g}" for k, v in found.items())
            training.say(f"{name.replace('_', ' ')}: {', '.join(pairs)}")
