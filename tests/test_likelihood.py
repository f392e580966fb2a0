"""beyond/likelihood.py: the sampled trace against the integral that it estimates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exnode import make_flow, seeded

from beyond import likelihood
from beyond.likelihood import even_draws, sampled_log_prob

TIGHT = {"method": "dopri5", "rtol": 1e-6, "atol": 1e-6, "options": None}


def drawn(masked):
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool() if masked else None
    return x, mask


def in_calls(f, x, calls=16, copies=40):
    """The mean of f over all copies of x, and its standard error, from calls of `copies` each."""
    found = torch.stack([f(x.expand(copies, *x.shape)) for _ in range(calls)])
    return found.mean(0), found.std(0) / calls**0.5


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_of_sampled_log_densities_is_the_log_density(masked):
    flow, (x, mask) = make_flow(time=True, trace="exact", **TIGHT), drawn(masked)
    flow.standardise(3 * torch.randn(5, 6, 2, dtype=torch.float64) + 1)
    generator = seeded(1)

    def sampled(x):
        there = None if mask is None else mask.expand(x.shape[:-1])
        return sampled_log_prob(flow, x, there, generator=generator).mean(0)

    with torch.no_grad():
        (found, error), exact = in_calls(sampled, x), flow.log_prob(x, mask)
    assert ((found - exact).abs() < 4 * error).all()
    assert (error < 0.05 * exact.abs()).all()


def test_sampled_log_densities_are_those_of_a_field_whose_trace_is_constant():
    flow = make_flow(field="deepsets", trace="exact", **TIGHT)
    for block in flow.blocks:  # f = 0 but for a constant: no trace, no change of density
        for p in block.field.out.parameters():
            torch.nn.init.constant_(p, 0.3 if p.dim() == 1 else 0.0)
    x, _ = drawn(False)
    torch.testing.assert_close(sampled_log_prob(flow, x), flow.log_prob(x))


def test_the_gradient_of_a_sampled_log_density_has_the_mean_of_the_exact_one():
    flow, (x, _) = make_flow(time=True, trace="exact", gradient="backprop", **TIGHT), drawn(False)
    weight, generator = flow.blocks[0].field.out.weight, seeded(2)

    def gradient(log_p):
        return torch.autograd.grad(log_p.sum(), weight)[0]

    def sampled(x):
        return gradient(sampled_log_prob(flow, x, generator=generator).mean(0))

    (found, error), exact = in_calls(sampled, x), gradient(flow.log_prob(x))
    assert ((found - exact).abs() < 4.5 * error + 1e-9).all()
    assert (found - exact).norm() < 0.2 * exact.norm()


def test_solving_takes_no_tangents(monkeypatch):
    flow, calls = make_flow(time=True, **TIGHT), []
    for block in flow.blocks:
        jvp = block.field.value_and_jvp

        def counted(*args, jvp=jvp, **how):
            calls.append(how)
            return jvp(*args, **how)

        monkeypatch.setattr(block.field, "value_and_jvp", counted)
    sampled_log_prob(flow, drawn(False)[0])
    assert calls == [{"own": True}] * len(flow.blocks)  # one exact trace each


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 99))
def test_times_of_sets_lie_one_in_every_part_of_a_block(shape, seed):
    draws = even_draws(shape, seeded(seed))
    assert draws.shape == torch.Size(shape)
    parts = (draws.flatten() * draws.numel()).floor().long()
    assert parts.sort().values.tolist() == list(range(draws.numel()))


def test_every_time_of_a_block_is_as_likely():
    draws = torch.stack([even_draws((3,), seeded(seed)) for seed in range(600)])
    assert (draws.mean(0) - 0.5).abs().max() < 0.05
    assert (draws.var(0) - 1 / 12).abs().max() < 0.01


def test_the_trace_is_taken_where_a_solve_ends_and_never_at_an_interpolated_state(monkeypatch):
    flow, solve, ends = make_flow(time=True, **TIGHT), likelihood.ode_solve, []

    def watched(*args):
        ends.append(solve(*args)[-1])
        return ends[-1][None]

    monkeypatch.setattr(likelihood, "ode_solve", watched)
    for block in flow.blocks:
        trace = block.field.value_and_trace

        def checked(t, x, *rest, trace=trace):
            assert any(torch.equal(x, end) for end in ends)
            return trace(t, x, *rest)

        monkeypatch.setattr(block.field, "value_and_trace", checked)
    sampled_log_prob(flow, drawn(False)[0])
    assert len(ends) == 2 * len(flow.blocks)
