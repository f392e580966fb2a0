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

    odeint             backpropagates through the steps: exact, memory of every evaluation;
    odeint_checkpoint  replays the steps backwards: the same gradient, memory of a state per step;
    odeint_adjoint     solves the adjoint equation (Chen et al., 2018) backwards in time: memory of
                       one evaluation, a gradient as good as its tolerance.

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
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# ------------------------------------------------------------------------- tableaux and one step


# Runge–Kutta coefficients. An adaptive method also has b_err = b − b̂ for the local error and d for
# its dense output, whose last weights belong to f(t + h, x₁): the next k₁ (first same as last).
Tableau = namedtuple("Tableau", "order c a b b_err d", defaults=(None, None))

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
            -12715105075 / 11282082432, 0, 87487479700 / 32700410799, -10690763975 / 1880347072,
            701980252875 / 199316789632, -1453857185 / 822651844, 69997945 / 29380423,
        ),
    ),
}  # fmt: skip
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

    def fail(self, what, hint, t, h, ratio):
        t, h = floats([t, abs(h)])
        error = SolverError(
            f"{what} at t = {t:.9g} (step size {h:.3g}, error ratio {ratio:.3g}, "
            f"{self.nfe} evaluations so far). Try: {hint}."
        )
        error.t, error.step_size, error.error_ratio, error.nfe = t, h, ratio, self.nfe
        raise error

    def fail_at_non_finite(self, t, h, x, k, ratio=math.nan):
        """Name the first evaluation of a step that was not finite."""
        if not torch.isfinite(x).all():
            hint = "y0 and f without NaN or infinity"
            self.fail("The state is not finite", hint, t, h, ratio)
        wrong = [c for c, kj in zip((*self.tableau.c, 1), k) if not torch.isfinite(kj).all()]
        if not wrong and self.atol == 0:
            what = "With atol = 0, a component of the state that is 0 has no tolerance"
            self.fail(what, "an atol above 0", t, h, ratio)
        t = t + wrong[0] * h if wrong else t
        hint = f"f near this t, or a smaller {'first_step' if self.adaptive else 'step_size'}"
        self.fail("f returned a non-finite derivative", hint, t, h, ratio)


def is_finite(x):
    """Whether all of x is finite: as a rule its sum is, and that is the quicker look."""
    return math.isfinite(x.detach().sum().item()) or bool(torch.isfinite(x).all())


def floats(ts):
    return [float(t.detach()) if isinstance(t, Tensor) else t for t in ts]


# ------------------------------------------------------------------------------ streams of steps


# An accepted step of size h from x at t to x1 at t1, and which entries of ts lie in it.
Step = namedtuple("Step", "t t1 h entries x x1 k")


def fixed_grid(problem, ts):
    """t, t1, h and entries of each step: the fewest equal ones within step_size between two ts."""
    counts = [1] * (len(ts) - 1)
    if problem.step_size:
        gaps = [abs(b - a) / problem.step_size for a, b in pairwise(floats(ts))]
        counts = [max(1, math.ceil(min(gap, 1e18) - 1e-9)) for gap in gaps]
    problem.count_steps(sum(counts), ts[0], problem.step_size or math.nan)
    for i, (a, b, n) in enumerate(zip(ts, ts[1:], counts), 1):
        h = (b - a) / n
        for j in range(n):
            last = j == n - 1
            yield a + j * h, b if last else a + (j + 1) * h, h, range(i, i + last)


def fixed_steps(problem, x, ts):
    """Equal steps between any two neighbours of ts."""
    for t, t1, h, entries in fixed_grid(problem, ts):
        x1, k = step(problem, problem.tableau, t, t1, h, x, [problem(t, x)])
        if x.device.type == "cpu" and not is_finite(x1):  # on a GPU, a look would be a wait
            problem.fail_at_non_finite(t, h, x, k)
        problem.stats.accepted += 1
        yield Step(t, t1, h, entries, x, x1, k)
        x = x1


def adaptive_steps(problem, x, ts):
    """Steps whose estimated error is within tolerance; all of them move along with ts[0]."""
    if len(ts) == 1:
        return
    start, *_, end = stops = floats(ts)
    distances, shift = [abs(stop - start) for stop in stops], ts[0] - start  # 0, with a gradient
    t, done, ratio, growth = start, 1, math.nan, 10.0
    t1, k = first_trial(problem, t, end, x, shift)
    while t != end:
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
        first, done = done, bisect_right(distances, abs(t1 - start))
        yield Step(t + shift, t1 + shift, h, range(first, done), x, x1, k)
        t, x, k, growth = t1, x1, k[-1:], 10.0
        t1 = next_end(t, end, size)


def outputs(problem, step, ts):
    """The solution at every time of ts inside the step."""
    for i in step.entries:
        theta = (ts[i] - step.t) / step.h if problem.adaptive else 1.0
        if isinstance(theta, float) and theta > 1 - 1e-12:
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

    Try the whole interval, or a size that a solution with x' / x = const could have. Go on if the
    error that two stages predict is 0.01 to 0.3 tolerances, else try the size for 0.1, at most once
    more: an easy interval takes one step, and a hard one rarely loses more than one evaluation.
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

    Where h is more than 0.7 of that time it is above 0.3, too much for `first_trial`: there the
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
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats, event_fn)
    return unpack(solve(problem, x0, list_times(t, problem)))


