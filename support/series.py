"""Series of ragged sets: masks, their Chamfer distances to rivals, and their points in pictures.

x is `(B, T, n, d)`; t is `(T,)` or `(B, T)`; mask is `(B, T, n)`, True where a point exists, all
False for a set that was not observed. A batch is that of support/splits.py.
"""

import numpy as np
import torch

from support.metrics import chamfer


def full_mask(batch):
    """The mask of a batch, also where all points exist."""
    return torch.ones_like(batch.x[..., 0]).bool() if batch.mask is None else batch.mask


def count_points(batch):
    """Points that exist in each series, `(B,)`."""
    return full_mask(batch).sum((1, 2))


def as_mask(sizes, times):
    """The mask `(B, T, n)` of series whose sets have these numbers of points `(B,)`."""
    mask = torch.arange(int(sizes.max())) < torch.from_numpy(sizes)[:, None]
    return mask[:, None].repeat(1, times, 1)


def shown_mask(mask):
    """None for a mask that leaves nothing out."""
    return None if mask.all() else mask


def with_nan(x, mask):
    """x as a numpy array, NaN where there is no point."""
    return x.masked_fill(~mask[..., None], torch.nan).cpu().numpy()


def observed_series(batch):
    """For each series of a batch its observed times, and the sets there, NaN for no point."""
    mask = full_mask(batch)
    x, t = with_nan(batch.x, mask), batch.t.expand(mask.shape[:2])
    seen = mask.any(-1).cpu()
    return [(t[i].cpu()[seen[i]].tolist(), x[i][seen[i].numpy()]) for i in range(len(x))]


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


def as_seen(x, middle):
    """The points of a set (n, d) as pictures show them, in two or three axes; None if none."""
    x = (x - middle)[~np.isnan(x).any(-1), :3]
    x = np.pad(x, ((0, 0), (0, 1))) if x.shape[-1] == 1 else x
    return x if len(x) else None


def window(*sets):
    """The mean of all points, and (−a, a) about it that holds all but a hundredth, with room."""
    points = np.concatenate([s.reshape(-1, s.shape[-1]) for s in sets])
    middle = np.nanmean(points, 0)
    a = 1.2 * float(np.nanquantile(np.abs(points - middle), 0.99)) or 1.0
    return middle, (-a, a)
