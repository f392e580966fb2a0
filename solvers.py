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
  - A non-finite derivative ends the solve at once with its t; it is never stepped around.
  - f is never evaluated outside [t[0], t[-1]]: the last step ends there.
  - The error norm of a tuple is that of its concatenation.
"""

import cmath
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
        hw = h * w  # a float, or a tensor where t wants a gradient or the host has not read it
        x = x + hw.to(kj.dtype) * kj if isinstance(hw, Tensor) else torch.add(x, kj, alpha=hw)
    return x


def step(f, tableau, t, x, h, k1, t1=None):
    """kᵢ = f(t + cᵢh, x + h Σⱼ aᵢⱼkⱼ);  returns x + h Σᵢ bᵢkᵢ and every kᵢ.

    t1 is t + h without its rounding error, so that f is not asked beyond the end.
    """
    k, t1 = [k1], t + h if t1 is None else t1
    for c, a in zip(tableau.c[1:], tableau.a[1:]):
        k.append(f(t1 if c == 1 else t + c * h, combine(x, h, a, k, skip=0)))
    return combine(x, h, tableau.b, k), k


def interpolate(tableau, x, h, k, theta):
    """x(t + θh), of order 4: the cubic Hermite polynomial plus h θ²(1 − θ)² Σᵢ dᵢkᵢ."""
    bump = theta**2 * (1 - theta) ** 2
    weights = [theta**2 * (3 - 2 * theta) * b + bump * d for b, d in zip(tableau.b, tableau.d)]
    weights[0] = weights[0] + theta * (1 - theta) ** 2
    weights.append(bump * tableau.d[-1] - theta**2 * (1 - theta))
    return combine(x, h, weights, k)


# --------------------------------------------------------------------------- what goes in and out


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
    norm: Callable[[Tensor], Tensor] | None = None
    steps: int = 0  # taken so far
    nfe: int = 0

    def __call__(self, t, x):
        """f(t, x), with t (a float or a float64 tensor) as a 0-dim tensor of x's precision."""
        self.nfe += 1
        self.stats.nfe += 1
        dtype, device = x.dtype.to_real(), x.device
        if isinstance(t, Tensor):
            dx = self.f(t.to(device, dtype), x)
        else:
            dx = self.f(torch.scalar_tensor(t, dtype=dtype, device=device), x)
        if describe(dx) != describe(x):
            raise ValueError(f"f must return {show(x)} like y0, but returned {show(dx)}")
        return dx

    def count_steps(self, steps, t, h, ratio=None):
        """max_steps is one limit for the whole call."""
        self.steps += steps
        if self.steps > self.max_steps:
            hint = "a larger max_steps, larger steps or tolerances, or a less stiff f"
            self.fail(f"max_steps = {self.max_steps} is not enough", hint, t, h, ratio)

    def fail(self, what, hint, t, h, ratio=None):
        t, h = floats([t, h])
        error = SolverError(
            f"{what} at t = {t:.9g} (step size {abs(h):.3g}, error ratio "
            f"{'unknown' if ratio is None else format(ratio, '.3g')}, {self.nfe} evaluations so "
            f"far). Try: {hint}."
        )
        error.t, error.step_size, error.nfe = t, abs(h), self.nfe
        error.error_ratio = math.nan if ratio is None else ratio
        raise error

    def fail_at_non_finite(self, t, h, x, k, ratio=None):
        """Name the first evaluation of a step that was not finite."""
        if not torch.isfinite(x).all():
            self.fail("The state is not finite", "y0 and f without NaN or infinity", t, h, ratio)
        wrong = [c for c, kj in zip((*self.tableau.c, 1), k) if not torch.isfinite(kj).all()]
        if not wrong and self.atol == 0:
            what = "With atol = 0, a component of the state that is 0 has no tolerance"
            self.fail(what, "an atol above 0", t, h, ratio)
        option = "step_size" if self.tableau.b_err is None else "first_step"
        hint = f"f near this t, or a smaller options['{option}']"
        at = t + wrong[0] * h if wrong else t
        self.fail("f returned a non-finite derivative", hint, at, h, ratio)