def odeint_checkpoint(f, y0, t, *, rtol=1e-7, atol=1e-9, method=None, options=None,
                      params=None, stats=None):
    """As `odeint`, with its gradient, keeping one state per accepted step instead of every k."""
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats)
    params = trainable(f, params, "params")
    if not torch.is_grad_enabled():  # keep no state
        return unpack(solve(problem, x0, list_times(t, problem)))
    return unpack(Checkpoint.apply(problem, t, x0, *params))


def odeint_adjoint(f, y0, t, *, rtol=1e-7, atol=1e-9, method=None, options=None, event_fn=None,
                   adjoint_rtol=None, adjoint_atol=None, adjoint_method=None, adjoint_options=None,
                   adjoint_params=None, stats=None):
    """As `odeint`, differentiated by the continuous adjoint: constant memory, however many steps.

    adjoint_options={"norm": "seminorm"} leaves the parameters' gradients out of the error norm.
    """
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats, event_fn)
    params = trainable(f, adjoint_params, "adjoint_params")
    method = method or "dopri5"
    adjoint_method = adjoint_method or method
    if adjoint_options is None:
        same = not options or adjoint_method == method
        check(same, f"adjoint_options are missing: options are those of {method}")
        adjoint_options = {key: v for key, v in (options or {}).items() if key != "norm"}
    adjoint_rtol = rtol if adjoint_rtol is None else adjoint_rtol
    adjoint_atol = atol if adjoint_atol is None else adjoint_atol
    how = settings(adjoint_method, adjoint_rtol, adjoint_atol, adjoint_options, prefix="adjoint_")
    return unpack(Adjoint.apply(problem, how, t, x0, *params))
# fmt: on


class Checkpoint(torch.autograd.Function):
    """Replays the accepted steps backwards: ∂L/∂x = (∂x₁/∂x)ᵀ ∂L/∂x₁, one step at a time."""

    @staticmethod
    def forward(ctx, problem, t, x0, *params):
        kept = []  # t, t1, h, entries and x of every step, without its k
        xs = solve(problem, x0, list_times(t, problem), lambda step: kept.append(step[:5]))
        ctx.problem, ctx.grid, ctx.count = problem, [place for *place, _ in kept], len(params)
        ctx.save_for_backward(t, *params, *(x for *_, x in kept))
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx, g):  # g is (len(t), *x.shape)
        problem = replace(ctx.problem, stats=Stats(), steps=0)
        t, *saved = ctx.saved_tensors
        params, states = saved[: ctx.count], saved[ctx.count :]
        time = t.detach().requires_grad_(ctx.needs_input_grad[1])
        sources = [*params, time] if time.requires_grad else params
        gx, totals = torch.zeros_like(g[0]), [torch.zeros_like(source) for source in sources]
        with torch.enable_grad():
            ts = list_times(time, problem)
            if problem.adaptive:
                shift = ts[0] - floats(ts)[0]
                grid = [(t + shift, t1 + shift, *rest) for t, t1, *rest in ctx.grid]
            else:
                grid = list(fixed_grid(problem, ts))
        for (t, t1, h, entries), x in zip(reversed(grid), reversed(states)):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                x1, k = step(problem, problem.tableau, t, t1, h, x, [problem(t, x)])
                ys = [x1, *outputs(problem, Step(t, t1, h, entries, x, x1, k), ts)]
            how = {"retain_graph": True, "materialize_grads": True}  # 0 for what is not used
            gx, *grads = torch.autograd.grad(ys, [x, *sources], [gx, *g[entries]], **how)
            totals = [a + b for a, b in zip(totals, grads)]
        ctx.problem.stats.backward_nfe += problem.stats.nfe
        gt = totals.pop() if time.requires_grad else None
        return None, gt, gx + g[0], *totals


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
        x, a, gparams = z
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            dx = f(t, x)
        if not dx.requires_grad:  # f is constant
            return dx, torch.zeros_like(a), torch.zeros_like(gparams)
        da, *dparams = torch.autograd.grad(dx, [x, *params], -a, materialize_grads=True)
        dparams = [part.reshape(-1).to(x.dtype) for part in dparams]
        return dx.detach(), da, torch.cat([gparams[:0], *dparams])

    return augmented


def adjoint_norm(norm, unpack, seminorm):
    """The largest norm of x, a and, unless it is a seminorm, ∂L/∂θ: many do not hide few."""

    def largest(z):
        x, a, gparams = unpack(z)
        norms = [norm(x), norm(a)] if seminorm else [norm(x), norm(a), rms(gparams)]
        return torch.stack([torch.as_tensor(value, device=z.device) for value in norms]).max()

    return largest


# --------------------------------------------------------------------- arguments and their checks


