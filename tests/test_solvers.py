"""Solvers against order conditions, closed forms and each other; and how they fail."""

import contextlib
import gc
import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import solvers
from solvers import METHODS, SolverError, Stats, odeint, odeint_adjoint, odeint_checkpoint

F32, F64 = torch.float32, torch.float64
FIXED = [method for method, tableau in METHODS.items() if tableau.b_err is None]
DOPRI5 = METHODS["dopri5"]
SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([F32, F64])
TIMES = st.sampled_from([[0.0, 1.0], [0.0, 0.1, 0.35, 1.0], [2.0, 1.9, 1.2, 0.5]])


def backprop(f, y0, t, params=(), **how):
    return odeint(f, y0, t, **how)


def checkpoint(f, y0, t, params=(), **how):
    return odeint_checkpoint(f, y0, t, params=params, **how)


def adjoint(f, y0, t, params=(), **how):
    return odeint_adjoint(f, y0, t, adjoint_params=params, **how)


all_gradients = pytest.mark.parametrize("solve", [backprop, checkpoint, adjoint])
own_gradients = pytest.mark.parametrize("solve", [checkpoint, adjoint])
all_methods = pytest.mark.parametrize("method", METHODS)
fixed_methods = pytest.mark.parametrize("method", FIXED)


class Field(nn.Module):
    """A smooth field that depends on t: tanh(y A + t b) C."""

    def __init__(self, seed=0, dim=2, hidden=4):
        super().__init__()
        torch.manual_seed(seed)
        self.A = nn.Parameter(torch.randn(dim, hidden, dtype=F64))
        self.b = nn.Parameter(torch.randn(hidden, dtype=F64))
        self.C = nn.Parameter(torch.randn(hidden, dim, dtype=F64) / 2)

    def forward(self, t, y):
        return torch.tanh(y @ self.A + t * self.b) @ self.C


class Calls(list):
    """A field that writes down the time of every evaluation and may spoil one of them."""

    def __init__(self, f, spoil=None, value=math.nan):
        super().__init__()
        self.f, self.spoil, self.value = f, spoil, value

    def __call__(self, t, y):
        self.append(t.item())
        return self.f(t, y) * (self.value if len(self) - 1 == self.spoil else 1)


def decay(t, y):
    return -y


def times(*ts, **kwargs):
    return torch.tensor(ts, dtype=F64, **kwargs)


def close(actual, expected, tol):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def slope(errors):
    """The order p of errors ~ hᵖ, where the second h is half of the first."""
    return math.log2(errors[0] / errors[1])


def differentiate(solve, f, ts, params, y0=None, **how):
    """The gradients of one random function of all outputs, with respect to y0, t and params."""
    torch.manual_seed(1)
    y0 = (torch.randn(3, 2, dtype=F64) if y0 is None else y0).clone().requires_grad_()
    ys = solve(f, y0, t := times(*ts, requires_grad=True), params=params, **how)
    loss = (ys * torch.randn_like(ys)).sum()
    return torch.autograd.grad(loss, [y0, t, *params], allow_unused=True)


# ------------------------------------------------------------------------------------- tableaux


def order_conditions(a, n):
    """γ = n Πₖ γ(τₖ) and Φ = Πₖ a Φ(τₖ) for every rooted tree of n nodes and subtrees τₖ."""
    forests = [[(1, a.new_ones(len(a)))]]
    for m in range(1, n):
        grown = ((k, tree) for k in range(1, m + 1) for tree in order_conditions(a, k))
        forests.append([(g * y, p * (a @ q)) for k, (g, q) in grown for y, p in forests[m - k]])
    return [(n * g, p) for g, p in forests[n - 1]]


def defect(a, b, orders, theta=1.0):
    """The largest |Σᵢ bᵢ(θ) Φᵢ − θⁿ / γ|: 0 up to the order of the method."""
    conditions = [(n, *condition) for n in orders for condition in order_conditions(a, n)]
    return max(abs(b @ p - theta**n / g).item() for n, g, p in conditions)


def tensors(tableau):
    """a as a square matrix and b; where first is same as last, they have that stage, too."""
    rows, b = ([*tableau.a, tableau.b], [*tableau.b, 0]) if tableau.d else (tableau.a, tableau.b)
    return times(*([*row, *[0] * (len(rows) - len(row))] for row in rows)), times(*b)


def dense_weights(theta):
    return solvers.interpolate(DOPRI5, times(*[0] * 7), 1, [*torch.eye(7, dtype=F64)], theta)


@all_methods
def test_tableau_has_consistent_rows_and_exactly_its_order(method):
    tableau, (a, b) = METHODS[method], tensors(METHODS[method])
    close(a.sum(1)[: len(tableau.c)], times(*tableau.c), 1e-14)
    assert defect(a, b, range(1, tableau.order + 1)) < 1e-14
    assert defect(a, b, [tableau.order + 1]) > 1e-4


def test_error_weights_compare_with_a_method_of_order_4_and_not_5():
    (a, b), b_err = tensors(DOPRI5), times(*DOPRI5.b_err)
    assert abs(b_err.sum()) < 1e-15
    assert defect(a, b - b_err, range(1, 5)) < 1e-14
    assert defect(a, b - b_err, [5]) > 1e-4


@given(theta=st.floats(0, 1))
def test_dense_weights_satisfy_the_order_conditions_up_to_4_everywhere(theta):
    assert defect(tensors(DOPRI5)[0], dense_weights(theta), range(1, 5), theta) < 1e-12


def test_dense_weights_meet_the_step_and_its_derivatives_at_both_ends():
    close(dense_weights(0.0), times(*[0] * 7), 1e-15)
    close(dense_weights(1.0), times(*DOPRI5.b, 0), 1e-15)
    slopes = [torch.autograd.functional.jacobian(dense_weights, times(end)[0]) for end in (0, 1)]
    close(torch.stack(slopes), torch.eye(7, dtype=F64)[[0, 6]], 1e-14)


# ------------------------------------------------------------------------- order of convergence


def logistic(t, y):
    """Solved by 1 / (1 + e^−sin t) where y(0) = 1/2."""
    return y * (1 - y) * math.cos(t)


