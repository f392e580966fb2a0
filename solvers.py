"""Runge–Kutta solvers for y' = f(t, y), and three ways to differentiate them.

    paper                                               here
    ------------------------------------------------    ----------------------------------------
    Sec. 2.2, h(t₁) = h(t₀) + ∫ f(h(t), t) dt           odeint
    Sec. 2.2, 3.3, the adjoint method, O(1) memory      odeint_adjoint
    App. C.1, fourth-order Runge–Kutta                  method="rk4", one `step` per interval of t
    App. C.2, C.3, dopri5 with a tolerance              method="dopri5", `adaptive_steps`

A solve is a stream of accepted steps (`fixed_steps` or `adaptive_steps`); everything else reads
that stream. A state is one tensor x of any shape; a tuple of tensors is flattened into one at the
door (`pack`). Time is float64 whatever the state is, and f sees it in the state's precision.

Three gradients, all of them reaching y0, the parameters and t:

    odeint             backpropagation through the steps: exact for the discrete solve,
                       memory of every evaluation;
    odeint_checkpoint  keeps one state per accepted step and replays the steps backwards:
                       the same gradient, memory of one step;
    odeint_adjoint     solves the adjoint equation backwards in time (Chen et al., 2018):
                       memory of one evaluation, a gradient as good as its tolerance.

Departures from the paper, which calls torchdiffeq:
  - "rk4" is the classic method; torchdiffeq's is the 3/8 rule. Both are of order 4.
  - The first step of dopri5 is the whole interval where two stages predict that its error is within
    tolerance, and the last two are equally long: about half the evaluations on easy f.
  - f is never evaluated outside [t[0], t[-1]]: the last step ends there.
  - `step_size` divides each interval of t into equal steps; torchdiffeq steps over t and
    interpolates linearly.
  - The error norm of a tuple is that of its concatenation.
  - y0 is real; rtol and atol are one number each; `event_fn` and callbacks on f are refused.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# ------------------------------------------------------------------------- tableaux and one step


class Tableau(NamedTuple):
    """Runge–Kutta coefficients.

    An adaptive method also has b_err = b − b̂, which estimates the local error, and d, the quartic
    part of its dense output. Both are one longer than b: their last weight belongs to f(t + h, x₁),
    which the next step reuses as its k₁ (first same as last).
    """

    order: int
    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    b_err: tuple[float, ...] | None = None
    d: tuple[float, ...] | None = None


METHODS = {
    "euler": Tableau(order=1, c=(0,), a=((),), b=(1,)),
    "midpoint": Tableau(order=2, c=(0, 1 / 2), a=((), (1 / 2,)), b=(0, 1)),
    "rk4": Tableau(
        order=4,
        c=(0, 1 / 2, 1 / 2, 1),
        a=((), (1 / 2,), (0, 1 / 2), (0, 0, 1)),
        b=(1 / 6, 1 / 3, 1 / 3, 1 / 6),
    ),
    # Dormand and Prince (1980), with 2/3 of their error estimate (Shampine, 1986) as torchdiffeq
    # has it; d as in Hairer, Nørsett and Wanner, Solving ODEs I, Sec. II.6.
    "dopri5": Tableau(
        order=5,
        c=(0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1),
        a=(
            (),
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        ),
        b=(35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        b_err=(71 / 86400, 0, -142 / 50085, 71 / 2880, -5751 / 169600, 44 / 1575, -1 / 60),
        d=(
            -12715105075 / 11282082432,
            0,
            87487479700 / 32700410799,
            -10690763975 / 1880347072,
            701980252875 / 199316789632,
            -1453857185 / 822651844,
            69997945 / 29380423,
        ),
    ),
}
METHODS["rk5"] = METHODS["dopri5"]._replace(b_err=None, d=None)  # the same in fixed steps


def combine(x, h, weights, k, skip=None):
    """x + h Σⱼ wⱼ kⱼ.

    Stages skip weights of 0; results keep them: 0 · NaN = NaN shows that a stage went wrong.
    """
    for w, kj in zip(weights, k):
        if w == skip:
            continue
        hw = h * w  # a float, or a tensor where t requires a gradient or the host has not read it
        x = x + hw.to(kj.dtype) * kj if isinstance(hw, Tensor) else torch.add(x, kj, alpha=hw)
    return x


def step(f, tableau, t, t1, h, x, k):
    """x + h Σᵢ bᵢkᵢ and all kᵢ = f(t + cᵢh, x + h Σⱼ aᵢⱼkⱼ), of which k has the first.

    t1 is t + h without its rounding error.
    """
    k = [*k]
    for c, a in zip(tableau.c[len(k) :], tableau.a[len(k) :]):
        k.append(f(t1 if c == 1 else t + c * h, combine(x, h, a, k, skip=0)))
    return combine(x, h, tableau.b, k), k


def interpolate(tableau, x, h, k, theta):
    """x(t + θh), of order 4: the cubic Hermite polynomial plus h θ²(1 − θ)² Σᵢ dᵢkᵢ."""
    bump = theta**2 * (1 - theta) ** 2
    weights = [theta**2 * (3 - 2 * theta) * b + bump * d for b, d in zip(tableau.b, tableau.d)]
    weights[0] = weights[0] + theta * (1 - theta) ** 2
    weights.append(bump * tableau.d[-1] - theta**2 * (1 - theta))
    return combine(x, h, weights, k)


# -------------------------------------------------------------------------------- what is solved


@dataclass
class Stats:
    """What the calls that it was given to have cost: evaluations of f, and steps of the solve."""

    nfe: int = 0
    accepted: int = 0
    rejected: int = 0
    backward_nfe: int = 0


class SolverError(RuntimeError):
    """A solve that could not go on; t, step_size, error_ratio and nfe say where it stopped."""

    t: float
    step_size: float
    error_ratio: float
    nfe: int


def rms(x):
    """The root mean square, the norm in which errors are measured."""
    return torch.linalg.vector_norm(x) / math.sqrt(max(x.numel(), 1))


@dataclass
class Problem:
    """f on one tensor, the method and its settings: all that a solve needs but x and t."""

    f: Callable[[Tensor, Tensor], Tensor]
    stats: Stats
    tableau: Tableau
    rtol: float
    atol: float
    step_size: float | None = None
    first_step: float | None = None
    max_steps: int = 100_000
    norm: Callable[[Tensor], Tensor] = rms
    steps: int = 0  # tried so far
    nfe: int = 0

    @property
    def adaptive(self):
        return self.tableau.b_err is not None

    def __call__(self, t, x):
        """f(t, x), with t (a float or a float64 tensor) as a 0-dim tensor of x's precision."""
        self.nfe += 1
        self.stats.nfe += 1
        if isinstance(t, Tensor):
            return self.f(t.to(x.device, x.dtype), x)
        return self.f(torch.scalar_tensor(t, dtype=x.dtype, device=x.device), x)

    def measure(self, v, size):
        """The norm of v in units of the tolerance for a state of this size."""
        return float(self.norm(v / (self.atol + self.rtol * size)))

    def count_steps(self, steps, t, h, ratio=math.nan):
        """max_steps is one limit for the whole call."""
        self.steps += steps
        if self.steps > self.max_steps:
            hint = "a larger max_steps, larger steps or tolerances, or a less stiff f"
            self.fail(f"max_steps = {self.max_steps} is not enough", hint, t, h, ratio)

    def fail(self, what, hint, t, h, ratio=math.nan):
        t, h = floats([t, h])
        error = SolverError(
            f"{what} at t = {t:.9g} (step size {abs(h):.3g}, error ratio {ratio:.3g}, "
            f"{self.nfe} evaluations so far). Try: {hint}."
        )
        vars(error).update(t=t, step_size=abs(h), error_ratio=ratio, nfe=self.nfe)
        raise error

    def fail_at_non_finite(self, t, h, x, k, ratio=math.nan):
        """Name the first evaluation of a step that was not finite."""
        wrong = [c for c, kj in zip((*self.tableau.c, 1), k) if not torch.isfinite(kj).all()]
        what = "f returned a non-finite derivative"
        hint = f"f near this t, or a smaller {'first_step' if self.adaptive else 'step_size'}"
        if not torch.isfinite(x).all():
            what, hint, wrong = "The state is not finite", "y0 and f without NaN or infinity", []
        elif not wrong and self.atol == 0:
            what = "With atol = 0, a component of the state that is 0 has no tolerance"
            hint = "an atol above 0"
        self.fail(what, hint, t + wrong[0] * h if wrong else t, h, ratio)


