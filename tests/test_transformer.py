"""What a transformer sees, against the formulas; `test_sets.py` tests it as one of all fields."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sets import F64, SEEDS, close, draw_mask
from torch import nn

from beyond.transformer import CellView, FineView, TransformerField, near
from sets import split_heads


@given(st.integers(1, 3), st.integers(1, 4), SEEDS)
def test_a_transformer_s_layers_start_by_looking_near(dim, heads, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 6, dim, dtype=torch.float64, generator=rng)
    place = torch.cat([x, x.square().sum(-1, keepdim=True)], -1)
    q, k, v = near(dim, 4 * heads, heads).double()(place).chunk(3, -1)
    q, k = split_heads(q, heads), split_heads(k, heads)
    weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    a = torch.logspace(math.log10(0.3), 1, heads, dtype=torch.float64)[:, None, None]
    wanted = torch.softmax(-((a * torch.cdist(x, x)[:, None]) ** 2) / 2, -1)
    assert torch.allclose(weights, wanted, atol=1e-5)
    assert not v.any()


@given(st.integers(1, 3), st.integers(1, 5), st.floats(-0.1, 0.5), SEEDS)
def test_a_fine_view_sees_the_others_along_each_axis_and_around_a_point(dim, n, t, seed):
    torch.manual_seed(seed)
    view = FineView(dim, 4, 0.5).double()
    view.out = nn.Identity()
    x, mask = torch.randn(2, n, dim, dtype=F64), draw_mask((2, n))
    seen = view(x, torch.full((2, 1, 1), t, dtype=F64), mask).unflatten(-1, (-1, 2, dim))
    gaps = x[:, None] - x[:, :, None]  # (2, n, n, dim): from i to j
    for head, (w, axes) in enumerate(product((2, 6), [*torch.eye(dim), torch.ones(dim)])):
        u = gaps * axes / (w * (max(t, 0) / 0.5 + 0.006))
        weights = (-u.square().sum(-1) / 2).masked_fill(~mask[:, None], -math.inf).softmax(-1)
        for k, power in enumerate((u, u * u)):
            wanted = torch.einsum("bij,bijd->bid", weights, power)
            close(seen[:, :, head, k][mask], wanted[mask], 1e-8)


@given(st.integers(1, 2), st.integers(1, 4), st.floats(0.01, 0.08), SEEDS)
def test_a_view_of_cells_guesses_the_noise_of_points_that_share_none(dim, n, s, seed):
    torch.manual_seed(seed)
    view = CellView(dim, 4, 0.5, 3).double()
    view.out, view.LEAST = nn.Identity(), 0.0
    x, mask = torch.rand(2, n, dim, dtype=F64), draw_mask((2, n))
    t = torch.full((2, 1, 1), 0.5 * s, dtype=F64)
    y, sigma = 3 * x / (1 - s), 3 * s / (1 - s)  # in cells
    place = (torch.linspace(-2, 7, 9001, dtype=F64)[:-1] + 0.0005).view(9, 1000)  # nine cells
    near = (-((place - y[..., None, None]) / sigma).square() / 2).exp() + 1e-30
    r, guess = near.mean(-1), (y[..., None] - (near * place).sum(-1) / near.sum(-1)) / sigma
    cells = torch.cartesian_prod(*[torch.arange(9)] * dim).view(-1, dim)  # (9^dim, dim)
    r = torch.stack([r[:, :, k, cells[:, k]] for k in range(dim)]).prod(0)
    guess = torch.stack([guess[:, :, k, cells[:, k]] for k in range(dim)], -1)
    r = r / r.sum(-1, keepdim=True)
    free = 1 - (r * mask[..., None]).clamp(max=0.99)
    q = r * torch.stack(
        [torch.cat([free[:, :i], free[:, i + 1 :]], 1).prod(1) for i in range(n)], 1
    )
    wanted = [(p[..., None] * guess).sum(2) / p.sum(2)[..., None] for p in (r, q)]
    wanted = torch.cat(wanted, -1) * math.exp(-((4 * sigma) ** 4))
    close(view(x, t, mask)[mask], wanted[mask], 1e-3)


@given(st.integers(1, 2), st.floats(1e-4, 0.05), SEEDS)
def test_a_view_of_cells_bears_crowds_and_knows_cells_on_either_side_of_0(dim, s, seed):
    torch.manual_seed(seed)
    view = CellView(dim, 4, 0.5, 3)
    x, t = torch.rand(1, 400, dim), torch.full((1, 1, 1), 0.5 * s)
    assert view.seen(x, t).isfinite().all()
    view, x, t = view.double(), x[:, :8].double(), t.double()
    close(view.seen(x - (1 - 2 * t), t), view.seen(x, t))  # three cells further


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TransformerField(2, 9, 2, 4), "heads must divide the width 9.*4"),
        (lambda: TransformerField(2, 0), "heads must divide the width 0"),
        (lambda: TransformerField(2, 8, 0), "layers must .*0"),
        (lambda: TransformerField(2, 8, 2, 4), "width 8 in 4 heads: want more than 2"),
    ],
)
def test_bad_settings_are_value_errors_that_name_them(make, says):
    with pytest.raises(ValueError, match=says):
        make()