def errors_of_steps(tableau, n):
    """Of n steps from 0 to 2, where they end, and of dense output within the first one."""
    h, x, found = 2 / n, times(0.5), []
    for t in (i * h for i in range(n)):
        x1, k = solvers.step(logistic, tableau, t, t + h, h, x, [logistic(t, x)])
        if tableau.d and t == 0:
            k.append(logistic(t + h, x1))
            found = [(0.6 * h, solvers.interpolate(tableau, x, h, k, 0.6))]
        x = x1
    found.insert(0, (2, x))
    return [abs(x.item() - 1 / (1 + math.exp(-math.sin(t)))) for t, x in found]


@all_methods
def test_steps_and_dense_output_converge_at_their_orders(method):
    end, *dense = zip(*(errors_of_steps(METHODS[method], n) for n in (24, 48)))
    assert slope(end) == pytest.approx(METHODS[method].order, abs=0.2)
    assert [slope(errors) for errors in dense] == pytest.approx([5] * len(dense), abs=0.2)


@fixed_methods
def test_step_size_takes_the_fewest_equal_steps_and_without_it_there_is_one(method):
    t = times(0, 0.3, 0.1 * 3, 0.3 + 1e-10, 0.8, 1.1)  # (1.1 − 0.8) / 0.1 is 3 + 4e-16
    for options, steps in (({}, 5), ({"step_size": 0.1}, 3 + 1 + 1 + 5 + 3)):
        ys = odeint(decay, times(1), t, method=method, options=options, stats=(stats := Stats()))
        assert (len(ys), stats.accepted) == (len(t), steps)


@fixed_methods
def test_adjoint_gradient_of_fixed_steps_converges_at_their_order(method):
    f, errors = Field(), []
    grads = partial(differentiate, f=f, ts=[0.0, 0.4, 1.0], params=[*f.parameters()])
    exact = grads(checkpoint, method="rk5", options={"step_size": 1 / 200})
    for n in (10, 20):
        found = grads(adjoint, method=method, options={"step_size": 1 / n})
        errors.append([(a - b).norm().item() for a, b in zip(found, exact)])
    assert min(map(slope, zip(*errors))) > METHODS[method].order - 0.2


# --------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("dtype", [F32, F64])
@given(seed=SEEDS, dim=st.integers(1, 5), ts=TIMES, t_dtype=DTYPES)
def test_linear_system_is_solved_by_the_matrix_exponential(dtype, seed, dim, ts, t_dtype):
    torch.manual_seed(seed)
    A, y0 = torch.randn(dim, dim, dtype=dtype), torch.randn(dim, dtype=dtype)
    t, tol = torch.tensor(ts, dtype=t_dtype), 1e-10 if dtype == F64 else 1e-6
    ys = odeint(lambda t, y: A @ y, y0, t, rtol=tol, atol=tol)
    times_A = (t - t[0]).double()[:, None, None] * A.double()
    exact = torch.linalg.matrix_exp(times_A) @ y0.double()
    assert ys.dtype == dtype
    close(ys.double(), exact, 100 * tol * exact.abs().max().item())


# ----------------------------------------------------------------------------------- properties


@given(seed=SEEDS, ts=TIMES)
def test_there_and_back_returns_to_the_start(seed, ts):
    f, y0 = Field(seed), torch.randn(3, 2, dtype=F64)
    solve = partial(odeint, f, rtol=1e-9, atol=1e-9)
    there = solve(y0, times(*ts))
    close(solve(there[-1], times(*ts).flip(0)).flip(0), there, 1e-6)


@all_methods
@given(seed=SEEDS, ts=TIMES, shift=st.floats(-100, 100))
@settings(max_examples=10)
def test_autonomous_field_does_not_notice_a_shift_of_time(method, seed, ts, shift):
    f, y0 = Field(seed), torch.randn(2, dtype=F64)
    still = partial(odeint, lambda t, y: f(0 * t, y), y0, method=method)
    close(still(times(*ts)), still(times(*ts) + shift), 1e-9)


@given(seed=SEEDS, ts=TIMES)
@settings(max_examples=8)
def test_three_gradients_agree_on_y0_t_and_parameters(seed, ts):
    how = {"params": [*(f := Field(seed)).parameters()], "rtol": 1e-9, "atol": 1e-9}
    grads = partial(differentiate, f=f, ts=ts, **how)
    exact = grads(backprop)
    close(grads(checkpoint), exact, 1e-11)
    close(grads(adjoint), exact, 1e-5)


@pytest.mark.parametrize(
    ("solve", "method", "options"),
    [(solve, method, {}) for solve in (backprop, checkpoint) for method in METHODS]
    # The adjoint is exact in the limit of small steps only: see the test of its convergence.
    + [(adjoint, "dopri5", {}), (adjoint, "rk4", {"step_size": 0.047})],
)
def test_gradcheck_passes_for_y0_t_and_parameters(solve, method, options):
    def run(y0, t, w):
        f = lambda t, y: torch.tanh(y @ w + t)  # noqa: E731
        return solve(f, y0, t, params=(w,), method=method, options=options)

    inputs = torch.randn(2, dtype=F64), times(0.1, 0.3, 1.0), torch.randn(2, 2, dtype=F64)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(run, inputs, rtol=1e-4, atol=1e-5)


@all_methods
@all_gradients
def test_tuple_state_behaves_as_its_concatenation(method, solve):
    def split(y):
        return y[..., :4].unflatten(-1, (2, 2)), y[..., 4], y[..., 5:]

    def join(y):
        return torch.cat([y[0].flatten(-2), y[1][..., None], y[2]], -1)

    def parts(f, y0, t, **how):
        return join(solve(lambda t, y: split(f(t, join(y))), split(y0), t, **how))

    f, y0 = Field(dim=6), torch.randn(6, dtype=F64)
    grads = partial(differentiate, f=f, ts=[0, 0.5, 1], params=[*f.parameters()], y0=y0)
    close(parts(f, y0, times(0, 1), method=method), solve(f, y0, times(0, 1), method=method), 1e-13)
    close(grads(parts, method=method), grads(solve, method=method), 1e-12)


