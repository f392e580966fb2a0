"""How alike point sets are: Chamfer distance, and three scores of generated against real sets.

    chamfer(x, y) = meanᵢ minⱼ |xᵢ − yⱼ|² + meanⱼ minᵢ |xᵢ − yⱼ|²      squared, as in PointFlow

x is `(..., n, d)`, y `(..., m, d)`; masks `(..., n)` and `(..., m)` are True where a point exists.
The paper only shows pictures of its samples; the scores are those of Yang et al. (PointFlow, 2019).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def square_distances(x: Tensor, y: Tensor) -> Tensor:
    """|xᵢ − yⱼ|² `(..., n, m)`, axis by axis: exact where points nearly coincide, and fast."""
    total = 0
    for a, b in zip(x.unbind(-1), y.unbind(-1)):
        total = total + (a[..., :, None] - b[..., None, :]).square_()
    return total


def chamfer(
    x: Tensor, y: Tensor, x_mask: Tensor | None = None, y_mask: Tensor | None = None
) -> Tensor:
    """Chamfer distance of every pair of sets x and y; the leading axes broadcast."""
    d = square_distances(x, y)
    to_y = d if y_mask is None else d.masked_fill(~y_mask[..., None, :], math.inf)
    to_x = d if x_mask is None else d.masked_fill(~x_mask[..., :, None], math.inf)
    return mean(to_y.amin(-1), x_mask) + mean(to_x.amin(-2), y_mask)


def mean(x, mask):
    """Mean over the last axis, of what exists."""
    if mask is None:
        return x.mean(-1)
    return torch.where(mask, x, 0).sum(-1) / mask.sum(-1)


@torch.no_grad()
def chamfer_matrix(xs, ys, x_mask=None, y_mask=None, pairs=2**23, watch=iter):
    """Chamfer distances `(A, B)` of A sets to B sets, in pieces of about `pairs` point pairs."""
    some = max(1, pairs // (xs.shape[-2] * ys.shape[-2]))
    y_masks = [None] * -(-len(ys) // some) if y_mask is None else y_mask.split(some)
    rows = []
    for i, x in enumerate(watch(xs)):
        mine = None if x_mask is None else x_mask[i]
        parts = zip(ys.split(some), y_masks)
        rows.append(torch.cat([chamfer(x, y, mine, theirs) for y, theirs in parts]))
    return torch.stack(rows)


def sample_scores(
    samples: Tensor, real: Tensor, mask: Tensor | None = None, watch: Callable = iter
) -> dict:
    """Scores of as many generated sets as real ones, `(N, n, d)` each; watch(rows) sees progress.

    mask `(N, n)` is that of both: the samples are as large as the real sets.

    1-NNA    share of all 2N sets whose nearest other set is of their own kind: 0.5 is ideal
    MMD      mean over real sets of the distance to the nearest sample: smaller is better
    COV      share of real sets that are the nearest one of some sample: larger is better

    standard_errors are those of independent sets, which neighbours are only nearly.
    """
    if len(samples) != len(real) or len(real) < 2:
        raise ValueError(f"as many samples as real sets, at least 2: {len(samples)}, {len(real)}")
    cross = chamfer_matrix(samples, real, mask, mask, watch=watch)
    own = [chamfer_matrix(sets, sets, mask, mask, watch=watch) for sets in (samples, real)]
    own = [distances.fill_diagonal_(math.inf) for distances in own]
    near = torch.cat([own[0].amin(1) < cross.amin(1), own[1].amin(1) < cross.amin(0)])
    covered = torch.zeros(len(real), device=cross.device)
    covered[cross.argmin(1)] = 1
    found = {"1-NNA": near, "MMD": cross.amin(0), "COV": covered}
    found = {name: with_error(values) for name, values in found.items()}
    errors = {name: value["standard_error"] for name, value in found.items()}
    return {name: value["mean"] for name, value in found.items()} | {"standard_errors": errors}


def with_error(values):
    """The mean of values (N,), and its standard error."""
    values = values.double()
    error = values.std().item() / len(values) ** 0.5
    return {"mean": values.mean().item(), "standard_error": error}