def is_finite(x):
    return math.isfinite(x.detach().sum().item()) or bool(torch.isfinite(x).all())


def floats(ts):
    return [float(t.detach()) if isinstance(t, Tensor) else t for t in ts]


# ------------------------------------------------------------------------------ streams of steps


class Step(NamedTuple):
    """An accepted step of size h from x at t to x1 at t1, and which entries of ts lie in it."""

    t: float | Tensor
    t1: float | Tensor
    h: float | Tensor
    entries: range
    x: Tensor
    x1: Tensor
    k: list[Tensor]


def fixed_grid(ts, counts):
    """t, t1, h and entries of each step, of which there are so many in each interval of ts."""
    for i, (a, b, n) in enumerate(zip(ts, ts[1:], counts), 1):
        h = (b - a) / n
        for j in range(n):
            last = j == n - 1
            yield a + j * h, b if last else a + (j + 1) * h, h, range(i, i + last)


def count_fixed(ts, step_size):
    """How many equal steps in each interval of ts keep |h| within step_size; one without it."""
    if step_size is None:
        return [1] * (len(ts) - 1)
    gaps = [abs(b - a) for a, b in pairwise(floats(ts))]
    return [max(1, math.ceil(min(gap / step_size, 1e18) - 1e-9)) for gap in gaps]