@given(seed=SEEDS, start=st.floats(-3, 3), length=st.floats(0.1, 6), n=st.integers(1, 40))
def test_more_output_times_cost_nothing_and_change_nothing(seed, start, length, n):
    f, y0, few, many = Field(seed), torch.randn(2, dtype=F64), Stats(), Stats()
    t = torch.linspace(start, start - length, 2 * n + 1, dtype=F64)
    ys = odeint(f, y0, t, stats=many)
    assert torch.equal(odeint(f, y0, t[::n], stats=few), ys[::n])
    assert few == many
    close(ys, odeint(f, y0, t, rtol=1e-10, atol=1e-10), 1e-5)


# ------------------------------------------------------------------------- evaluations and steps


@all_methods
@given(start=st.floats(-5, 5), length=st.floats(1e-3, 3), sign=st.sampled_from([-1, 1]))
def test_f_is_never_evaluated_outside_the_times_asked_for(method, start, length, sign):
    t, f = times(start, start + sign * length / 3, start + sign * length), Calls(decay)
    options = {"step_size": 0.1} if method in FIXED else {}
    y0 = torch.ones(2, dtype=F64, requires_grad=True)
    adjoint(f, y0, t, method=method, options=options, rtol=1e-3, atol=1e-3).sum().backward()
    assert t.min() <= min(f)
    assert max(f) <= t.max()


@all_methods
@all_gradients
def test_stats_count_the_calls_really_made_and_add_up(method, solve):
    field, stats, made = Field(), Stats(), [0, 0]
    f, params, t = Calls(field), [*field.parameters()], times(0, 0.2, 1, 3, requires_grad=True)
    for _ in range(2):
        f.clear()
        ys = solve(f, torch.randn(2, dtype=F64), t, params=params, method=method, stats=stats)
        made[0] += len(f)
        f.clear()
        ys.sum().backward()
        made[1] += len(f)
    assert [stats.nfe, stats.backward_nfe] == made
    tries, stages = stats.accepted + stats.rejected, len(METHODS[method].b)
    alone = stats.nfe - tries * stages  # k₁ of each call, and second stages of sizes not taken
    assert 2 <= alone <= 2 * 6 if method == "dopri5" else alone == 0


@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("rate", [0.0, 0.01, -0.3, 0.3])
def test_easy_interval_takes_one_step_of_seven_evaluations(rate, way):
    f, stats = Calls(lambda t, y: rate * y), Stats()
    y = odeint(f, times(1, 2), times(0, way), rtol=1e-4, atol=1e-4, stats=stats)[-1]
    close(y, times(1, 2) * math.exp(rate * way), 1e-5)
    assert (len(f), stats.accepted, stats.rejected) == (7, 1, 0)


@given(rate=st.floats(-300, 300), k=st.integers(3, 8))
def test_first_step_of_a_hard_interval_costs_at_most_one_more_evaluation(rate, k):
    f, tol, stats = Calls(lambda t, y: rate * y), 10.0**-k, Stats()
    with contextlib.suppress(SolverError):  # such as that one step is not enough
        options = {"max_steps": 1}
        odeint(f, times(1), times(0, 1), rtol=tol, atol=tol, options=options, stats=stats)
    assert (stats.accepted, stats.rejected) == (1, 0)
    assert len(f) <= 2 + 6


@pytest.mark.parametrize(("tol", "within"), [(1e-8, 2 * (0.0025 / 2e-8) ** -0.2), (0.1, 1.0)])
def test_first_size_looked_at_is_that_of_exponential_growth(tol, within):
    with contextlib.suppress(SolverError):
        odeint(f := Calls(lambda t, y: 3 * y), times(1), times(0, 9), rtol=tol, atol=tol)
    assert f[1] == pytest.approx(within / 3 / 5)


def test_first_size_that_is_much_too_short_is_looked_at_once_more_and_then_taken():
    f, how = Calls(lambda t, y: torch.cos(1 + t).expand(1)), {"rtol": 1e-6, "atol": 1e-6}
    with pytest.raises(SolverError, match="max_steps"):
        odeint(f, times(1e-3), times(0, 9), options={"max_steps": 1}, **how)
    assert len(f) == 2 + 6  # k₁, the stage of the size not taken, and the others of one step
    assert f[2] > 10 * f[1]


def test_first_step_is_right_also_from_rest_and_from_zero():
    spring = lambda t, y: torch.stack([y[1], -y[0] + torch.sin(3 * t)])  # noqa: E731
    for f, y0 in ((spring, times(0, 0)), (lambda t, y: 1e3 * (1 - y), times(0))):
        stats, how = Stats(), {"rtol": 1e-5, "atol": 1e-5, "options": {"max_steps": 2}}
        with pytest.raises(SolverError, match="max_steps"):
            odeint(f, y0, times(0, 20), stats=stats, **how)
        assert (stats.accepted, stats.rejected) == (2, 0)
        assert stats.nfe <= 6 * 2 + 6


@pytest.mark.parametrize("h", [0.3, -0.3])
@pytest.mark.parametrize(("tol", "rate"), [(1e-4, -0.7), (1.0, -3.0)])
def test_prediction_is_that_of_a_solution_with_one_time_scale(h, tol, rate):
    x, size = times(2, -4), times(2, 4)
    problem = solvers.Problem(decay, Stats(), DOPRI5, tol, tol / 2)
    k1 = rate * x
    k2 = rate * (x + h / 5 * k1)
    measure = lambda v: v.div(tol / 2 + tol * size).square().mean().sqrt().item()  # noqa: E731
    speed = max(measure(k1), measure(k2))
    bend = 5 * measure(k2 - k1) / speed
    expected = max(0.0025 * abs(h) * speed * bend**4, min(0.3 * (bend / 0.7) ** 5, 1))
    assert (expected > 0.3) == (abs(rate) > 1)
    assert solvers.predicted_ratio(problem, h, x, k1, k2) == pytest.approx(expected)
    assert solvers.predicted_ratio(problem, h, x, 0 * k1, 0 * k1) == 0
    for value in (math.inf, math.nan):
        assert solvers.predicted_ratio(problem, h, x, k1, k2 * value) == math.inf


