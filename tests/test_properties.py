"""The paper's three properties: permutation equivariance, invariant likelihoods, invertibility.

    pytest tests/test_properties.py -k permutation    fields, and Theorem 1: ExNODE
    pytest tests/test_properties.py -k invariant      traces, likelihoods, logits, ELBO
    pytest tests/test_properties.py -k invertible     ExNODE, flows

Each is drawn by Hypothesis over fields, shapes, masks, weights and permutations, in float64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exnode import CLASSIFIERS, make_flow, make_vae, seeded, series
from test_sets import F64, SEEDS, cases, close, draw_mask, draw_order, shuffled

from exnode import DECODERS, FIELDS, ExNODE

SOLVERS = st.sampled_from([
    {"method": "rk4", "options": {"step_size": 0.1}},
    {"method": "dopri5", "rtol": 1e-5, "atol": 1e-5},
])  # fmt: skip
TIGHT = {"method": "dopri5", "rtol": 1e-7, "atol": 1e-7, "options": None}


def permuted(x, mask, seed):
    """A permutation of each set's own, and what it makes of the set and its mask."""
    torch.manual_seed(seed)
    order = draw_order(x)
    return order, shuffled(order, x), shuffled(order, mask, -1)


@st.composite
def sets(draw, batches=((), (2,), (1, 2)), dim=2):
    """Points, a mask or none, and the same in another order."""
    torch.manual_seed(draw(SEEDS))
    x = torch.randn(*draw(st.sampled_from(batches)), draw(st.integers(1, 5)), dim, dtype=F64)
    mask = draw_mask(x.shape[:-1]) if draw(st.booleans()) else None
    return x, mask, *permuted(x, mask, draw(SEEDS))


@given(cases(), SEEDS)
def test_every_field_is_permutation_equivariant_and_its_trace_invariant(case, seed):
    order, x, mask = permuted(case.x, case.mask, seed)
    close(case(x=x, mask=mask), shuffled(order, case()))
    (value, trace), (other, same) = case("value_and_trace"), case("value_and_trace", x=x, mask=mask)
    close((other, same), (shuffled(order, value), trace))


@settings(max_examples=15)
@given(cases(scale=1.0), SOLVERS, SEEDS)
def test_exnode_is_permutation_equivariant(case, solver, seed):
    """Theorem 1."""
    block, (order, x, mask) = ExNODE(case.field, 0.7), permuted(case.x, case.mask, seed)
    z = block(case.x, case.mask, case.context, solver)
    assert (z - case.x).abs().max() > 1e-3
    close(block(x, mask, case.context, solver), shuffled(order, z), 1e-8)


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=5)
@given(SEEDS, sets(), SOLVERS)
def test_likelihood_of_a_set_flow_is_permutation_invariant(field, seed, drawn, solver):
    flow, (x, mask, order, y, other) = make_flow(seed, field=field, scale=1.0), drawn
    e = torch.randn(2, *x.shape, dtype=F64)
    moved = shuffled(order.expand(2, *order.shape), e)
    exact, hutchinson = ({"trace": "exact"},) * 2, ({"noise": e}, {"noise": moved})
    for here, there in (exact, hutchinson):
        found = flow.log_prob(x, mask, solver=solver, **here)
        close(flow.log_prob(y, other, solver=solver, **there), found, 1e-8)


@pytest.mark.parametrize("name", CLASSIFIERS)
@settings(max_examples=6)
@given(SEEDS, sets())
def test_logits_of_a_classifier_are_permutation_invariant(name, seed, drawn):
    torch.manual_seed(seed)
    model, (x, mask, _, y, other) = CLASSIFIERS[name]().double().eval(), drawn
    close(model(y, other), model(x, mask))


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=5)
@given(SEEDS, st.data())
def test_posterior_and_elbo_of_series_are_permutation_invariant(decoder, seed, data):
    vae, t = make_vae(seed, decoder=decoder), series()[1]
    x, mask, _, y, other = data.draw(sets(batches=((2, 3),)))
    close(vae.encode(y, t, other), vae.encode(x, t, mask))
    close(vae.elbo(y, t, other, seeded()), vae.elbo(x, t, mask, seeded()), 1e-8)


@settings(max_examples=12)
@given(cases(scale=1.0))
def test_exnode_is_invertible(case):
    block, given = ExNODE(case.field, 0.7, **TIGHT), (case.mask, case.context)
    close(block.inverse(block(case.x, *given), *given), case.x, 1e-3)
    close(block(block.inverse(case.x, *given), *given), case.x, 1e-3)


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=4)
@given(SEEDS, sets())
def test_set_flow_is_invertible(field, seed, drawn):
    flow, (x, mask, *_) = make_flow(seed, 2, 2, field, 1.0, **TIGHT), drawn
    flow.mean.fill_(0.3), flow.std.fill_(0.8)
    assert (flow.encode(x, mask) - x).abs().max() > 1e-3
    close(flow.decode(flow.encode(x, mask), mask), x, 1e-4)
    close(flow.encode(flow.decode(x, mask), mask), x, 1e-4)