def describe(x):
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x)


def show(x):
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"a tensor of shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, {x.device}"


def pack(f, y0):
    """f and y0 on one tensor, and the way back. A tuple is flattened; a tensor stays as it is."""
    parts = y0 if isinstance(y0, tuple) and y0 else (y0,)
    for part in parts:
        if not isinstance(part, Tensor) or not (part.is_floating_point() or part.is_complex()):
            raise ValueError(f"y0 must be floating point tensors, not {show(part)}")
        if describe(part)[1:] != describe(parts[0])[1:]:
            raise ValueError(
                f"y0 must have one dtype and one device, not {show(parts[0])} and {show(part)}"
            )
    if isinstance(y0, Tensor):
        return f, y0, lambda x: x
    sizes = [part.numel() for part in parts]

    def unpack(x):  # (..., numel) to a tuple of (..., *shape)
        pieces = zip(x.split(sizes, -1), parts)
        return tuple(piece.reshape(x.shape[:-1] + part.shape) for piece, part in pieces)

    def packed(t, x):
        dy = f(t, unpack(x))
        got = dy if isinstance(dy, tuple | list) else (dy,)
        if list(map(describe, got)) != list(map(describe, parts)):
            wanted, got = (", ".join(map(show, each)) for each in (parts, got))
            raise ValueError(f"f must return tensors like y0, ({wanted}), but returned ({got})")
        return torch.cat([d.reshape(-1) for d in dy])

    return packed, torch.cat([part.reshape(-1) for part in parts]), unpack


def settings(method, rtol, atol, options, prefix=""):
    """Check how to solve; returns it as fields of a Problem."""
    if method not in list(METHODS):
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    for what, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{prefix}{what} must be a finite number of at least 0, not {value!r}")
    adaptive = METHODS[method].b_err is not None
    if adaptive and rtol == atol == 0:
        raise ValueError(f"{prefix}rtol and {prefix}atol must not both be 0: no step would do")
    known = {"max_steps": "a positive integer"}
    known |= {"first_step": "a positive number"} if adaptive else {"step_size": "a positive number"}
    known |= {"norm": "'seminorm'" if prefix else "a function of a state"} if adaptive else {}
    if not isinstance(options, dict):
        raise ValueError(f"{prefix}options must be a dict or None, not {options!r}")
    for what, value in options.items():
        if what not in known:
            known = ", ".join(known)
            raise ValueError(f"{prefix}options for {method!r} are {known}; {what!r} is unknown")
        if what == "norm":
            fits = value == "seminorm" if prefix else callable(value)
        else:
            fits = isinstance(value, int if what == "max_steps" else int | float) and value > 0
        if not fits or value == math.inf:
            raise ValueError(f"{prefix}options[{what!r}] must be {known[what]}, not {value!r}")
    return {"tableau": METHODS[method], "rtol": rtol, "atol": atol, **options}


def set_up(f, y0, t, rtol, atol, method, options, stats):
    """Check every argument; returns the Problem, y0 as one tensor and the way back."""
    fields = settings(method, rtol, atol, options or {})
    f, x0, unpack = pack(f, y0)
    if "norm" in fields:
        norm = fields["norm"]
        fields["norm"] = lambda x: norm(unpack(x))
    problem = Problem(f, Stats() if stats is None else stats, **fields)
    check_times(t, x0, problem)
    return problem, x0, unpack


def check_times(t, x, problem):
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.is_floating_point():
        raise ValueError(f"t must be a 1-D floating point tensor, not {show(t)}")
    if len(t) == 0:
        raise ValueError("t must hold at least one time, but is empty")
    if t.device.type != "cpu" and t.device != x.device:
        raise ValueError(f"t must be on the cpu or on y0's device {x.device}, not on {t.device}")
    ts = read_times(t, problem)
    if isinstance(ts[0], float):
        gaps = [b - a for a, b in zip(ts, ts[1:])]
        one_way = all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
        if not one_way or not all(map(math.isfinite, ts)):
            raise ValueError(f"t must be finite and strictly increasing or decreasing, not {ts}")