def test_prediction_is_within_a_factor_of_three_for_a_network():
    f, y0, tol = Field(hidden=32), torch.randn(50, 2, dtype=F64), 1e-5
    problem = solvers.Problem(lambda t, y: f(0 * t, y) / 4, Stats(), DOPRI5, tol, tol)
    for h in (0.3, 0.5, -0.4):
        with torch.no_grad():
            k = [problem(0.0, y0)]
            x1, k = solvers.step(problem, DOPRI5, 0.0, h, h, y0, k)
            k.append(problem(h, x1))
            predicted = solvers.predicted_ratio(problem, h, y0, *k[:2])
            found = solvers.error_ratio(problem, y0, x1, h, k)
        assert 1 / 3 < predicted / found < 3


def test_controller_takes_the_next_size_from_the_error_within_limits():
    for ratio in (0.5, 0.01, 3.0):
        expected = 2 * 0.9 * ratio**-0.2
        assert solvers.next_size(-2.0, ratio, 10) == pytest.approx(expected)
    assert solvers.next_size(2.0, 0.0, 10) == 20
    assert solvers.next_size(2.0, math.inf, 10) == pytest.approx(0.4)
    assert solvers.next_size(2.0, 1e-3, 1) == 2


def test_steps_grow_tenfold_at_most_and_not_after_one_that_was_rejected():
    still = Calls(lambda t, y: torch.zeros_like(y))
    odeint(still, times(1), times(0, 5), options={"first_step": 0.001})
    assert still[6::6] == pytest.approx([0.001, 0.011, 0.111, 1.111, 5])
    f = Calls(lambda t, y: torch.zeros_like(y), spoil=6, value=math.nan)
    odeint(f, times(1), times(0, 5), options={"first_step": 0.1})
    assert f[6::6] == pytest.approx([0.1, 0.02, 0.04, 0.24, 2.24, 5])


def test_first_step_of_a_field_that_jumps_is_looked_for_twice_and_no_more():
    f = Calls(lambda t, y: torch.where(t > 0, y, -y))  # x' changes by as much in any time
    how = {"rtol": 1e-2, "atol": 1e-2, "options": {"max_steps": 1}}
    with pytest.raises(SolverError, match="max_steps"):
        odeint(f, times(1), times(0, 1), **how)
    assert len(f) == 1 + 2 + 6
    assert len(set(f[1:4])) == 3


@pytest.mark.parametrize("tol", [1e-3, 1e-2, 1.0])
def test_first_step_stays_within_the_time_scale_however_loose_the_tolerance(tol):
    f = Calls(lambda t, y: y.flip(0) * times(-1, 1))  # turns by 1 in a time of 1
    odeint(f, times(1, 1), times(0, 20), rtol=tol, atol=tol)
    assert 0.25 < max(f[1:7]) <= 0.7


@pytest.mark.parametrize("way", [1, -1])
def test_last_steps_are_equally_long_and_end_at_the_end(way):
    ends = [solvers.next_end(1.0, 1.0 + way, size) for size in (0.1, 0.5, 0.6, 0.9, 0.92, 3.0)]
    lengths = [abs(end - 1) for end in ends]
    assert lengths == pytest.approx([0.1, 0.5, 0.5, 0.5, 1, 1])
    assert ends[-1] == 1.0 + way
    assert solvers.next_end(1.0, 1.0 + way, 1e-300) == math.nextafter(1, 1 + way)


def test_first_step_is_taken_and_saves_the_evaluation_that_chooses_one():
    f, stats = Calls(decay), Stats()
    odeint(f, times(1), times(1, 0), options={"first_step": 0.01}, stats=stats)
    assert f[1] == pytest.approx(1 - 0.01 / 5)
    assert stats.nfe == len(f) == 6 * (stats.accepted + stats.rejected) + 1


@all_methods
@all_gradients
def test_one_time_returns_the_start_without_an_evaluation(method, solve):
    f, y0 = Calls(decay), torch.randn(3, dtype=F64, requires_grad=True)
    ys = solve(f, y0, times(0.7, requires_grad=True), method=method)
    ys.sum().backward()
    assert torch.equal(ys, y0[None])
    assert torch.equal(y0.grad, torch.ones_like(y0))
    assert f == []


def test_norm_sees_the_state_as_it_was_given_and_decides_the_steps():
    shapes, usual, loose = set(), Stats(), Stats()

    def norm(state):
        shapes.add(tuple(x.shape for x in state))
        return 1e-3 * torch.cat(state).norm()

    run = partial(odeint, lambda t, y: (-y[1], y[0]), (torch.ones(3), torch.zeros(3)), times(0, 9))
    run(stats=usual)
    run(stats=loose, options={"norm": norm})
    assert shapes == {((3,), (3,))}
    assert loose.accepted < usual.accepted


def test_seminorm_saves_evaluations_and_keeps_the_gradient():
    w, costs, grads = torch.zeros(1, dtype=F64, requires_grad=True), [], []
    for norm in ({}, {"norm": "seminorm"}):
        stats, f = Stats(), lambda t, y: w * torch.cos(9 * t) - y
        ys = adjoint(f, times(1), times(0, 3), params=(w,), adjoint_options=norm, stats=stats)
        grads.append(torch.autograd.grad(ys[-1].sum(), w)[0])
        costs.append(stats.backward_nfe)
    assert costs[1] < costs[0] / 2
    close(grads[1], grads[0], 1e-3)


@all_methods
@all_gradients
@given(dtype=DTYPES, t_dtype=DTYPES, shape=st.sampled_from([(), (2,)]), t_grad=st.booleans())
def test_state_keeps_its_precision_whatever_that_of_time(
    method, solve, dtype, t_dtype, shape, t_grad
):
    def f(t, y):
        assert (t.dtype, t.shape, y.dtype, y.shape) == (dtype, (), dtype, shape)
        return -y * t

    y0 = torch.ones(shape, dtype=dtype, requires_grad=True)
    t = torch.tensor([0.1, 0.4, 1], dtype=t_dtype, requires_grad=t_grad)
    run = partial(solve, f, y0, method=method, rtol=1e-3, atol=1e-3)
    ys = run(t)
    ys.sum().backward()
    assert ys.dtype == y0.grad.dtype == dtype
    close(ys, run(t.detach().double()), 1e-12 if dtype == F64 else 1e-6)
    assert not t_grad or t.grad.dtype == t_dtype