def check(fits, rule, *values):
    """Refuse an argument that does not fit, with what it must be and what it is."""
    if not fits:
        raise ValueError(f"{rule}, not {' and '.join(map(show, values))}" if values else rule)


def show(x):
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}, {x.dtype}, {x.device}"
    return f"{x!r:.200}"


def describe(x):
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x)


def pack(f, y0):
    """f and y0 on one tensor, and the way back: a tuple is flattened, a tensor stays as it is.

    f runs under the autocast of this call, also in a backward pass, and returns y0's dtype.
    """
    single, parts = isinstance(y0, Tensor), y0 if isinstance(y0, tuple) and y0 else (y0,)
    for part in parts:
        real = isinstance(part, Tensor) and part.is_floating_point()
        check(real, "y0 must be a floating point tensor or a tuple of them", part)
        alike = describe(part)[1:] == describe(parts[0])[1:]
        check(alike, "y0 must have one dtype and one device", parts[0], part)
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
            check(False, f"f must return {' and '.join(map(show, parts))} like y0", *dy)
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
    check(method in list(METHODS), f"{prefix}method must be one of {', '.join(METHODS)}", method)
    for what, value in (("rtol", rtol), ("atol", atol)):
        check(0 <= number(value) < math.inf, f"{prefix}{what} must be finite and at least 0", value)
    tableau, rtol, atol = METHODS[method], number(rtol), number(atol)
    possible = not tableau.b_err or rtol > 0 or atol > 0
    check(possible, f"{prefix}rtol and {prefix}atol must not both be 0: no step would do")
    check(isinstance(options, dict), f"{prefix}options must be a dict or None", options)
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
        if getattr(value, "ndim", 0) == 0 and value == DEFAULTS.get(what, math.nan):
            continue
        name = f"{prefix}options[{what!r}]"
        check(what in known, f"{name} is none of {method}'s: {', '.join(known)}; else {INSTEAD}")
        must, fits = known[what]
        check(fits(value), f"{name} must be {must}", value)
        fields[what] = number(value) if what == size else value
    return fields


def set_up(f, y0, t, rtol, atol, method, options, stats, event_fn=None):
    """Check every argument; returns the Problem, y0 as one tensor and the way back."""
    check(event_fn is None, "event_fn is not supported: look for the event in the states at many t")
    for name in CALLBACKS:
        check(not hasattr(f, name), f"f.{name} would never be called: use stats to count steps")
    fields = settings(method or "dopri5", rtol, atol, {} if options is None else options)
    f, x0, unpack = pack(f, y0)
    if "norm" in fields:
        norm = fields["norm"]
        fields["norm"] = lambda x: norm(unpack(x))
    problem = Problem(f, stats or Stats(), **fields)
    check_times(t, x0, problem)
    return problem, x0, unpack


@torch.no_grad()
def check_times(t, x, problem):
    flat = isinstance(t, Tensor) and t.dim() == 1 and t.is_floating_point() and len(t) > 0
    check(flat, "t must be a 1-D floating point tensor, and not empty", t)
    near = t.device.type == "cpu" or t.device == x.device
    check(near, f"t must be on the cpu or on y0's device {x.device}", t)
    ts, largest = list_times(t, problem), torch.finfo(x.dtype).max / 2
    if isinstance(ts[0], float):
        finite = all(abs(time) <= largest for time in ts)  # then all differences are finite, too
        ordered = sorted(set(ts)) in (ts, ts[::-1])
        rule = f"t must be finite in y0's {x.dtype} and strictly increasing or decreasing"
        check(finite and ordered, rule, ts)


def list_times(t, problem):
    """t as a list of floats, or of 0-dim float64 tensors where gradients or a GPU need that."""
    differentiable = t.requires_grad and torch.is_grad_enabled()
    # Fixed steps need no value of t, so on a GPU they do not wait for it.
    unread = t.device.type != "cpu" and not problem.adaptive and not problem.step_size
    return list(t.double().unbind()) if differentiable or unread else t.tolist()


def trainable(f, params, argument):
    """The parameters that require a gradient: those of a module, or the tensors that were named."""
    if params is None:
        hint = "name the tensors that f uses and that require a gradient, or () if there are none"
        check(isinstance(f, nn.Module), f"{argument} is missing, and f is not an nn.Module: {hint}")
        params = f.parameters()
    rule = f"{argument} must be a list or tuple of tensors"
    check(not isinstance(params, Tensor), rule, params)
    params = list(params)
    check(all(isinstance(p, Tensor) for p in params), rule, *params)
    params = [p for p in params if p.requires_grad]
    if torch.is_grad_enabled() and not all(p.is_leaf for p in params):
        check_independent(params, argument)
    return params


def check_independent(params, argument):
    """Gradients of a parameter and of another that was computed from it would count twice."""
    nodes = {torch.autograd.graph.get_gradient_edge(p).node for p in params}
    seen, todo = set(), [p.grad_fn for p in params if p.grad_fn is not None]
    while todo:
        found = {node for node, _ in todo.pop().next_functions if node is not None} - seen
        check(not found & nodes, f"{argument} must not be computed from one another: drop one")
        seen |= found
        todo += found
