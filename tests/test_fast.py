"""The fast fields against the plain ones of `sets.py`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sets import F32, F64, SEEDS, close, draw_mask
from torch.nn.attention import SDPBackend, sdpa_kernel

from beyond.fast import FastAttentionField, FastDeepSetsField, attend_in_parts
from sets import AttentionField, DeepSetsField, PointNorm, attend

HIDDEN = st.sampled_from([(6,), (8, 6), (8, 7, 6)])
TIMES = st.sampled_from(["number", "one", "each"])


def pair(name, dim, hidden, time, context):
    """A plain field and the fast one with its weights."""
    kinds, heads = (DeepSetsField, FastDeepSetsField), {}
    if name == "attention":
        kinds, heads = (AttentionField, FastAttentionField), {"heads": 2}
    fields = [kind(dim, hidden, time=time, context=context, **heads) for kind in kinds]
    assert [*fields[0].state_dict()] == [*fields[1].state_dict()]
    with torch.no_grad():
        for p in fields[0].parameters():
            p.mul_(1.5)
    fields[1].load_state_dict(fields[0].state_dict())
    return fields


def outputs(field, t, x, e, mask, context):
    """Value, tangents with value, and trace with value."""
    return (
        field(t, x, mask, context),
        *field.value_and_jvp(t, x, e, mask, context),
        *field.value_and_trace(t, x, mask, context),
    )


def with_gradients(field, t, x, e, mask=None, context=None):
    """All outputs, and the gradients of each in every input and parameter."""
    inputs = [a for a in (x, e, t, context) if isinstance(a, torch.Tensor)]
    inputs = [a.requires_grad_() for a in inputs] + [*field.parameters()]
    found = outputs(field, t, x, e, mask, context)
    every = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = [torch.autograd.grad((out + out**3 / 9).sum(), inputs, **every) for out in found]
    return [out.detach() for out in found], grads


@st.composite
def calls(draw, dtype):
    """A plain and a fast field, and what both are called with."""
    name = draw(st.sampled_from(["attention", "max"]))
    n, dim = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 3)]))
    time, context, kind = draw(st.booleans()), draw(st.sampled_from([0, 2])), draw(TIMES)
    torch.manual_seed(draw(SEEDS))
    fields = [field.to(dtype) for field in pair(name, dim, draw(HIDDEN), time, context)]
    x = torch.randn(*batch, n, dim, dtype=dtype)
    e = torch.randn(draw(st.integers(1, 3)), *x.shape, dtype=dtype)
    t = 0.3 if kind == "number" else torch.rand(() if kind == "one" else batch, dtype=dtype)
    mask = draw_mask((*batch, n)) if draw(st.booleans()) else None
    return fields, (t, x, e, mask, torch.randn(*batch, 2, dtype=dtype) if context else None)


@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-10), (F32, 2e-3)])
@given(st.data())
def test_fast_fields_have_the_values_traces_tangents_and_gradients_of_the_plain_ones(
    dtype, tol, data
):
    (plain, fast), given = data.draw(calls(dtype))
    close(with_gradients(fast, *given), with_gradients(plain, *given), tol)


@pytest.mark.parametrize(("sets", "n"), [(5, 300), (2, 750)])  # pieces of sets, then of heads
def test_attention_in_several_pieces_is_that_in_one(sets, n):
    plain, fast = (field.double() for field in pair("attention", 2, (8, 6), False, 0))
    x, mask = torch.randn(sets, n, 2, dtype=F64), draw_mask((sets, n))
    given = 0.3, x, torch.randn(2, *x.shape, dtype=F64), mask
    close(with_gradients(fast, *given), with_gradients(plain, *given))


@pytest.mark.parametrize("name", ["attention", "max"])
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_are_those_of_the_plain_fields(name, masked):
    fields = [field.double() for field in pair(name, 2, (8, 6), True, 0)]
    x, v, w = torch.randn(3, 2, 5, 2, dtype=F64)
    e, mask = torch.randn(2, 2, 5, 2, dtype=F64), draw_mask((2, 5)) if masked else None
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivatives
        plain, fast = (second_derivatives(field, x, e, v, w, mask) for field in fields)
    assert all(part.abs().max() > 0.1 for part in fast[:3])
    close(fast, plain)


def second_derivatives(field, x, e, v, w, mask):
    """J v by two reverse passes; then gradients of the gradients in x and e."""

    def f(x, e=e):
        return torch.cat([y.flatten() for y in outputs(field, 0.3, x, e, mask, None)])

    inputs = [a.clone().requires_grad_() for a in (x, e)]
    gx, ge = torch.autograd.grad(f(*inputs).square().sum(), inputs, create_graph=True)
    inputs += field.parameters()
    loss = (gx * w).sum() + ge.square().sum()
    again = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return torch.autograd.functional.jvp(f, x, v)[1], *again


def test_exact_trace_keeps_no_matrix_of_pairs_for_backward():
    field, n, kept = FastAttentionField(3, 16, heads=2), 64, {}
    pack = lambda x: kept.setdefault((x.data_ptr(), x.shape), x)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        field.value_and_trace(0, torch.randn(1, n, 3, requires_grad=True))
    assert kept
    assert all(x.shape[-2:] != (n, n) for x in kept.values())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["attention", "max"])
def test_under_autocast_fields_and_gradients_are_right_but_for_rounding(name, masked):
    torch.manual_seed(0)
    plain, fast = pair(name, 16, (32, 32), False, 0)
    x = torch.randn(4, 9, 16)
    mask = draw_mask((4, 9)) if masked else None

    def value_and_gradients(field, autocast):
        field.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = field(0.0, x, mask)
        (out.float() ** 2).sum().backward()
        return out.float(), torch.cat([p.grad.flatten() for p in field.parameters()])

    exact = value_and_gradients(plain, False)
    for field in (plain, fast):
        for found, wanted in zip(value_and_gradients(field, True), exact):
            assert 0 < (found - wanted).norm() < 0.02 * wanted.norm()


@given(
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5), st.integers(1, 400), st.booleans()
)
def test_attention_in_parts_is_that_of_all_sets_at_once(batch, n, cached, masked):
    q, k, v = (torch.randn(*batch, 2, m, 3, dtype=F64) for m in (4, n, n))
    mask = draw_mask((*batch, n)) if masked else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("beyond.fast.CACHED", cached)
        found = attend_in_parts(q, k, v, mask)
    torch.testing.assert_close(found, attend(q, k, v, mask))


def test_under_autocast_masked_batch_normalisation_sums_in_float32():
    torch.manual_seed(0)
    norms = PointNorm(3), PointNorm(3)
    x, mask = 5 + torch.randn(8, 100, 3), draw_mask((8, 100))
    exact = norms[0](x, mask)
    found = norms[1](x.bfloat16(), mask)
    assert (found - exact)[mask].abs().max() < 0.03  # of x in bfloat16
    torch.testing.assert_close(norms[1].running_mean, norms[0].running_mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(norms[1].running_var, norms[0].running_var, atol=1e-3, rtol=0)
