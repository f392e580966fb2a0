"""muon.py against the singular value decomposition and torch's Adam."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beyond.muon import LONG, SHORT, Muon, orthogonal


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1e-6, 1e6), st.integers(0, 2**31))
def test_the_step_has_the_directions_of_the_matrix_and_singular_values_about_one(m, n, scale, seed):
    g = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(m, n, generator=g, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    found = u.T @ orthogonal(x) @ v.T
    torch.testing.assert_close(found, found.diagonal().diag(), rtol=0, atol=1e-6)
    large = found.diagonal()[s > 0.05 * s[0] * len(s) ** 0.5]  # five steps lift only those so far
    assert ((large > 0.6) & (large < 1.3)).all()


def test_vectors_and_thin_matrices_take_adam_s_step():
    torch.manual_seed(0)
    start = [torch.randn(7), torch.randn(SHORT - 1, 200), torch.randn(2, 3, 80)]
    start += [torch.randn(LONG + 1, SHORT)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    muon = Muon(ours, lr=0.01)
    adam = torch.optim.Adam(theirs, lr=0.01, betas=(0.9, 0.99))
    for _ in range(5):
        for p, q in zip(ours, theirs):
            p.grad = p.detach().sin()
            q.grad = p.grad.clone()
        muon.step()
        adam.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("shape", [(SHORT, SHORT), (3 * SHORT, SHORT), (SHORT, 3 * SHORT)])
def test_a_matrix_moves_by_ten_times_the_rate_in_every_direction(shape):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    q = torch.linalg.qr(torch.randn(max(shape), min(shape), dtype=torch.float64)).Q
    p.grad = q if shape[0] >= shape[1] else q.T
    Muon([p], lr=0.01).step()
    moved = torch.linalg.svdvals(p.detach()) / max(1, shape[0] / shape[1]) ** 0.5
    assert ((moved > 0.06) & (moved < 0.13)).all()
    assert (p * p.grad).sum() < 0


def test_weights_decay_where_steps_are_orthogonal():
    torch.manual_seed(0)
    start = [torch.randn(SHORT, SHORT), torch.randn(SHORT)]
    moved = []
    for decay in (0.0, 2.0):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        for p in params:
            p.grad = p.detach().sin()
        Muon(params, lr=0.01, decay=decay).step()
        moved.append(params)
    (plain, bias), (decayed, same) = moved
    torch.testing.assert_close(plain - decayed, 0.01 * 2 * start[0])
    assert torch.equal(bias, same)


def test_it_fits_an_ill_conditioned_problem_in_fewer_steps_than_adam():
    torch.manual_seed(0)
    x = torch.randn(256, 64) * torch.logspace(0, -2, 64)
    y = x @ torch.randn(64, 64)

    def loss_after(optimizer, steps=60):
        w = torch.nn.Parameter(torch.zeros(64, 64))
        adjust = optimizer([w])
        for step in range(steps):
            for group in adjust.param_groups:
                group["lr"] = 0.03 * (1 - step / steps)
            loss = (x @ w - y).square().mean()
            adjust.zero_grad()
            loss.backward()
            adjust.step()
        return loss.item()

    assert loss_after(Muon) < 0.5 * loss_after(torch.optim.Adam)


def test_a_resumed_optimizer_goes_on_as_if_nothing_had_happened():
    torch.manual_seed(0)
    grads = [[torch.randn(SHORT, SHORT), torch.randn(5)] for _ in range(4)]

    def run(steps, params, optimizer):
        for step in steps:
            for p, g in zip(params, grads[step]):
                p.grad = g.clone()
            optimizer.step()

    def fresh():
        params = [torch.nn.Parameter(torch.ones(SHORT, SHORT)), torch.nn.Parameter(torch.ones(5))]
        return params, Muon(params, lr=0.01)

    whole, optimizer = fresh()
    run(range(4), whole, optimizer)
    first, optimizer = fresh()
    run(range(2), first, optimizer)
    second, again = fresh()
    again.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(second, first):
            p.copy_(q)
    run(range(2, 4), second, again)
    for p, q in zip(whole, second):
        assert torch.equal(p, q)