@fixed_methods
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_fixed_steps_stay_on_a_gpu_and_never_wait_for_it(method, where):
    on_host = times(0, 0.5, 1)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):  # to read a value would raise
        on_gpu = torch.linspace(0, 1, 3, dtype=F64, device="cuda")
        t, w = on_host if where == "cpu" else on_gpu, torch.ones(3, device="cuda")
        ys = odeint(lambda t, y: w * y * t, torch.ones(2, 3, device="cuda"), t, method=method)
        assert (ys.device.type, ys.dtype, ys.shape) == ("cuda", F32, (3, 2, 3))
        with pytest.raises(ValueError, match="t must be on the cpu or on y0's device cpu"):
            odeint(decay, torch.ones(2), on_gpu, method=method)


@fixed_methods
@all_gradients
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_gradients_of_fixed_steps_never_read_a_value(method, solve, where):
    t = times(0, 0.5, 1).to(where).requires_grad_(where == "meta")
    y0, w = (torch.ones(3, device="meta", requires_grad=True) for _ in range(2))
    solve(lambda t, y: w * y * t, y0, t, params=(w,), method=method).sum().backward()
    assert all(x.grad.is_meta for x in (y0, w, t) if x.requires_grad)


# ------------------------------------------------------------------------------- how solves fail