def fixed_steps(problem, x, ts):
    """Equal steps between any two neighbours of ts."""
    counts = count_fixed(ts, problem.step_size)
    problem.count_steps(sum(counts), ts[0], problem.step_size or math.nan)
    for t, t1, h, entries in fixed_grid(ts, counts):
        x1, k = step(problem, problem.tableau, t, t1, h, x, [problem(t, x)])
        if x.device.type == "cpu" and not is_finite(x1):  # on a GPU, a look would be a wait
            problem.fail_at_non_finite(t, h, x, k)
        problem.stats.accepted += 1
        yield Step(t, t1, h, entries, x, x1, k)
        x = x1


def adaptive_steps(problem, x, ts):
    """Steps whose estimated error is within tolerance; all of them move along with ts[0]."""
    (t, *stops), shift = floats(ts), zero_with_gradient(ts[0])
    if not stops:
        return
    start, end = t, stops[-1]
    distances = [abs(stop - start) for stop in stops]
    done, ratio, growth = 0, math.nan, 10.0
    t1, k = first_trial(problem, t, end, x, shift)
    while True:
        h = t1 - t
        problem.count_steps(1, t, h, ratio)
        x1, k = step(problem, problem.tableau, t + shift, t1 + shift, h, x, k)
        k.append(problem(t1 + shift, x1))
        ratio = error_ratio(problem, x, x1, h, k)
        size = next_size(h, ratio, growth)
        if ratio > 1:
            problem.stats.rejected += 1
            t1, growth = next_end(t, end, size), 1.0  # the next step is not longer than this one
            check_rejected(problem, t, t1, end, x, k, ratio)
            k = k[:1]
            continue
        problem.stats.accepted += 1
        first, done = done, len(stops) if t1 == end else bisect_right(distances, abs(t1 - start))
        yield Step(t + shift, t1 + shift, h, range(first + 1, done + 1), x, x1, k)
        if t1 == end:
            return
        t, x, k, growth = t1, x1, [k[-1]], 10.0
        t1 = next_end(t, end, size)


def zero_with_gradient(t):
    """0, which moves with t where that requires a gradient."""
    return t - t.detach() if isinstance(t, Tensor) else 0.0


def outputs(problem, step, ts):
    """The solution at every time of ts inside the step."""
    for i in step.entries:
        theta = (ts[i] - step.t) / step.h if problem.adaptive else 1.0
        if isinstance(theta, float) and (theta > 1 - 1e-12 or i == len(ts) - 1):
            yield step.x1
            continue
        if len(step.k) == len(problem.tableau.b):  # a replayed step: its last derivative is due now
            step.k.append(problem(step.t1, step.x1))
        yield interpolate(problem.tableau, step.x, step.h, step.k, theta)


