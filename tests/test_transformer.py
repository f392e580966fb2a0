"""What a transformer sees, against the formulas; `test_sets.py` tests it as one of all fields."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sets import F64, SEEDS, close, draw_mask
from torch import nn

from beyond.transformer import FineView, TransformerField, deepen, near
from exnode import SetFlow
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


def transformer_flow(layers):
    return SetFlow(2, 2, field=lambda dim, context: TransformerField(dim, 8, layers, 2, context))


@given(SEEDS, st.integers(1, 2), st.integers(0, 2))
def test_layers_that_are_added_change_nothing_at_first_and_then_learn(seed, known, more):
    torch.manual_seed(seed)
    short, long = transformer_flow(known).double(), transformer_flow(known + more).double()
    names = deepen(long, known)
    found = long.load_state_dict(short.state_dict(), strict=False)
    assert not found.unexpected_keys
    assert len(names) == 2 * more  # of two blocks
    assert all(key.startswith(tuple(names)) for key in found.missing_keys)
    x, t = torch.randn(3, 4, 2, dtype=F64), torch.tensor(0.3, dtype=F64)
    for a, b in zip(short.blocks, long.blocks):
        close(b.field(t, x), a.field(t, x), 1e-12)
        b.field(t, x).square().sum().backward()
        assert all(layer.narrow.weight.grad.any() for layer in b.field.layers)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TransformerField(2, 9, 2, 4), "heads must divide the width 9.*4"),
        (lambda: TransformerField(2, 0), "heads must divide the width 0"),
        (lambda: TransformerField(2, 8, 0), "layers must .*0"),
        (lambda: TransformerField(2, 8, 2, 4), "width 8 in 4 heads: each requires at least 3"),
    ],
)
def test_bad_settings_are_value_errors_that_name_them(make, says):
    with pytest.raises(ValueError, match=says):
        make()