@fixed_methods
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("field", [decay, lambda t, y: torch.ones_like(y)])
def test_non_finite_derivative_ends_fixed_steps_at_once_and_tells_its_time(method, value, field):
    run = partial(odeint, y0=times(1, 1), t=torch.linspace(0, 1, 9, dtype=F64), method=method)
    run(good := Calls(field))
    stages = len(METHODS[method].b)
    for n in {0, 1, *range(len(good) // 2, len(good) // 2 + stages), len(good) - 1}:
        with pytest.raises(SolverError, match="non-finite derivative") as caught:
            run(bad := Calls(field, spoil=n, value=value))
        assert caught.value.t == pytest.approx(good[n], abs=1e-12)
        assert caught.value.nfe == len(bad) == stages * (n // stages + 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_derivative_at_the_start_ends_the_solve_at_once(value):
    with pytest.raises(SolverError, match="non-finite derivative") as caught:
        odeint(f := Calls(decay, spoil=0, value=value), times(1, 1), times(3, 4))
    assert (caught.value.t, caught.value.nfe, len(f)) == (3, 1, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"first_step": 0.1}])
def test_non_finite_derivative_for_good_ends_the_solve_soon_with_its_time(value, options):
    f = lambda t, y: -y if t < 0.7 else y * value  # noqa: E731
    with pytest.raises(SolverError, match="non-finite derivative") as caught:
        odeint(f, times(1, 1), times(0, 1), options=options)
    assert caught.value.t == pytest.approx(0.7, abs=1e-9)
    assert caught.value.error_ratio == math.inf
    assert caught.value.nfe < 1000


def test_derivative_that_is_lost_at_an_accepted_state_ends_the_solve_at_once():
    options = {"norm": lambda y: y[0].abs(), "first_step": 0.25}  # does not see the second one
    f = Calls(decay, spoil=6, value=times(1, math.nan))
    with pytest.raises(SolverError, match="non-finite derivative") as caught:
        odeint(f, times(1, 1), times(0, 1), rtol=1e-2, atol=1e-2, options=options)
    assert caught.value.t == 0.25
    assert len(f) == 1 + 6 + 6


def test_trial_step_that_overflows_is_rejected_and_made_shorter():
    run = partial(odeint, lambda t, y: -1e3 * y**5, t=times(0, 1).float(), rtol=1e-4, atol=1e-6)
    for options in ({}, {"first_step": 1.0}):
        y = run(torch.tensor([10.0]), options=options, stats=(stats := Stats()))[-1]
        close(y.double(), times((1e-4 + 4e3) ** -0.25), 1e-4)
        assert stats.rejected > 5 or not options


def test_state_that_overflows_is_never_accepted():
    y0, options = torch.full((1,), 3e38), {"first_step": 1.0, "max_steps": 20}
    with pytest.raises(SolverError):
        odeint(lambda t, y: torch.full((1,), 3e38), y0, times(0, 1), options=options)


def test_one_overflow_does_not_end_the_solve():
    run = partial(odeint, y0=times(1), t=times(0, 3), options={"first_step": 0.5})
    run(good := Calls(decay))
    y = run(Calls(decay, spoil=len(good) // 2, value=math.inf), stats=(stats := Stats()))[-1]
    close(y, times(math.exp(-3)), 1e-6)
    assert stats.rejected >= 1


@pytest.mark.parametrize("options", [{}, {"first_step": 0.1}])
def test_non_finite_derivative_is_seen_where_the_norm_does_not_look(options):
    options = {"norm": lambda y: y[0].abs(), **options}
    with pytest.raises(SolverError, match="non-finite"):
        odeint(lambda t, y: y * times(1, math.nan), times(1, 1), times(0, 1), options=options)


@all_methods
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_non_finite_start_is_named_as_such(method, value):
    with pytest.raises(SolverError, match=r"state is not finite at t = 3 .*Try: y0") as caught:
        odeint(decay, times(1, value), times(3, 4, 5), method=method)
    assert caught.value.t == 3


def test_failure_in_the_backward_solve_is_a_solver_error_with_its_time():
    f, y0 = Calls(decay), torch.ones(1, dtype=F64, requires_grad=True)
    ys = adjoint(f, y0, times(0, 1))
    f.spoil = len(f)
    with pytest.raises(SolverError, match="non-finite derivative") as caught:
        ys.sum().backward()
    assert caught.value.t == 1


def test_vanished_step_says_where_it_was_and_what_to_try():
    with pytest.raises(SolverError) as caught:
        odeint(lambda t, y: y**2, times(1), times(0, 2))  # 1 / (1 − t)
    error, text = caught.value, str(caught.value)
    assert (error.t, error.step_size) == pytest.approx((1, 0), abs=1e-5)
    for part in (
        f"step size has vanished at t = {error.t:.9g} (step size {error.step_size:.3g}, ",
        f"error ratio {error.error_ratio:.3g}, {error.nfe} evaluations so far). Try: f for a sing",
    ):
        assert part in text


@pytest.mark.parametrize("start", [1e6, -1e6])
def test_step_vanishes_in_proportion_to_the_times(start):
    with pytest.raises(SolverError, match="step size has vanished") as caught:
        odeint(lambda t, y: y**2, times(1), times(start, start + 2))
    assert caught.value.t == pytest.approx(start + 1, abs=1e-5)
    assert caught.value.nfe < 3000


def test_zero_state_without_an_absolute_tolerance_is_not_blamed_on_f():
    with pytest.raises(SolverError, match="With atol = 0"):
        odeint(lambda t, y: torch.ones_like(y), times(0, 0), times(0, 1), atol=0)


@pytest.mark.parametrize("how", [{"rtol": 0, "atol": 1e-8}, {"rtol": 1e-8, "atol": 0}])
def test_one_of_the_two_tolerances_is_enough(how):
    close(odeint(decay, times(1), times(0, 1), **how)[-1], times(math.exp(-1)), 1e-7)


@all_methods
def test_step_limit_holds_for_the_whole_call_forward_and_backward(method):
    t, y0 = torch.linspace(0, 9, 40, dtype=F64), torch.ones(1, dtype=F64, requires_grad=True)
    run = partial(adjoint, lambda t, y: y * torch.sin(9 * t), y0, t, method=method)
    run(options={"max_steps": 39 if method in FIXED else 500}).sum().backward()
    with pytest.raises(SolverError, match=r"max_steps = 38 .*larger max_steps") as caught:
        run(options={"max_steps": 38})
    assert 0 <= caught.value.nfe - (0 if method in FIXED else 38 * 6 + 1) <= 5
    with pytest.raises(SolverError, match="max_steps = 38"):
        run(adjoint_options={"max_steps": 38}).sum().backward()


@all_gradients
def test_times_that_differ_by_rounding_do_not_stop_the_solve(solve):
    t, y0 = times(0, 0.3, 0.1 * 3, 1), times(1, requires_grad=True)
    solve(decay, y0, t).sum().backward()
    close(y0.grad, (-t).exp().sum()[None], 1e-6)


# ---------------------------------------------------------------- gradients that peers get wrong


@all_gradients
def test_f_may_differentiate_inside_as_the_trace_of_a_flow_does(solve):
    A = torch.randn(2, 2, dtype=F64, requires_grad=True)

    def by_autograd(t, state):
        with torch.enable_grad():
            x = state[0].requires_grad_()
            dx = torch.tanh(x @ A)
            rows = [torch.autograd.grad(dx[:, i].sum(), x, create_graph=True)[0] for i in (0, 1)]
            return dx, rows[0][:, 0] + rows[1][:, 1]

    def by_hand(t, state):
        dx = torch.tanh(state[0] @ A)
        return dx, (1 - dx**2) @ A.diagonal()

    def log_det(solve, f, y0, t, **how):
        return solve(f, (y0, torch.zeros(3, dtype=F64)), t, **how)[1]

    grads = partial(differentiate, ts=[0, 0.5, 1], params=[A])
    exact = grads(partial(log_det, backprop), by_hand)
    close(grads(partial(log_det, solve), by_autograd), exact, 1e-6)


@own_gradients
def test_tensors_that_f_closes_over_get_gradients_also_if_computed(solve):
    w, u = times(0.3, requires_grad=True), times(0.5, requires_grad=True)

    def grads(solve):
        v = w.exp()  # not a leaf
        ys = solve(lambda t, y: -v * u * y, times(1), times(0, 1, 2), params=iter([v, u]))
        return torch.autograd.grad(ys.sum(), (w, u))

    close(grads(solve), grads(backprop), 1e-6)


@own_gradients
def test_parameter_that_depends_on_another_is_not_counted_twice(solve):
    w = times(0.3, requires_grad=True)

    def grad(solve):
        v = w + 1
        ys = solve(lambda t, y: -v * w * y, times(1), times(0, 1), params=(v, w))
        return torch.autograd.grad(ys.sum(), w)[0]

    with contextlib.suppress(ValueError):  # to refuse is fine, to be silently wrong is not
        close(grad(solve), grad(backprop), 1e-6)


@pytest.mark.parametrize("solve", [odeint_checkpoint, odeint_adjoint])
def test_frozen_parameters_get_no_gradient_and_unused_ones_zero(solve):
    f, y0, t = Field(), times(1, 1), times(0, 0.5, 1)
    f.C.requires_grad_(False)
    f.unused = nn.Parameter(times(1, 2))
    solve(f, y0, t).sum().backward()  # the module's parameters by default
    assert f.C.grad is None
    assert torch.equal(f.unused.grad, torch.zeros(2, dtype=F64))
    expected = torch.autograd.grad(odeint(f, y0, t).sum(), (f.A, f.b))
    close((f.A.grad, f.b.grad), expected, 1e-6)
    assert not solve(f.requires_grad_(False), y0, t).requires_grad


@all_gradients
def test_forward_may_run_twice_before_backward(solve):
    f, y0 = Field(), torch.randn(2, dtype=F64)
    grad = partial(torch.autograd.grad, inputs=[*f.parameters()])
    both = [solve(f, y0, times(0, end), params=[*f.parameters()])[-1].sum() for end in (1, -2)]
    for end, loss in zip((1, -2), both):
        close(grad(loss), grad(odeint(f, y0, times(0, end))[-1].sum()), 1e-6)


@all_gradients
@pytest.mark.parametrize("backward", [False, True])
def test_no_reference_cycle_keeps_the_graph_alive(solve, backward):
    alive, field, w = [], Field(), times(1, 1, requires_grad=True)

    def pack(x):
        x = x.detach()
        alive.append(weakref.ref(box := lambda: x))
        return box

    def run():
        f = lambda t, y: (field(t, y[0]), field(t, y[1]))  # noqa: E731
        alive.append(weakref.ref(f))
        ys = solve(f, (w.exp(), 2 * w), times(0, 0.5, 1), params=[*field.parameters()])
        assert sum(ref() is not None for ref in alive) > 5
        if backward:
            ys[0].sum().backward()

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box()):
            run()
        assert not any(ref() for ref in alive)
    finally:
        gc.enable()


def saved_elements(solve, steps):
    """The number of elements that the forward pass of so many steps keeps for the backward pass."""
    f, y0, kept = Field(dim=5), torch.ones(7, 5, dtype=F64, requires_grad=True), {}
    pack = lambda x: kept.setdefault((x.data_ptr(), x.shape), x)  # noqa: E731
    how = {"params": [*f.parameters()], "method": "rk4", "options": {"step_size": 1 / steps}}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        solve(f, y0, times(0, 1), **how)
    return sum(x.numel() for x in kept.values())


def test_saved_memory_is_constant_one_state_per_step_or_every_evaluation():
    few, many = ([saved_elements(s, n) for s in (adjoint, checkpoint, backprop)] for n in (10, 60))
    growth = [(b - a) / 50 for a, b in zip(few, many)]
    assert growth[:2] == [0, 7 * 5]
    assert growth[2] > 4 * 7 * 5


class Solved(nn.Module):
    def __init__(self, solve):
        super().__init__()
        self.field, self.solve = Field(), solve

    def forward(self, y0):
        return self.solve(self.field, y0, times(0, 0.5, 1))


def train_in_parallel(rank, path, world):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for solve in (odeint_checkpoint, odeint_adjoint):
        model = nn.parallel.DistributedDataParallel(Solved(solve))
        shares = [torch.full((3, 2), i / 2, dtype=F64) for i in range(world)]
        model(shares[rank]).sum().backward()
        alone = Solved(odeint)
        sum(alone(y0).sum() / world for y0 in shares).backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            close(p.grad, q.grad, 1e-6)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_averaged_under_distributed_data_parallel(tmp_path, world):
    start = "spawn" if torch.cuda.is_available() else "fork"  # quick, where autograd has no threads
    mp.start_processes(train_in_parallel, (tmp_path / "store", world), world, start_method=start)


# --------------------------------------------------------------- in place of torchdiffeq's odeint


def test_method_none_is_dopri5():
    assert torch.equal(*(odeint(decay, times(1), times(0, 9), method=m) for m in (None, "dopri5")))


def test_adjoint_method_solves_backwards():
    f, y0 = Calls(decay), times(1, requires_grad=True)
    how = {"method": "rk4", "options": {"step_size": 0.1}, "adjoint_method": "euler"}
    ys = adjoint(f, y0, times(0, 1), adjoint_options={"step_size": 0.25}, **how)
    assert len(f) == 40
    f.clear()
    ys[-1].sum().backward()
    assert f == [1, 0.75, 0.5, 0.25]
    close(y0.grad, times(0.75**4), 1e-14)
    with pytest.raises(ValueError, match="adjoint_options are missing: options are those of rk4"):
        adjoint(f, y0, times(0, 1), **how)


@all_gradients
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.array, torch.tensor])
def test_numbers_may_be_of_numpy_or_tensors(solve, kind):
    exact = solve(decay, Y, times(0, 1), rtol=2**-9, atol=2**-10)
    assert torch.equal(solve(decay, Y, times(0, 1), rtol=kind(2**-9), atol=kind(2**-10)), exact)
    for method, name in (("rk4", "step_size"), ("dopri5", "first_step")):
        run = partial(solve, decay, Y, times(0, 1), method=method)
        assert torch.equal(run(options={name: kind(0.25)}), run(options={name: 0.25}))