def solve(problem, x0, ts, visit=lambda step: None):
    """x at every time of ts, stacked; `visit` sees each accepted step."""
    xs = [x0]
    steps = adaptive_steps if problem.adaptive else fixed_steps
    for accepted in steps(problem, x0, ts):
        xs.extend(outputs(problem, accepted, ts))
        visit(accepted)
    return torch.stack(xs)


# ----------------------------------------------------------------- the controller and first step


@torch.no_grad()
def error_ratio(problem, x, x1, h, k):
    """‖h Σᵢ b_errᵢ kᵢ / (atol + rtol max(|x|, |x₁|))‖, infinite if x₁ or a stage is not finite."""
    first, *rest = problem.tableau.b_err
    error = combine(k[0] * (h * first), h, rest, k[1:])
    ratio = problem.measure(error, torch.maximum(x.abs(), x1.abs()))
    return ratio if math.isfinite(ratio) and is_finite(x1) else math.inf


def next_size(h, ratio, growth):
    """0.9 |h| r^−1/5, since r grows as h⁵; at least |h|/5 and at most growth · |h|."""
    return abs(h) * min(max(0.9 * max(ratio, 1e-9) ** -0.2, 0.2), growth)


def next_end(t, end, size):
    """Where a step of this size from t ends; of two that are left, each takes a half."""
    left = abs(end - t)
    if left <= 1.1 * size:
        return end
    t1 = t + math.copysign(min(size, left / 2), end - t)
    return t1 if t1 != t else math.nextafter(t, end)


def check_rejected(problem, t, t1, end, x, k, ratio):
    """Whether a shorter step is worth a try: not where f is not finite at an accepted state."""
    vanished = t1 != end and abs(t1 - t) <= 1e-15 * max(abs(t), abs(end))
    if ratio == math.inf and (vanished or not is_finite(k[0])):
        problem.fail_at_non_finite(t, t1 - t, x, k, ratio)
    if vanished:
        hint = "f for a singularity or a jump near this t, larger rtol and atol, or float64"
        problem.fail("The step size has vanished", hint, t, t1 - t, ratio)


def first_trial(problem, t, end, x, shift):
    """Where the first step ends, and the stages that are known of it.

    Two stages predict the error of a step (`predicted_ratio`). Start from the whole interval, or
    from a size that a solution with x' / x = const could have; go on if the prediction lies between
    0.01 and 0.3 tolerances, else take the size for 0.1 and look once more. So an easy interval
    takes one step, and a hard one rarely loses more than the evaluation that any choice costs.
    """
    k1, (_, c, *_), (_, a, *_) = problem(t + shift, x), problem.tableau.c, problem.tableau.a
    if problem.first_step:
        return next_end(t, end, problem.first_step), [k1]
    with torch.no_grad():
        d0, d1 = problem.measure(x, x.abs()), problem.measure(k1, x.abs())
    if not math.isfinite(d0 + d1):
        problem.fail_at_non_finite(t, 0.0, x, [k1])
    size = d0 / d1 * min(1.0, 2 * (PREDICTION * d0) ** -0.2) if d0 > 0 and d1 > 0 else math.inf
    t1, least = next_end(t, end, size), 0.01
    for look in range(5):
        h = t1 - t
        k2 = problem(t + shift + c * h, combine(x, h, a, [k1]))
        ratio = predicted_ratio(problem, h, x, k1, k2)
        if ratio <= 0.3 and (ratio >= least or t1 == end):
            return t1, [k1, k2]
        least = 0.01 if ratio <= 0.3 else 0.0  # once too long, never longer again
        t1 = next_end(t, end, abs(h) * max((0.1 / max(ratio, 1e-15)) ** 0.2, 1e-3))
        if look and ratio < 1e4:  # near enough: a field whose x' jumps may never come nearer
            break
    return t1, [k1]


PREDICTION = 0.0025  # within a factor of 3 for 9 of 10 networks with steps near the tolerance