def read_times(t, problem, differentiable=False):
    """t as a list of floats, or of 0-dim float64 tensors where gradients or a GPU need that.

    Fixed steps can work with times that the host has not read, so on a GPU they never wait for it.
    """
    unread = t.device.type != "cpu" and problem.tableau.b_err is None and not problem.step_size
    return list(t.double().unbind()) if differentiable or unread else t.tolist()


def floats(ts):
    return [float(t.detach()) if isinstance(t, Tensor) else t for t in ts]


# ----------------------------------------------------------------------------- streams of steps


class Step(NamedTuple):
    """An accepted step from x to x1, and which entries of ts lie in it.

    at(ts) gives its t, t1 and h as functions of ts, so that a replay can differentiate them.
    """

    at: Callable[[list], tuple]
    x: Tensor
    x1: Tensor
    k: list[Tensor]
    entries: range


def accepted_steps(problem, x, ts):
    return (fixed_steps if problem.tableau.b_err is None else adaptive_steps)(problem, x, ts)


def fixed_steps(problem, x, ts):
    """One step per interval of ts, or as many equal ones as keep |h| within step_size."""
    counts = [1] * (len(ts) - 1)
    if problem.step_size:
        gaps = [abs(b - a) for a, b in zip(floats(ts), floats(ts)[1:])]
        counts = [max(1, math.ceil(gap / problem.step_size - 1e-9)) for gap in gaps]
    problem.count_steps(sum(counts), ts[0], problem.step_size or math.nan)
    for i, n in enumerate(counts):
        for j in range(n):
            at = partial(fixed_place, i=i, j=j, n=n)
            t, t1, h = at(ts)
            x1, k = step(problem, problem.tableau, t, x, h, problem(t, x), t1)
            if x.device.type == "cpu" and not is_finite(x1):  # on a GPU, a look would be a wait
                problem.fail_at_non_finite(t, h, x, k)
            problem.stats.accepted += 1
            yield Step(at, x, x1, k, range(i + 1, i + 2) if j == n - 1 else range(0))
            x = x1


def fixed_place(ts, i, j, n):
    h = (ts[i + 1] - ts[i]) / n
    return ts[i] + j * h, ts[i] + (j + 1) * h if j < n - 1 else ts[i + 1], h


def is_finite(x):
    return cmath.isfinite(x.detach().sum().item()) or bool(torch.isfinite(x).all())


def adaptive_steps(problem, x, ts):
    """Steps whose estimated error is within tolerance; s is the time since ts[0]."""
    start, *stops = floats(ts)
    if not stops:
        return
    end, stops = stops[-1] - start, [abs(stop - start) for stop in stops]
    s, done, ratio, previous, growth = 0.0, 0, None, 1.0, 10.0
    k1 = problem(ts[0], x)
    size = problem.first_step or initial_step(problem, ts, end, x, k1)
    while True:
        s1 = end if 1.1 * size >= abs(end - s) else s + math.copysign(size, end)
        at = partial(adaptive_place, s=s, s1=s1, end=end)
        t, t1, h = at(ts)
        problem.count_steps(1, t, h, ratio)
        if s1 != end and abs(h) <= 1e-15 * max(abs(start + s), abs(end)):
            hint = "f for a singularity or a jump near this t, larger rtol and atol, or float64"
            problem.fail("The step size has vanished", hint, t, h, ratio)
        x1, k = step(problem, problem.tableau, t, x, h, k1, t1)
        k.append(problem(t1, x1))
        ratio = error_ratio(problem, x, x1, h, k)
        if not math.isfinite(ratio):
            problem.fail_at_non_finite(t, h, x, k, ratio)
        if ratio > 1:
            problem.stats.rejected += 1
            size, growth = next_size(h, ratio, 1.0, growth), 1.0
            continue
        problem.stats.accepted += 1
        first, done = done, len(stops) if s1 == end else bisect_right(stops, abs(s1))
        yield Step(at, x, x1, k, range(first + 1, done + 1))
        if s1 == end:
            return
        size = next_size(h, ratio, previous, growth)
        s, x, k1, previous, growth = s1, x1, k[-1], ratio, 10.0


