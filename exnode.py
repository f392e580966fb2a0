"""Exchangeable neural ODEs: the block, and the paper's three models that are built from it.

    paper                                                  here
    ---------------------------------------------------    ----------------------------------------
    Sec. 3.1, Theorem 1, ż = f(z, t) equivariant           ExNODE.forward, .inverse
    Sec. 3.2, v = MaxPool(ExNODE Solve(φ(x)))              SetClassifier
    Eq. 5, 9, d log p / dt = −Tr ∂f/∂z                     ExNODE.forward_and_log_det
    Sec. 3.3, Hutchinson's estimator                       ExNODE.augmented, draw_noise
    Eq. 10, p(z) = Π N(zᵢ; 0, I)                           base_log_prob
    Sec. 3.3, likelihood and generation                    SetFlow.log_prob, .sample
    Sec. 3.4, encoder, backwards in time                   TemporalSetVAE.encode
    Sec. 3.4, z_t = ODESolve(z₀, θ_t, t)                   TemporalSetVAE.latents
    Eq. 11, ELBO                                           TemporalSetVAE.elbo
    Eq. 12, 13, sampling at any time                       TemporalSetVAE.decode, .sample
    Table 3, architectures                                 the defaults of each class

x is `(..., n, d)`, mask `(..., n)`, True where a point exists. A set without points is an error
here (on a CPU; on a GPU the check would have to wait), in sets.py a field of zeros.

Departures from the paper:
  - Eq. 9 has the limits of its integral exchanged; we follow Eq. 5: log p(x) = log p(z(t₁)) + ∫ Tr.
  - `trace="exact"` replaces Hutchinson's estimate by the trace itself, at a similar cost.
  - The noise of Hutchinson's estimator is drawn per call and kept nowhere.
  - `gradient="checkpoint"` differentiates the discrete solve exactly, keeping a state per step.
  - `matching_loss` trains the same flow by regression, without a solver (flow matching), and
    `exchange` takes most of the noise out of that where a set's shape has more points.
  - The ELBO has one KL term for the whole series; the authors' code counts it once per time.
  - The posterior starts narrow: with unit noise z₀ says nothing for the first thousand steps.
  - `moments` adds a loss without the noise of matching: z_t must tell, by a linear map, the mean
    cos and sin of ω·x over its set.
  - z₀ lives at time `t0` = 0 whatever the observed times are, so that grids may differ.
  - Sets may be ragged, by masks, everywhere.
"""

import math
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from beyond.fast import FastAttentionField, FastDeepSetsField
from beyond.transformer import TransformerField
from sets import (
    ConcatSquashField,
    PointNorm,
    check_set,
    check_values,
    check_widths,
    count,
    keep,
    pool_max,
    pool_mean,
)
from solvers import odeint, odeint_adjoint, odeint_checkpoint

GRADIENTS = ("backprop", "adjoint", "checkpoint")
TRACES = ("hutchinson", "exact")
DECODERS = ("concatsquash", "attention", "transformer")


def solve(f, y0, t, params, gradient, **settings):
    """y at every time of t, differentiated in the way that `gradient` names."""
    params = [p for p in params if p.requires_grad]
    if gradient == "backprop" or not torch.is_grad_enabled():
        return odeint(f, y0, t, **settings)
    if gradient == "checkpoint":
        return odeint_checkpoint(f, y0, t, params=params, **settings)
    seminorm = {"norm": "seminorm"} if settings["method"] == "dopri5" else {}
    options = {k: v for k, v in (settings["options"] or {}).items() if k != "norm"} | seminorm
    return odeint_adjoint(f, y0, t, adjoint_params=params, adjoint_options=options, **settings)


def root_mean_square(state, size):
    parts = state if isinstance(state, tuple) else (state,)
    return (sum(part.square().sum() for part in parts) / size).sqrt()