@torch.no_grad()
def predicted_ratio(problem, h, x, k1, k2):
    """The error ratio h ‖x'‖ (h ‖x''‖ / ‖x'‖)⁴ of a solution with one time scale ‖x'‖ / ‖x''‖.

    It is above 0.3, too much for `first_trial`, where h is more than 0.7 of that time: there the
    true error of a step has been found to be ten times its estimate.
    """
    slopes = k1, k2, (k2 - k1) / problem.tableau.c[1]
    start, later, change = (problem.measure(v, x.abs()) for v in slopes)
    speed = max(start, later)
    if not math.isfinite(speed + change):
        return math.inf
    bend = change / speed if speed > 0 else 0.0  # h ‖x''‖ / ‖x'‖, if x' goes on as it begins
    return max(PREDICTION * abs(h) * speed * bend**4, min(0.3 * (bend / 0.7) ** 5, 1.0))


# --------------------------------------------------------------------------- the three gradients


# fmt: off
def odeint(f, y0, t, *, rtol=1e-7, atol=1e-9, method=None, options=None, event_fn=None, stats=None):
    """y(tᵢ) for every tᵢ, where y' = f(t, y) and y(t₀) = y0; differentiable by backpropagation."""
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method or "dopri5", options, stats, event_fn)
    return unpack(solve(problem, x0, list_times(t, problem, t.requires_grad)))


def odeint_checkpoint(f, y0, t, *, rtol=1e-7, atol=1e-9, method=None, options=None,
                      params=None, stats=None):
    """As `odeint`, with its gradient, keeping one state per accepted step instead of every k."""
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method or "dopri5", options, stats)
    params = trainable(f, params, "params")
    if not torch.is_grad_enabled():
        return unpack(solve(problem, x0, list_times(t, problem)))
    return unpack(Checkpoint.apply(problem, t, x0, *params))


def odeint_adjoint(f, y0, t, *, rtol=1e-7, atol=1e-9, method=None, options=None, event_fn=None,
                   adjoint_rtol=None, adjoint_atol=None, adjoint_method=None, adjoint_options=None,
                   adjoint_params=None, stats=None):
    """As `odeint`, differentiated by the continuous adjoint: constant memory, however many steps.

    adjoint_options={"norm": "seminorm"} leaves the parameters' gradients out of the error norm.
    """
    method = method or "dopri5"
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats, event_fn)
    params = trainable(f, adjoint_params, "adjoint_params")
    if adjoint_options is None:
        if options and (adjoint_method or method) != method:
            raise ValueError(f"adjoint_options are missing: options are those of {method}")
        adjoint_options = {key: v for key, v in (options or {}).items() if key != "norm"}
    adjoint_rtol = rtol if adjoint_rtol is None else adjoint_rtol
    adjoint_atol = atol if adjoint_atol is None else adjoint_atol
    how = adjoint_method or method, adjoint_rtol, adjoint_atol, adjoint_options
    backwards = settings(*how, prefix="adjoint_")
    if not torch.is_grad_enabled():
        return unpack(solve(problem, x0, list_times(t, problem)))
    return unpack(Adjoint.apply(problem, backwards, t, x0, *params))
# fmt: on


class Checkpoint(torch.autograd.Function):
    """Replays the accepted steps backwards: ∂L/∂x = (∂x₁/∂x)ᵀ ∂L/∂x₁, one step at a time."""

    @staticmethod
    def forward(ctx, problem, t, x0, *params):
        grid, states = [], []

        def visit(accepted):
            grid.append(accepted[:4])  # t, t1, h, entries
            states.append(accepted.x)

        xs = solve(problem, x0, list_times(t, problem), visit)
        ctx.problem, ctx.grid, ctx.count = problem, grid, len(params)
        ctx.save_for_backward(t, *params, *states)
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx, g):  # g is (len(t), *x.shape)
        problem = replace(ctx.problem, stats=Stats())
        t, *saved = ctx.saved_tensors
        params, states = saved[: ctx.count], saved[ctx.count :]
        sources = [t.detach().requires_grad_(ctx.needs_input_grad[1]), *params]
        gx, totals = torch.zeros_like(g[0]), [torch.zeros_like(source) for source in sources]
        with torch.enable_grad():
            ts = list_times(sources[0], problem, sources[0].requires_grad)
            grid = grid_of_times(problem, ctx.grid, ts)
        for (t, t1, h, entries), x in zip(reversed(grid), reversed(states)):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                x1, k = step(problem, problem.tableau, t, t1, h, x, [problem(t, x)])
                replayed = Step(t, t1, h, entries, x, x1, k)
                ys = [x1, *outputs(problem, replayed, ts)]
            gx, *grads = gradients(ys, [x, *sources], [gx, *g[entries]], retain_graph=True)
            totals = [a + b for a, b in zip(totals, grads)]
        ctx.problem.stats.backward_nfe += problem.stats.nfe
        return None, totals[0], gx + g[0], *totals[1:]