def adaptive_place(ts, s, s1, end):
    last = s1 == end and isinstance(ts[-1], float)  # else steps move with ts[0]
    return ts[0] + s, ts[-1] if last else ts[0] + s1, s1 - s


@torch.no_grad()
def error_ratio(problem, x, x1, h, k):
    """‖h Σᵢ b_errᵢ kᵢ / (atol + rtol max(|x|, |x₁|))‖: the one wait for the device in a step."""
    first, *rest = problem.tableau.b_err
    error = combine(k[0] * (h * first), h, rest, k[1:])
    return measure(problem, error / tolerance(problem, torch.maximum(x.abs(), x1.abs())))


def tolerance(problem, size):
    return size.mul_(problem.rtol).add_(problem.atol)


def measure(problem, x):
    """The root mean square of x, or the caller's norm, as a float."""
    if problem.norm is not None:
        return float(problem.norm(x) + 0 * x.sum().abs())  # no norm may overlook a NaN
    return root_mean_square(x).item()


def root_mean_square(x):
    return torch.linalg.vector_norm(x) / math.sqrt(max(x.numel(), 1))


def next_size(h, ratio, previous, growth):
    """The PI controller: |h| 0.9 r^−0.22 r₋₁^0.02, at least |h|/5 and at most growth · |h|.

    Its gains are ours: of those tried, they cost the fewest evaluations on small networks.
    """
    factor = 0.9 * max(ratio, 1e-9) ** -0.22 * max(previous, 1e-4) ** 0.02
    return abs(h) * min(max(factor, 0.2), growth)


@torch.no_grad()
def initial_step(problem, ts, end, x, k1):
    """Hairer, Nørsett and Wanner, Sec. II.4: |h| for a local error of about 0.01 tolerances."""
    scale = tolerance(problem, x.abs())
    d0, d1 = measure(problem, x / scale), measure(problem, k1 / scale)
    if not math.isfinite(d0 + d1):
        problem.fail_at_non_finite(ts[0], 0.0, x, [k1])
    h0 = 1e-6 if min(d0, d1) < 1e-5 else 0.01 * d0 / d1
    h0 = math.copysign(min(h0, abs(end)), end)
    t1 = ts[-1] if h0 == end else ts[0] + h0
    k2 = problem(t1, torch.add(x, k1, alpha=h0))
    d2 = measure(problem, (k2 - k1) / scale) / abs(h0)
    if not math.isfinite(d2):
        problem.fail_at_non_finite(t1, 0.0, x, [k2])
    if max(d1, d2) <= 1e-15:
        return max(1e-6, abs(h0) * 1e-3)
    return min(100 * abs(h0), (0.01 / max(d1, d2)) ** (1 / problem.tableau.order))


def outputs(problem, step, ts):
    """The solution at every time of ts inside the step."""
    for i in step.entries:
        t, t1, h = step.at(ts)
        theta = 1.0 if problem.tableau.d is None else (ts[i] - t) / h
        if isinstance(theta, float) and (theta > 1 - 1e-12 or i == len(ts) - 1):
            yield step.x1
            continue
        if len(step.k) == len(problem.tableau.b):  # a replayed step: its last derivative is due now
            step.k.append(problem(t1, step.x1))
        yield interpolate(problem.tableau, step.x, h, step.k, theta)


def solve(problem, x0, ts, visit=lambda step: None):
    """x at every time of ts, stacked; `visit` sees each accepted step."""
    xs = [x0]
    for accepted in accepted_steps(problem, x0, ts):
        xs.extend(outputs(problem, accepted, ts))
        visit(accepted)
    return torch.stack(xs)


# --------------------------------------------------------------------------- the three gradients


def odeint(f, y0, t, *, rtol=1e-7, atol=1e-9, method="dopri5", options=None, stats=None):
    """y(tᵢ) for every tᵢ, where y' = f(t, y) and y(t₀) = y0; differentiable by backpropagation."""
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats)
    return unpack(solve(problem, x0, read_times(t, problem, t.requires_grad)))