DEFAULTS = {  # of torchdiffeq 0.2.5
    "min_step": 0, "max_step": math.inf, "first_step": None, "step_t": None, "jump_t": None,
    "safety": 0.9, "ifactor": 10.0, "dfactor": 0.2, "max_num_steps": 2**31 - 1, "dtype": F64,
    "step_size": None, "grid_constructor": None, "interp": "linear", "perturb": False,
}  # fmt: skip


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_options_at_their_defaults_change_nothing(method):
    run = partial(odeint, decay, Y, times(0, 0.5, 1), method=method)
    assert torch.equal(run(options=DEFAULTS), run())


@pytest.mark.parametrize("name", ["callback_step", "callback_reject_step_adjoint"])
@all_gradients
def test_callbacks_are_refused_and_not_ignored(solve, name):
    f = Field()
    setattr(f, name, lambda t, y, h: None)
    with pytest.raises(ValueError, match=f"f.{name} would never be called: use stats"):
        solve(f, Y, times(0, 1))


@all_methods
@all_gradients
def test_solves_run_in_inference_mode_and_without_gradients(method, solve):
    f, y0, t = Field(), torch.randn(2, dtype=F64), times(0, 0.5, 1, requires_grad=True)
    exact = odeint(f, y0, t, method=method)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            ys = solve(f, y0.clone(), t.clone(), params=[*f.parameters()], method=method)
            assert not ys.requires_grad
        close(ys.clone(), exact.detach(), 1e-12)