def grid_of_times(problem, grid, ts):
    """The steps as functions of ts: fixed ones divide intervals, adaptive ones move with ts[0]."""
    if not problem.adaptive:
        return list(fixed_grid(ts, count_fixed(ts, problem.step_size)))
    shift = zero_with_gradient(ts[0])
    return [(t + shift, t1 + shift, h, entries) for t, t1, h, entries in grid]


class Adjoint(torch.autograd.Function):
    """a(t) = ∂L/∂x(t) solves a' = −(∂f/∂x)ᵀ a from t_N back to t₀, and ∂L/∂θ = ∫ (∂f/∂θ)ᵀ a dt."""

    @staticmethod
    def forward(ctx, problem, backwards, t, x0, *params):
        xs = solve(problem, x0, list_times(t, problem))
        ctx.problem, ctx.backwards = problem, backwards
        ctx.save_for_backward(t, xs, *params)
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx, g):  # g is (len(t), *x.shape)
        t, xs, *params = ctx.saved_tensors
        forwards = replace(ctx.problem, stats=Stats())
        a, gparams = torch.zeros_like(xs[0]), xs.new_zeros(sum(p.numel() for p in params))
        field, _, unpack = pack(adjoint_field(forwards.f, params), (a, a, gparams))
        norm = adjoint_norm(forwards.norm, unpack, seminorm="norm" in ctx.backwards)
        problem = Problem(field, forwards.stats, **{**ctx.backwards, "norm": norm})
        ts, gt = list_times(t, problem), torch.zeros_like(t)
        for i in range(len(ts) - 1, 0, -1):
            if ctx.needs_input_grad[2]:  # y(tᵢ) moves along with its own time at speed f
                gt[i] = (g[i] * forwards(ts[i], xs[i])).sum()
            z = torch.cat([part.reshape(-1) for part in (xs[i], a + g[i], gparams)])
            _, a, gparams = unpack(solve(problem, z, [ts[i], ts[i - 1]])[-1])
        if ctx.needs_input_grad[2] and len(ts) > 1:  # a later start leaves out f at the start
            gt[0] = -(a * forwards(ts[0], xs[0])).sum()
        ctx.problem.stats.backward_nfe += forwards.stats.nfe
        parts = zip(gparams.split([p.numel() for p in params]), params)
        return None, None, gt, a + g[0], *(part.to(p.dtype).view_as(p) for part, p in parts)


def adjoint_field(f, params):
    """(x, a, ∂L/∂θ)'."""

    def augmented(t, z):
        x, a, _ = z
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            dx = f(t, x)
        da, *dparams = gradients([dx], [x, *params], [-a])
        dparams = [part.reshape(-1).to(x.dtype) for part in dparams]
        return dx.detach(), da, torch.cat([z[2][:0], *dparams])

    return augmented


def adjoint_norm(norm, unpack, seminorm):
    """The largest norm among the parts of (x, a, ∂L/∂θ), so that many do not hide few.

    x and a have the norm of the solve forwards; ∂L/∂θ, its root mean square, or no part in it.
    """

    def largest(z):
        x, a, gparams = unpack(z)
        norms = [norm(x), norm(a), *([] if seminorm else [rms(gparams)])]
        return torch.stack([torch.as_tensor(value, device=z.device) for value in norms]).max()

    return largest