# fmt: off
def odeint_checkpoint(f, y0, t, *, rtol=1e-7, atol=1e-9, method="dopri5", options=None,
                      params=None, stats=None):
    """As `odeint`, with its gradient, keeping one state per accepted step instead of every k."""
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats)
    return unpack(Checkpoint.apply(problem, t, x0, *trainable(f, params, "params")))


def odeint_adjoint(f, y0, t, *, rtol=1e-7, atol=1e-9, method="dopri5", options=None,
                   adjoint_rtol=None, adjoint_atol=None, adjoint_options=None, adjoint_params=None,
                   stats=None):
    """As `odeint`, differentiated by the continuous adjoint: constant memory, however many steps.

    adjoint_options={"norm": "seminorm"} leaves the parameters' gradients out of the error norm.
    """
    problem, x0, unpack = set_up(f, y0, t, rtol, atol, method, options, stats)
    params = trainable(f, adjoint_params, "adjoint_params")
    if adjoint_options is None:
        adjoint_options = {key: v for key, v in (options or {}).items() if key != "norm"}
    adjoint_rtol = rtol if adjoint_rtol is None else adjoint_rtol
    adjoint_atol = atol if adjoint_atol is None else adjoint_atol
    backwards = settings(method, adjoint_rtol, adjoint_atol, adjoint_options, "adjoint_")
    if any(p.is_complex() for p in params) and not x0.is_complex():
        raise ValueError("adjoint_params must be real for a real y0: try odeint_checkpoint")
    return unpack(Adjoint.apply(problem, backwards, t, x0, *params))
# fmt: on


def trainable(f, params, argument):
    """The parameters that want a gradient: those of a module, or the tensors that were named."""
    if params is None and not isinstance(f, nn.Module):
        raise ValueError(
            f"{argument} is missing, and f is not an nn.Module whose parameters are known: name "
            f"the tensors that f uses and that want a gradient, or () if there are none"
        )
    params = f.parameters() if params is None else params
    params = params if isinstance(params, Tensor) else list(params)
    if isinstance(params, Tensor) or not all(isinstance(p, Tensor) for p in params):
        got = show(params) if isinstance(params, Tensor) else ", ".join(map(show, params))
        raise ValueError(f"{argument} must be a list or tuple of tensors, not {got}")
    params = [p for p in params if p.requires_grad]
    nodes = {torch.autograd.graph.get_gradient_edge(p).node for p in params}
    seen, todo = set(), [p.grad_fn for p in params if p.grad_fn is not None]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node in nodes:
                raise ValueError(f"{argument} must not be computed from one another: drop one")
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return params


class Checkpoint(torch.autograd.Function):
    """Replays the accepted steps backwards: ∂L/∂x = (∂x₁/∂x)ᵀ ∂L/∂x₁, one step at a time."""

    @staticmethod
    def forward(ctx, problem, t, x0, *params):
        places, states = [], []

        def visit(accepted):
            places.append((accepted.at, accepted.entries))
            states.append(accepted.x)

        xs = solve(problem, x0, read_times(t, problem), visit)
        ctx.problem, ctx.places, ctx.count = problem, places, len(params)
        ctx.save_for_backward(t, *params, *states)
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx, g):  # g is (len(t), *x.shape)
        problem = replace(ctx.problem, stats=Stats())
        t, *saved = ctx.saved_tensors
        params, states = saved[: ctx.count], saved[ctx.count :]
        sources = [t.detach().requires_grad_(ctx.needs_input_grad[1]), *params]
        gx, totals = torch.zeros_like(g[0]), [None] * len(sources)
        for (at, entries), x in zip(reversed(ctx.places), reversed(states)):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                ts = read_times(sources[0], problem, sources[0].requires_grad)
                now, then, h = at(ts)
                x1, k = step(problem, problem.tableau, now, x, h, problem(now, x), then)
                ys = [x1, *outputs(problem, Step(at, x, x1, k, entries), ts)]
            gx, *grads = gradients(ys, [x, *sources], [gx, *g[entries]])
            totals = [b if a is None else a if b is None else a + b for a, b in zip(totals, grads)]
        ctx.problem.stats.backward_nfe += problem.stats.nfe
        return None, totals[0], gx + g[0], *totals[1:]