def one_of(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


class ExNODE(nn.Module):
    """Theorem 1: z(t₁) where ż = f(t, z), z(0) = x; equivariant because f is, and invertible."""

    def __init__(
        self, field, t1=1.0, method="dopri5", rtol=1e-5, atol=1e-5, gradient="backprop",
        options=None,
    ):  # fmt: skip
        super().__init__()
        self.field, self.t1 = field, t1
        self.gradient = one_of("gradient", gradient, GRADIENTS)
        self.settings = {"method": method, "rtol": rtol, "atol": atol, "options": options}

    def forward(self, x, mask=None, context=None, stats=None):
        return self.integrate(x, mask, context, (0.0, self.t1), stats)

    def inverse(self, z, mask=None, context=None, stats=None):
        return self.integrate(z, mask, context, (self.t1, 0.0), stats)

    def integrate(self, x, mask, context, times, stats):
        check_set(x, self.field.dim, mask)
        check_values(x, mask)

        def f(t, x):
            return self.field(t, x, mask, context)

        z = self.run(f, keep(x, mask), times, mask, context, stats)
        return keep(z, mask, x)  # a padded point stays where it is

    def forward_and_log_det(self, x, mask=None, context=None, noise=None, stats=None):
        """z(t₁) and ∫ Tr(∂f/∂z) dt per set; exact, or Hutchinson's estimate if noise is given."""
        start = (keep(x, mask), x.new_zeros(x.shape[:-2]))
        f = self.augmented(mask, context, noise)
        z, log_det = self.run(f, start, (0.0, self.t1), mask, context, stats)
        return keep(z, mask, x), log_det

    def run(self, f, start, times, mask, context, stats):
        """The last state from the first, x or (x, log det); no padded point counts as an error."""
        settings, pair = dict(self.settings), isinstance(start, tuple)
        if mask is not None and settings["method"] == "dopri5":
            size = mask.sum() * self.field.dim + (start[1].numel() if pair else 0)
            norm = {"norm": partial(root_mean_square, size=size)}
            settings["options"] = norm | (settings["options"] or {})
        params = [*self.field.parameters(), *([] if context is None else [context])]
        t = torch.tensor(times, dtype=torch.float64)
        states = solve(f, start, t, params, self.gradient, stats=stats, **settings)
        return tuple(state[-1] for state in states) if pair else states[-1]

    def augmented(self, mask, context, noise):
        """(t, (x, log det)) ↦ (f, Tr ∂f/∂x),  Tr ≈ mean over probes of eᵀ (∂f/∂x) e."""

        def f(t, state):
            if noise is None:
                return self.field.value_and_trace(t, state[0], mask, context)
            dx, je = self.field.value_and_jvp(t, state[0], noise, mask, context)
            return dx, (keep(noise, mask) * je).sum((-2, -1)).mean(0)

        return f


# ---------------------------------------------------------------------------------- classification


class SetClassifier(nn.Module):
    """Sec. 3.2: logits = head(max over points of ExNODE(φ(x)))."""

    def __init__(self, in_dim, classes, field="deepsets", method="rk4", **solver):
        super().__init__()
        one_of("field", field, ("deepsets", "attention"))
        self.in_dim = in_dim
        self.expand = nn.ModuleList([nn.Linear(in_dim, 64), nn.Linear(64, 256)])
        self.norms = nn.ModuleList([PointNorm(64), PointNorm(256)])
        hidden = (512, 512) if field == "deepsets" else (256, 256)
        self.block = ExNODE(make_field(field, 256, hidden), method=method, **solver)
        self.head = nn.Sequential(
            nn.Linear(256, 128), PointNorm(128), nn.Tanh(), nn.Linear(128, classes)
        )

    def forward(self, x, mask=None):
        check_set(x, self.in_dim, mask)
        check_values(x, mask)
        x = keep(x, mask)
        for linear, norm in zip(self.expand, self.norms):  # φ
            x = torch.tanh(norm(linear(x), mask))
        v = pool_max(self.block(x, mask), mask).values[..., 0, :]
        return self.head(v)


def make_field(name, dim, hidden, heads=4, time=False, context=0, **views):
    if name == "attention":  # the fields of sets.py, faster (beyond/fast.py)
        return FastAttentionField(dim, hidden, heads, time, context)
    if name == "deepsets":
        return FastDeepSetsField(dim, hidden, time=time, context=context)
    if name == "concatsquash":
        return ConcatSquashField(dim, hidden, context)
    if name == "transformer":
        hidden = check_widths(hidden)
        if len(set(hidden)) > 1:
            raise ValueError(f"hidden must be one width per layer, all equal, not {hidden}")
        return TransformerField(dim, hidden[0], len(hidden), heads, context, **views)
    raise ValueError(
        f"field must be attention, deepsets, concatsquash or transformer, not {name!r}"
    )


# -------------------------------------------------------------------------------------- set flows


def base_log_prob(z, mask=None):
    """Eq. 10: Σᵢ log N(zᵢ; 0, I) per set."""
    return -0.5 * keep(z * z + math.log(2 * math.pi), mask).sum((-2, -1))


def normal(shape, like, generator=None):
    """Draws from N(0, I), with the precision and on the device of `like`."""
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def draw_noise(x, probes, kind, generator=None):
    """Probes e with E[e eᵀ] = I, `(probes, *x.shape)`: Rademacher or Gaussian."""
    shape = (probes, *x.shape)
    if kind == "gaussian":
        return normal(shape, x, generator)
    bits = torch.randint(0, 2, shape, device=x.device, generator=generator)
    return (2 * bits - 1).to(x.dtype)


class SetFlow(nn.Module):
    """Sec. 3.3: a chain of ExNODE blocks from data to N(0, I), and back.

    log p(x) = log N(z; 0, I) + Σ_blocks ∫ Tr(∂f/∂z) dt − n Σ log std  with  z = encode(x),

    the last term from the units of `standardise`.

    `time` feeds t to attention and deepsets fields; concatsquash and transformer always read it.
    With a single block t is the level of noise. There, `fine` gives a transformer a FineView
    (neighbours at the scale of the noise, for shapes with flat parts), and `cells=28` a CellView
    (no two points share a cell of a grid with 28 cells to a unit, as with pixels).
    """

    def __init__(
        self, dim, blocks=12, hidden=(128, 128, 128), heads=4, field="attention", time=False,
        context=0, t1=0.5, gradient="adjoint", trace="hutchinson", probes=1, noise="rademacher",
        fine=False, cells=0, **solver,
    ):  # fmt: skip
        super().__init__()
        if blocks < 1 or probes < 1:
            raise ValueError(f"blocks and probes must be at least 1, not {blocks} and {probes}")
        views = {"end": t1, "fine": fine, "cells": cells} if fine or cells else {}
        if views and (field != "transformer" or blocks > 1):
            name = "fine" if fine else "cells"
            raise ValueError(f"{name} is for one transformer block, not for {blocks} of {field}")
        self.dim, self.probes = dim, probes
        self.trace = one_of("trace", trace, TRACES)
        self.noise = one_of("noise", noise, ("rademacher", "gaussian"))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))
        kind = (field, dim, hidden, heads, time, context)
        fields = (make_field(*kind, **views) for _ in range(blocks))
        self.blocks = nn.ModuleList(ExNODE(f, t1, gradient=gradient, **solver) for f in fields)

    def standardise(self, x, mask=None):
        """Let the chain see data in units of the mean and deviation of these sets, per axis."""
        points = x.flatten(0, -2) if mask is None else x[mask]
        std = points.std(0, correction=0)
        if not (std > 0).all() or not std.isfinite().all():
            raise ValueError(f"x must vary along every axis, but deviates by {std.tolist()}")
        self.mean.copy_(points.mean(0))
        self.std.copy_(std)
        self.place_cells()

    def place_cells(self):
        """Tell a view of cells where they lie in these units."""
        if view := getattr(self.blocks[0].field, "cells", None):
            view.grid.copy_(view.cells * torch.stack([self.std, self.mean]))

    def enter(self, x, mask=None):
        """(x − mean) / std; padded points stay as they are."""
        return keep((x - self.mean) / self.std, mask, x)

    def leave(self, x, mask=None):
        return keep(x * self.std + self.mean, mask, x)

    def encode(self, x, mask=None, context=None, stats=None):
        """z = q(x): data to noise."""
        self.blocks[0].field.check(None, x, mask, context)
        x = self.enter(x, mask)
        for block in self.blocks:
            x = block(x, mask, context, stats)
        return x

    def decode(self, z, mask=None, context=None, stats=None):
        """x = q⁻¹(z): noise to data; no trace is computed."""
        for block in reversed(self.blocks):
            z = block.inverse(z, mask, context, stats)
        return self.leave(z, mask)

    def log_prob(self, x, mask=None, context=None, noise=None, generator=None, stats=None):
        """log p(x₁, …, xₙ) per set; noise `(probes, *x.shape)` is drawn unless it is given."""
        self.blocks[0].field.check(None, x, mask, context)
        check_values(x, mask)
        if noise is None and self.trace == "hutchinson":
            noise = draw_noise(x, self.probes, self.noise, generator)
        if noise is not None and noise.shape[1:] != x.shape:
            wanted = ("probes", *x.shape)
            raise ValueError(f"noise must have the shape {wanted}, not {tuple(noise.shape)}")
        log_det = -count(x, mask) * self.std.log().sum()
        x = self.enter(x, mask)
        for block in self.blocks:
            x, change = block.forward_and_log_det(x, mask, context, noise, stats)
            log_det = log_det + change
        return base_log_prob(x, mask) + log_det

    @torch.no_grad()
    def sample(self, sets, points, generator=None, context=None):
        """`(sets, points, dim)` from the model; any number of points."""
        if sets < 1 or points < 1:
            raise ValueError(f"sets and points must be at least 1, not {sets} and {points}")
        return self.decode(normal((sets, points, self.dim), self.mean, generator), context=context)

    def matching_loss(
        self, x, mask=None, context=None, coupling="swaps", generator=None, finest=0.1, spare=None
    ):
        """∫ (1 − s) |Δ f(x_s) − (z − x)|² du per coordinate, x_s = (1 − s) x + s z, u uniform.

        The chain of K blocks is one field, piecewise in u: block i owns [i/K, (i + 1)/K], and runs
        from s(i/K) to s((i + 1)/K), at Δ = t₁ / (their difference) times the speed of the field.
        Each block gets its share of the sets, each set one u in the block's interval.

        `spare` `(..., m, d)` are other points that could as well have been drawn for each set. They
        replace x by its mean given x_s (`exchange`): the same field, learned from less noise.
        """
        self.blocks[0].field.check(None, x, mask, context)
        check_values(x, mask)
        one_of("coupling", coupling, ("swaps", "none"))
        if finest <= 0:
            raise ValueError(f"finest must be positive, not {finest}")
        if spare is not None:
            if coupling != "none" or spare.shape[:-2] != x.shape[:-2]:
                got = f"{coupling!r} and {tuple(spare.shape)}"
                raise ValueError(f"spare: for coupling='none' and the sets of x, not {got}")
            spare = self.enter(spare).reshape(-1, *spare.shape[-2:])
        x = keep(self.enter(x, mask), mask).reshape(-1, *x.shape[-2:])
        mask = None if mask is None else mask.reshape(x.shape[:-1])
        z = normal(x.shape, x, generator)
        z = assign(x, z, mask) if coupling == "swaps" else z
        context = None if context is None else context.reshape(len(x), -1)
        blocks, loss = len(self.blocks), 0
        order = torch.randperm(len(x), device=x.device, generator=generator)
        order = order.repeat(-(-blocks // len(x)))  # no block goes without a set
        for i, rows in enumerate(order.tensor_split(blocks)):
            u = torch.rand(len(rows), dtype=x.dtype, device=x.device, generator=generator)
            u = (torch.arange(len(rows), device=x.device) + u) / len(rows)  # evenly in [0, 1]
            mine = (None if a is None else a[rows] for a in (x, z, mask, context, spare))
            loss = loss + self.block_loss(i, u, finest, *mine) / blocks
        return loss

    def block_loss(self, i, u, finest, x, z, mask, context, spare):
        """The part of block i, where u in [0, 1] is the place of each set in its interval."""
        block, blocks = self.blocks[i], len(self.blocks)
        first, s, last = (schedule((i + v) / blocks, finest) for v in (0, u, 1))
        x_s = torch.lerp(x, z, s[:, None, None])
        t = (s - first) / (last - first) * block.t1
        v = block.t1 / (last - first) * block.field(t, x_s, mask, context)  # Δ f(x_s)
        wanted = z - x
        if spare is not None:
            wanted = wanted - exchange(x, spare, x_s, s)
        error = keep(v - wanted, mask).square().sum((-2, -1))
        return ((1 - s) * error).sum() / (count(x_s, mask).sum() * self.dim)


def schedule(u, finest):
    """Noise s(u) = ε ((1 + 1/ε)ᵘ − 1), from 0 to 1: even in log s above ε = finest, in s below.

    The likelihood weighs an error of the field by (1 − s)/s ds (Kingma et al., 2021), and that is
    (1 − s) du where s > ε. Noise finer than the data's own is not worth that attention.
    """
    return finest * ((1 + 1 / finest) ** u - 1)


@torch.no_grad()
def exchange(x, spare, x_s, s):
    """(E[x′ᵢ] − xᵢ)/s, x′ᵢ being xᵢ or one of spare with weights exp(−|x_s − (1 − s) x′|² / 2s²).

    The target z − x is (x_s − x)/s; less this, it has E[x′] in place of x. Each of spare was as
    likely to be drawn for point i, and only the noisy place of i tells which was. So the mean of
    the target given x_s stays, and its variance falls (Rao and Blackwell). One thing is lost where
    sets are centred by their own points: their mean would tell the mean of the noise.
    """
    s = s[:, None, None].clamp(min=1e-3)  # with less noise a point is only itself
    q, half = x_s * ((1 - s) / s**2), 0.5 * ((1 - s) / s) ** 2
    own = (q * x - half * x * x).sum(-1, keepdim=True)
    others = torch.baddbmm(-half * spare.square().sum(-1)[:, None], q, spare.mT)  # (B, n, m)
    w = torch.softmax(torch.cat([own, others], -1), -1)[..., 1:]
    return (w @ spare - w.sum(-1, keepdim=True) * x) / s


@torch.no_grad()
def assign(x, z, mask=None, sweeps=3):
    """Reorder the noise z `(B, n, d)` within each set so that Σᵢ |xᵢ − zᵢ|² is nearly minimal.

    Start from equal ranks along the first axis; then, for every pair, swap zᵢ and zⱼ wherever
    (xᵢ − xⱼ)·(zᵢ − zⱼ) < 0, which is when that shortens the sum. Disjoint pairs go together.
    """
    ranks = []
    for points in (x, z):
        key = points[..., 0] if mask is None else points[..., 0].masked_fill(~mask, math.inf)
        ranks.append(key.argsort(-1)[..., None].expand_as(z))
    z = torch.empty_like(z).scatter_(-2, ranks[0], z.gather(-2, ranks[1]))
    for i, j in round_robin(x.shape[-2]).to(x.device).repeat(sweeps, 1, 1).unbind():
        zi, zj = z[:, i], z[:, j]
        swap = ((x[:, i] - x[:, j]) * (zi - zj)).sum(-1, keepdim=True) < 0
        if mask is not None:
            swap &= (mask[:, i] & mask[:, j])[..., None]
        z[:, i], z[:, j] = torch.where(swap, zj, zi), torch.where(swap, zi, zj)
    return z


@cache
def round_robin(n):
    """Every pair of n once, in rounds of disjoint pairs: `(rounds, 2, n // 2)`."""
    even = n + n % 2  # with an odd n, whoever meets the extra one rests
    ring, rounds = list(range(1, even)), []
    for r in range(even - 1):
        order = [0, *ring[r:], *ring[:r]]
        pairs = [(order[k], order[-1 - k]) for k in range(even // 2)]
        rounds.append([pair for pair in pairs if max(pair) < n])
    return torch.tensor(rounds, dtype=torch.long).reshape(even - 1, n // 2, 2).transpose(1, 2)


# -------------------------------------------------------------------------------- sets over time


class Posterior(NamedTuple):
    """N(mean, std²) over z₀, `(B, latent)` each."""

    mean: torch.Tensor
    std: torch.Tensor

    def sample(self, generator=None):
        return self.mean + self.std * normal(self.mean.shape, self.mean, generator)

    def kl(self):
        """KL(posterior ‖ N(0, I)) per series."""
        return 0.5 * (self.mean**2 + self.std**2 - 1 - 2 * self.std.log()).sum(-1)


class TemporalSetVAE(nn.Module):
    """Sec. 3.4: a latent z that follows an ODE in time, and a set flow for x_t given z_t.

    A series is x `(B, T, n, d)` observed at times t `(T,)`, increasing; mask is `(B, T, n)`.
    `frequencies` is how many ω `moment_error` has; 0: no moments.
    """

    def __init__(
        self, dim=2, latent=128, decoder="concatsquash", hidden=(512, 512, 512), heads=4, t0=0.0,
        method="dopri5", rtol=1e-3, atol=1e-4, gradient="adjoint", frequencies=0, **flow,
    ):  # fmt: skip
        super().__init__()
        one_of("decoder", decoder, DECODERS)
        self.dim, self.latent, self.t0 = dim, latent, t0
        sizes = (dim, 128, 128, 256, 512)
        self.points = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = nn.ModuleList(PointNorm(size) for size in sizes[1:])
        self.rnn = nn.GRU(512 + 1, 512, batch_first=True)
        self.mean, self.log_std = self.readout(), self.readout()
        nn.init.constant_(self.log_std[-1].bias, -2.0)  # z₀ tells of x from the first step
        self.dynamics = LatentField(latent)
        solver = {"method": method, "rtol": rtol, "atol": atol, "gradient": gradient}
        self.solver = {**solver, "options": flow.get("options")}
        self.decoder = SetFlow(
            dim, 1, hidden, heads, field=decoder, time=decoder == "attention", context=latent,
            t1=1.0, **solver, **flow,
        )  # fmt: skip
        if frequencies:  # of moments, from what a whole set is to its strokes
            draw = torch.randn(frequencies, dim, generator=torch.Generator().manual_seed(0))
            scale = torch.logspace(math.log10(0.6), math.log10(8), frequencies)
            self.register_buffer("frequencies", draw * scale[:, None])
            self.moments = nn.Linear(latent, 2 * frequencies)

    def readout(self):
        """RNN_to_z₀ of Table 3."""
        return nn.Sequential(
            nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(),
            nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Linear(128, self.latent),
        )  # fmt: skip

    def encode(self, x, t, mask=None):
        """p̂(z₀ | X): each set by itself, then a GRU backwards in time, with Δtᵢ = tᵢ − tᵢ₋₁."""
        check_series(x, t, self.dim, mask)
        h = keep(x, mask)
        for i, (linear, norm) in enumerate(zip(self.points, self.norms)):
            h = norm(linear(torch.relu(h) if i else h), mask)
        h = pool_max(h, mask).values[..., 0, :]  # (B, T, 512)
        t = t.to(x.device, x.dtype)
        gaps = torch.diff(t, prepend=t.new_tensor([self.t0])).expand(h.shape[:-1])
        _, last = self.rnn(torch.cat([h, gaps[..., None]], -1).flip(1))
        return Posterior(self.mean(last[0]), self.log_std(last[0]).exp())

    def latents(self, z0, t, stats=None):
        """z_t = ODESolve(z₀, t) for increasing t on either side of t0; `(B, T, latent)`."""
        times = read_times(t)
        if z0.dim() != 2 or z0.shape[-1] != self.latent:
            raise ValueError(f"z0 must be (B, {self.latent}), not {tuple(z0.shape)}")
        before, after = [v for v in times if v < self.t0], [v for v in times if v > self.t0]
        z = [z0[None]] if self.t0 in times else []
        for side in (before[::-1], after):
            if side:
                grid = torch.tensor([self.t0, *side], dtype=torch.float64)
                params = self.dynamics.parameters()
                path = solve(self.dynamics, z0, grid, params, stats=stats, **self.solver)[1:]
                z = [path.flip(0), *z] if side[0] < self.t0 else [*z, path]
        return torch.cat(z).movedim(0, 1)

    def elbo(self, x, t, mask=None, generator=None):
        """Eq. 11 per series: Σᵢ log p(x_tᵢ | z_tᵢ) − KL, with one z₀ from the posterior."""
        log_likelihood, kl = self.elbo_parts(x, t, mask, generator)
        return log_likelihood - kl

    def elbo_parts(self, x, t, mask=None, generator=None):
        posterior = self.encode(x, t, mask)
        z = self.latents(posterior.sample(generator), t)
        log_prob = self.decoder.log_prob(x, mask, z, generator=generator)
        return log_prob.sum(-1), posterior.kl()

    def matching_loss(
        self, x, t, mask=None, coupling="swaps", generator=None, pieces=0, times=0, moments=0.0,
    ):  # fmt: skip
        """The decoder's matching loss given z_t, and the KL per series.

        With `times`, the decoder's loss is that at so many of t, chosen at random; the encoder
        sees all. With `pieces`, half of the loss is that of pieces of so many points: a piece does
        not see the rest of its set, so it must use z_t, which attention over whole sets can do
        without. `moments` is the weight of `moment_error`, at all of t.
        """
        if moments and not hasattr(self, "moments"):
            raise ValueError(f"moments={moments}: only in a model with frequencies, such as 96")
        posterior = self.encode(x, t, mask)
        z = self.latents(posterior.sample(generator), t)
        told = moments * self.moment_error(x, z, mask) if moments else 0
        if times:
            some = torch.randperm(len(t), device=x.device, generator=generator)[:times]
            x, z, mask = x[:, some], z[:, some], None if mask is None else mask[:, some]
        loss = self.decoder.matching_loss(x, mask, z, coupling, generator)
        if pieces:
            if mask is not None or not 0 < pieces <= x.shape[-2]:
                raise ValueError(f"pieces={pieces} of sets of {x.shape[-2]} points, without a mask")
            part = x[..., : x.shape[-2] // pieces * pieces, :].unflatten(-2, (-1, pieces))
            z = z[..., None, :].expand(*part.shape[:-2], -1)
            loss = (loss + self.decoder.matching_loss(part, None, z, coupling, generator)) / 2
        return loss + told, posterior.kl()

    def moment_error(self, x, z, mask=None):
        """Mean square of W z_t − φ(x_t), φ(x) = meanᵢ (cos, sin)(ω·xᵢ) at fixed frequencies ω.

        φ is the characteristic function of the set's points. Matching alone tells the encoder
        little through its noise; φ has none but that of the set.
        """
        angle = self.decoder.enter(x, mask) @ self.frequencies.T
        phi = pool_mean(torch.cat([angle.cos(), angle.sin()], -1), mask)[..., 0, :]
        return (self.moments(z) - phi).square().mean()

    def decode(self, z0, t, points, generator=None):
        """Eq. 13: sets x̂ `(B, T, points, d)` at any times t, from base points y ~ N(0, I)."""
        if points < 1:
            raise ValueError(f"points must be at least 1, not {points}")
        z = self.latents(z0, t)
        y = normal((*z.shape[:-1], points, self.dim), z, generator)
        return self.decoder.decode(y, context=z)

    @torch.no_grad()
    def sample(self, sets, t, points, generator=None):
        """Eq. 12: z₀ ~ N(0, I), then decode."""
        if sets < 1:
            raise ValueError(f"sets must be at least 1, not {sets}")
        z0 = normal((sets, self.latent), self.decoder.mean, generator)
        return self.decode(z0, t, points, generator)

    @torch.no_grad()
    def reconstruct(self, x, t, t_out=None, points=None, mask=None, generator=None):
        """Decode the posterior mean of a series at times t_out, the observed ones by default."""
        t_out, points = t if t_out is None else t_out, x.shape[-2] if points is None else points
        return self.decode(self.encode(x, t, mask).mean, t_out, points, generator)


class LatentField(nn.Module):
    """ż = FC(256) tanh FC(256) tanh FC(latent); it does not read t."""

    def __init__(self, latent):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(latent, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(),
            nn.Linear(256, latent),
        )  # fmt: skip

    def forward(self, t, z):
        return self.network(z)


def read_times(t):
    """t as a list, checked."""
    if not isinstance(t, torch.Tensor) or t.dim() != 1 or not t.is_floating_point() or not len(t):
        got = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"t must be a 1-D floating point tensor of times, not {got}")
    times = t.tolist()
    if not all(map(math.isfinite, times)) or any(b <= a for a, b in zip(times, times[1:])):
        raise ValueError(f"t must be finite and strictly increasing, not {times}")
    return times


def check_series(x, t, dim, mask):
    read_times(t)
    if x.dim() != 4 or x.shape[1] != len(t):
        raise ValueError(f"x must be (B, {len(t)} times, points, {dim}), not {tuple(x.shape)}")
    check_set(x, dim, mask)
    check_values(x, mask)