def gradients(ys, xs, gs, **how):
    """(∂ys/∂x)ᵀ gs for every x; 0 where x requires no gradient or ys do not depend on it."""
    pairs = [(y, g) for y, g in zip(ys, gs) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    (ys, gs), wanted = zip(*pairs), [x for x in xs if x.requires_grad]
    found = iter(torch.autograd.grad(ys, wanted, gs, materialize_grads=True, **how))
    return [next(found) if x.requires_grad else torch.zeros_like(x) for x in xs]


# --------------------------------------------------------------------- arguments and their checks


def describe(x):
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x)


def show(*xs):
    return " and ".join(
        f"a tensor of shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, {x.device}"
        if isinstance(x, Tensor)
        else f"a {type(x).__name__}"
        for x in xs
    )


def pack(f, y0):
    """f and y0 on one tensor, and the way back. A tuple is flattened; a tensor stays as it is.

    f runs under the autocast of this call, also in a backward pass, and returns y0's dtype.
    """
    single, parts = isinstance(y0, Tensor), y0 if isinstance(y0, tuple) and y0 else (y0,)
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            raise ValueError(f"y0 must be floating point tensors, not {show(part)}")
        if describe(part)[1:] != describe(parts[0])[1:]:
            raise ValueError(f"y0 must have one dtype and one device, not {show(parts[0], part)}")
    sizes, like = [part.numel() for part in parts], [describe(part) for part in parts]
    device, dtype = parts[0].device.type, parts[0].dtype
    mixed = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    lower = torch.get_autocast_dtype(device) if mixed else None

    def unpack(x):  # (..., numel) to a tuple of (..., *shape)
        if single:
            return x
        pieces = zip(x.split(sizes, -1), parts)
        return tuple(piece.reshape(x.shape[:-1] + part.shape) for piece, part in pieces)

    def packed(t, x):
        with torch.autocast(device, lower) if mixed else nullcontext():
            dy = f(t, unpack(x))
        dy = dy if isinstance(dy, tuple | list) and not single else (dy,)
        dy = [d.to(dtype) if mixed and isinstance(d, Tensor) else d for d in dy]
        if [describe(d) for d in dy] != like:
            raise ValueError(f"f must return {show(*parts)} like y0, but returned {show(*dy)}")
        return dy[0] if single else torch.cat([d.reshape(-1) for d in dy])

    return packed, y0 if single else torch.cat([part.reshape(-1) for part in parts]), unpack


# Options of torchdiffeq that are not here may be given at their defaults.
DEFAULTS = {
    "first_step": None, "step_size": None, "min_step": 0, "max_step": math.inf, "safety": 0.9,
    "ifactor": 10.0, "dfactor": 0.2, "max_num_steps": 2**31 - 1, "dtype": torch.float64,
    "step_t": None, "jump_t": None, "perturb": False, "grid_constructor": None, "interp": "linear",
}  # fmt: skip
INSTEAD = "use tolerances, times of a grid as t, or one call from each jump to the next"
CALLBACKS = [f"callback_{name}" for name in ("step", "accept_step", "reject_step")]
CALLBACKS += [f"{name}_adjoint" for name in CALLBACKS]