class Adjoint(torch.autograd.Function):
    """a(t) = ∂L/∂x(t) solves a' = −(∂f/∂x)ᵀ a from t_N back to t₀, and ∂L/∂θ = ∫ (∂f/∂θ)ᵀ a dt."""

    @staticmethod
    def forward(ctx, problem, backwards, t, x0, *params):
        xs = solve(problem, x0, read_times(t, problem))
        ctx.problem, ctx.backwards = problem, backwards
        ctx.save_for_backward(t, xs, *params)
        return xs

    @staticmethod
    @once_differentiable
    def backward(ctx, g):  # g is (len(t), *x.shape)
        t, xs, *params = ctx.saved_tensors
        forwards = replace(ctx.problem, stats=Stats())
        augmented, sizes, used = adjoint_field(forwards.f, xs[0], params)
        problem = Problem(augmented, forwards.stats, **ctx.backwards)
        norm = {"norm": forwards.norm or root_mean_square, "shape": xs[0].shape}
        problem.norm = partial(worst_part, sizes=sizes[:2] if problem.norm else sizes, **norm)
        ts, gt = read_times(t, problem), torch.zeros_like(t)
        a, gparams = torch.zeros_like(xs[0]), xs.new_zeros(sizes[2])
        for i in range(len(ts) - 1, 0, -1):
            if ctx.needs_input_grad[2]:  # y(tᵢ) moves along with its own time at speed f
                gt[i] = inner(g[i], forwards(ts[i], xs[i]))
            z = torch.cat([xs[i].reshape(-1), (a + g[i]).reshape(-1), gparams])
            _, a, gparams = solve(problem, z, [ts[i], ts[i - 1]])[-1].split(sizes)
            a = a.view_as(xs[0])
        if ctx.needs_input_grad[2] and len(ts) > 1:  # a later start leaves out f at the start
            gt[0] = -inner(a, forwards(ts[0], xs[0]))
        ctx.problem.stats.backward_nfe += forwards.stats.nfe
        parts = zip(gparams.split([p.numel() for p in params]), params, used)
        grads = [as_gradient(part, p) if seen else None for part, p, seen in parts]
        return None, None, gt, a + g[0], *grads


def adjoint_field(f, x, params):
    """z' for z = (x, a, ∂L/∂θ), the sizes of its parts, and a list of which parameters f used."""
    sizes = [x.numel(), x.numel(), sum(p.numel() for p in params)]
    used = [False] * len(params)

    def augmented(t, z):
        y, a, _ = z.split(sizes)
        with torch.enable_grad():
            y = y.view_as(x).detach().requires_grad_()
            dy = f(t, y)
        grads = gradients(dy, [y, *params], -a.view_as(x))
        used[:] = [seen or grad is not None for seen, grad in zip(used, grads[1:])]
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, [y, *params])]
        return torch.cat([part.detach().reshape(-1).to(z.dtype) for part in (dy, *grads)])

    return augmented, sizes, used


def gradients(ys, xs, gs):
    """(∂ys/∂x)ᵀ gs for every x; None where x wants no gradient or ys do not depend on it."""
    wanted = [x for x in xs if x.requires_grad]
    if isinstance(ys, Tensor) and not ys.requires_grad:
        return [None] * len(xs)
    found = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in xs]


def worst_part(z, sizes, norm, shape):
    """The largest norm among the first parts of z, so that many do not hide few.

    x and a have the norm of the solve forwards; the parameters' gradients, their root mean square.
    """
    x, a, *rest = z.split([*sizes, z.numel() - sum(sizes)])[: len(sizes)]
    norms = [norm(x.view(shape)), norm(a.view(shape)), *map(root_mean_square, rest)]
    return torch.stack([torch.as_tensor(value, device=z.device) for value in norms]).max()


def inner(a, b):
    return (a.conj() * b).real.sum()


def as_gradient(part, p):
    part = part.real if part.is_complex() and not p.is_complex() else part
    return part.to(p.dtype).view_as(p)