@all_gradients
@pytest.mark.parametrize("method", ["rk4", "dopri5"])
def test_autocast_of_the_call_holds_in_its_backward_pass(solve, method):
    net, dtypes = nn.Linear(2, 2), []

    def f(t, state):
        dx = torch.tanh(net(state[0]))
        dtypes.append(dx.dtype)
        return dx, dx.sum(-1)

    def grads(solve, *state):
        how = {"params": [*net.parameters()], "method": method, "rtol": 1e-2, "atol": 1e-2}
        with torch.autocast("cpu", torch.bfloat16):
            x, total = solve(f, state, times(0, 1), **how)
        assert x.dtype == total.dtype == F32
        return torch.autograd.grad(x[-1].square().sum(), [*net.parameters()])

    state = torch.ones(3, 2), torch.zeros(3)
    found = grads(solve, *state)
    assert set(dtypes) == {torch.bfloat16}
    close(found, grads(backprop, *state), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert solve(lambda t, y: net(y), state[0], times(0, 1), method=method).dtype == F32


def test_step_size_too_small_to_count_is_a_clear_error():
    for size in (1e-320, 1e-300, 1e-6):
        with pytest.raises(SolverError, match=r"max_steps = 100000 .*0 evaluations"):
            odeint(decay, Y, times(0, 1), method="rk4", options={"step_size": size})


@all_methods
@pytest.mark.parametrize("end", [1e300, -1e300])
def test_times_may_be_enormous(method, end):
    ys = odeint(lambda t, y: y / end, Y, times(0, end / 2, end), method=method, rtol=1e-3)
    close(ys[-1], Y * math.e, 0.5 if method in ("euler", "midpoint") else 0.01)


# ------------------------------------------------------------------------------------- bad input


Y, PAIR = torch.ones(2, dtype=F64), (torch.ones(2, dtype=F64), torch.ones(3, dtype=F64))
RK4 = {"method": "rk4"}
BAD = [  # the argument, its value, what the message says about it, and other arguments
    ("t", times(0, 2, 1), r"increasing or decreasing, not \[0.0, 2.0, 1.0\]", {}),
    ("t", times(0, 1, 1), "increasing or decreasing", {}),
    ("t", times(), "empty", {}),
    ("t", times(0, 1)[None], r"1-D .*\(1, 2\)", {}),
    ("t", times(0)[0], "1-D", {}),
    ("t", torch.tensor([0, 1]), "floating point .*int64", {}),
    ("t", [0.0, 1.0], r"tensor.*not \[0.0, 1.0\]", {}),
    ("t", times(0, math.nan), "finite .*nan", {}),
    ("t", times(math.nan), "finite .*nan", {}),
    ("t", times(0, math.inf), "finite .*inf", {}),
    ("y0", torch.tensor([1, 2]), "floating point .*int64", {}),
    ("y0", [1.0, 2.0], r"not \[1.0, 2.0\]", {}),
    ("y0", (1.0, 2.0), "not 1.0", {}),
    ("y0", (), r"not \(\)", {}),
    ("y0", (Y, Y.float()), "one dtype .*float64.*float32", {}),
    ("y0", (Y, Y.to("meta")), "one device, .*cpu.*meta", {}),
    ("f", lambda t, y: y[:1], r"shape \(2,\).*shape \(1,\)", {}),
    ("f", lambda t, y: y.float(), "float64.*float32", {}),
    ("f", lambda t, y: y.to("meta"), "cpu.*meta", {}),
    ("f", lambda t, y: 1.0, "like y0, not 1.0", {}),
    ("f", lambda t, y: (y,), r"like y0, not \(tensor", {}),
    ("f", lambda t, y: y[0], "tensor", {"y0": PAIR}),
    ("f", lambda t, y: y[:1], "tensor", {"y0": PAIR}),
    ("f", lambda t, y: y[::-1], "tensor", {"y0": PAIR}),
    ("f", lambda t, y: (y[0], 1), "cpu and 1$", {"y0": PAIR}),
    ("f", lambda t, y: (y[0], y[1].numpy()), "cpu and array", {"y0": PAIR}),
    ("f", lambda t, y: (y[0], y[1].float()), "float32", {"y0": PAIR}),
    ("method", "rk9", "dopri5, rk5, not 'rk9'", {}),
    ("t", times(-1.7e308, 1.7e308), "finite", {}),
    ("t", times(0, 1e300), "torch.float32.*1e[+]300", {"y0": torch.ones(2)}),
    ("options", {"step": 1}, "'step'.*max_steps, first_step, norm;", {}),
    ("options", {"step_size": 0.1}, "'step_size'.*dopri5.*first_step", {}),
    ("options", {"first_step": 0.1}, "'first_step'.*rk4.*step_size", RK4),
    ("options", {"jump_t": times(0.5)}, "one call from each jump to the next", {}),
    ("options", {"grid_constructor": lambda *_: Y}, "use .*times of a grid as t", RK4),
    ("options", {"max_num_steps": 9}, "dopri5's: max_steps", {}),
    ("options", {"perturb": True}, "one call from each jump", RK4),
    ("options", {"step": ""}, "'step'", {}),
    ("options", {"interp": "cubic"}, "rk4's: max_steps, step_size;", RK4),
    ("options", [], "dict.*not \\[\\]", {}),
    ("options", {"step_size": 0}, "step_size.* positive", RK4),
    ("options", {"step_size": "1"}, "step_size.*'1'", RK4),
    ("options", {"max_steps": 1.5}, "max_steps.*1.5", RK4),
    ("options", {"max_steps": 1e5}, "max_steps.*100000.0", {}),
    ("options", {"max_steps": 0}, "max_steps.*integer, not 0", {}),
    ("options", {"first_step": math.inf}, "first_step.*inf", {}),
    ("options", {"first_step": -0.1}, "first_step.*-0.1", {}),
    ("options", {"norm": 2}, "norm.*2", {}),
    ("rtol", -1e-3, "-0.001", {}),
    ("rtol", "tight", "'tight'", {}),
    ("atol", math.nan, "nan", {}),
    ("rtol", 0, "rtol and atol", {"atol": 0}),
    ("atol", (1e-3, 1e-3), "0.001, 0.001", {}),
    ("y0", torch.ones(2, dtype=torch.complex64), "floating point .*complex64", {}),
]
BAD_ADJOINT = [
    ("adjoint_rtol", -1, "-1", {}),
    ("adjoint_options", {"step": 1}, "'step'", {}),
    ("adjoint_options", {"norm": "semi"}, "'semi'", {}),
    ("adjoint_method", "rk9", "'rk9'", {}),
    ("adjoint_params", None, "missing", {}),
    ("adjoint_params", Y, "tensor", {}),
    ("adjoint_params", [1.0], "tensors, not 1.0", {}),
]
BAD_PARAMS = [("params", wrong, text, {}) for _, wrong, text, _ in BAD_ADJOINT[4:]]


@pytest.mark.parametrize(
    ("solve", "bad"),
    [(solve, bad) for solve in (odeint, checkpoint, adjoint) for bad in BAD]
    + [(odeint_adjoint, bad) for bad in BAD_ADJOINT]
    + [(solve, ("event_fn", decay, "many t", {})) for solve in (odeint, odeint_adjoint)]
    + [(odeint_checkpoint, bad) for bad in BAD_PARAMS],
    ids=lambda x: getattr(x, "__name__", None) or f"{x[0]}-{x[2]}",
)
def test_bad_input_is_a_value_error_that_names_it(solve, bad):
    argument, wrong, says, others = bad
    params = {odeint_adjoint: {"adjoint_params": ()}, odeint_checkpoint: {"params": ()}}
    good = {"f": decay, "y0": Y, "t": times(0, 1), **params.get(solve, {})}
    with pytest.raises(ValueError, match=f"^(?=.*{says}){argument}"):
        solve(**{**good, **others, argument: wrong})