def number(value):
    """A number of Python, numpy or a 0-dim tensor as a float; NaN if it is none."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    return float(value) if isinstance(value, int | float) else math.nan


def settings(method, rtol, atol, options, prefix=""):
    """Check how to solve; returns it as fields of a Problem."""
    if method not in list(METHODS):
        raise ValueError(f"{prefix}method must be one of {', '.join(METHODS)}, not {method!r}")
    for what, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= number(value) < math.inf:
            raise ValueError(f"{prefix}{what} must be a finite number of at least 0, not {value!r}")
    tableau, rtol, atol = METHODS[method], number(rtol), number(atol)
    if tableau.b_err and rtol == atol == 0:
        raise ValueError(f"{prefix}rtol and {prefix}atol must not both be 0: no step would do")
    if not isinstance(options, dict):
        raise ValueError(f"{prefix}options must be a dict or None, not {options!r}")
    size = "first_step" if tableau.b_err else "step_size"
    known = {  # what a value must be, and whether it is
        "max_steps": ("a positive integer", lambda value: isinstance(value, int) and value > 0),
        size: ("a positive number", lambda value: 0 < number(value) < math.inf),
    }
    if tableau.b_err:
        semi = "'seminorm'", lambda value: value == "seminorm"
        known["norm"] = semi if prefix else ("a function of a state", callable)
    fields = {"tableau": tableau, "rtol": rtol, "atol": atol}
    for what, value in options.items():
        name = f"{prefix}options[{what!r}]"
        if getattr(value, "ndim", 0) == 0 and value == DEFAULTS.get(what, math.nan):
            continue
        if what not in known:
            raise ValueError(f"{name} is none of {method}'s: {', '.join(known)}; else {INSTEAD}")
        must, fits = known[what]
        if not fits(value):
            raise ValueError(f"{name} must be {must}, not {value!r}")
        fields[what] = number(value) if what == size else value
    return fields


def set_up(f, y0, t, rtol, atol, method, options, stats, event_fn=None):
    """Check every argument; returns the Problem, y0 as one tensor and the way back."""
    if event_fn is not None:
        raise ValueError("event_fn is not supported: look for the event in the states at many t")
    for name in CALLBACKS:
        if hasattr(f, name):
            raise ValueError(f"f.{name} would never be called: use stats=Stats() to count steps")
    fields = settings(method, rtol, atol, {} if options is None else options)
    f, x0, unpack = pack(f, y0)
    if "norm" in fields:
        norm = fields["norm"]
        fields["norm"] = lambda x: norm(unpack(x))
    problem = Problem(f, Stats() if stats is None else stats, **fields)
    check_times(t, x0, problem)
    return problem, x0, unpack


def check_times(t, x, problem):
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.is_floating_point() or len(t) == 0:
        raise ValueError(f"t must be a 1-D floating point tensor, and not empty, not {show(t)}")
    if t.device.type != "cpu" and t.device != x.device:
        raise ValueError(f"t must be on the cpu or on y0's device {x.device}, not on {t.device}")
    ts = list_times(t, problem)
    if isinstance(ts[0], float):
        gaps = [b - a for a, b in pairwise(ts)]
        one_way = all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
        if not one_way or not all(map(math.isfinite, (*ts, ts[-1] - ts[0]))):
            raise ValueError(f"t must be finite and strictly increasing or decreasing, not {ts}")
        if max(map(abs, ts)) > torch.finfo(x.dtype).max:
            raise ValueError(f"t must be finite also in y0's {x.dtype}, in which f sees it: {ts}")


def list_times(t, problem, differentiable=False):
    """t as a list of floats, or of 0-dim float64 tensors where gradients or a GPU need that.

    Fixed steps can work with times that the host has not read, so on a GPU they never wait for it.
    """
    unread = t.device.type != "cpu" and not problem.adaptive and not problem.step_size
    return list(t.double().unbind()) if differentiable or unread else t.tolist()


def trainable(f, params, argument):
    """The parameters that require a gradient: those of a module, or the tensors that were named."""
    if params is None and not isinstance(f, nn.Module):
        hint = "name the tensors that f uses and that require a gradient, or () if there are none"
        raise ValueError(f"{argument} is missing, and f is not an nn.Module: {hint}")
    params = f.parameters() if params is None else params
    params = params if isinstance(params, Tensor) else list(params)
    if isinstance(params, Tensor) or not all(isinstance(p, Tensor) for p in params):
        got = show(params) if isinstance(params, Tensor) else show(*params)
        raise ValueError(f"{argument} must be a list or tuple of tensors, not {got}")
    params = [p for p in params if p.requires_grad]
    if torch.is_grad_enabled() and not all(p.is_leaf for p in params):
        check_independent(params, argument)
    return params


def check_independent(params, argument):
    """Gradients of a parameter and of another that was computed from it would count twice."""
    nodes = {torch.autograd.graph.get_gradient_edge(p).node for p in params}
    seen, todo = set(), [p.grad_fn for p in params if p.grad_fn is not None]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node in nodes:
                raise ValueError(f"{argument} must not be computed from one another: drop one")
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
