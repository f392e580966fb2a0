"""Exchangeable neural ODEs: the block, and the paper's three models that are built from it.

    paper                                                  here
    ---------------------------------------------------    ----------------------------------------
    Sec. 3.1, Theorem 1, ż = f(z, t) equivariant           ExNODE.forward, .inverse
    Sec. 3.2, v = MaxPool(ExNODE Solve(φ(x)))              SetClassifier.forward
    Eq. 5, 9, d log p / dt = −Tr ∂f/∂z                     ExNODE.forward_and_log_det
    Sec. 3.3, Hutchinson's estimator                       ExNODE.forward_and_log_det, draw_noise
    Eq. 10, p(z) = Π N(zᵢ; 0, I)                           base_log_prob
    Sec. 3.3, likelihood and generation                    SetFlow.log_prob, .sample
    Sec. 3.4, encoder, backwards in time                   TemporalSetVAE.encode
    Sec. 3.4, z_t = ODESolve(z₀, θ_t, t)                   TemporalSetVAE.latents
    Eq. 11, ELBO                                           TemporalSetVAE.elbo, .elbo_terms
    Eq. 12, sampling at any time                           TemporalSetVAE.sample
    Eq. 13, x̂_t = ODESolve(y, z_t)                         TemporalSetVAE.decode, .reconstruct
    Table 3, architectures                                 the defaults of each class

x is `(..., n, d)`: a set of n points, leading axes are batch. mask is `(..., n)`, True where a
point exists. context is `(..., c)`. A series is x `(B, T, n, d)` at times t, `(T,)` or `(B, T)`.
Arrays and lists become tensors of the model's precision. A set without points is an error (on a
CPU; a GPU would have to wait for the check); in a series, it is a set that was not observed.

Departures from the paper:
  - Eq. 9 has the limits of its integral exchanged; we follow Eq. 5: log p(x) = log p(z(t₁)) + ∫ Tr.
  - `trace="exact"` replaces Hutchinson's estimate by the trace itself, at a similar cost.
  - `gradient="checkpoint"` differentiates the discrete solve exactly, keeping a state per step.
  - `SetFlow.standardise` gives a flow the units of its data; without it, units stay as they are.
  - The ELBO has one KL term for the whole series; the authors' code counts it once per time.
  - The posterior starts narrow: with unit noise, z₀ carries no information about x for the first
    thousand steps.
  - z₀ lives at time `t0` = 0 whatever the observed times are, so that grids may differ.
  - Sets may be ragged, by masks, everywhere, and each series may have its own times.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import sets
from beyond.fast import FastAttentionField, FastDeepSetsField
from beyond.transformer import TransformerField
from sets import PointNorm, check_widths, count, keep, pool_max
from solvers import odeint, odeint_adjoint, odeint_checkpoint
from support.arguments import as_sets, as_tensor, as_times, check_counts, check_order, one_of

GRADIENTS = ("backprop", "adjoint", "checkpoint")
TRACES = ("hutchinson", "exact")
FIELDS = ("attention", "deepsets", "concatsquash", "transformer")
DECODERS = ("concatsquash", "attention", "transformer")
PIECE = 2**16  # points that are sampled at once


def ode_solve(f, y0, times, model, params, solver=None, mask=None, stats=None):
    """y at each of times, the first being that of y0, by `solver` or the model's own.

    The model says how it is differentiated, params what for beside y0. With a mask, y0 is a set or
    begins with one, and no padded point counts in the solver's error.
    """
    how = {**(solver or model.solver), "stats": stats}
    t = torch.as_tensor(times, dtype=torch.float64)
    params = [p for p in params if p.requires_grad]
    adaptive, options = how.get("method") in (None, "dopri5"), how.get("options") or {}
    if adaptive and mask is not None:
        how["options"] = {"norm": partial(rms_of_points, mask)} | options
    if model.gradient == "backprop" or not torch.is_grad_enabled():
        return odeint(f, y0, t, **how)
    if model.gradient == "checkpoint":
        return odeint_checkpoint(f, y0, t, params=params, **how)
    backwards = options | ({"norm": "seminorm"} if adaptive else {})
    return odeint_adjoint(f, y0, t, adjoint_params=params, adjoint_options=backwards, **how)


def rms_of_points(mask, state):
    """Root mean square of a state x or (x, log det), whose padded points are 0 and do not count."""
    x, *rest = state if isinstance(state, tuple) else (state,)
    size = mask.sum() * x.shape[-1] + sum(part.numel() for part in rest)
    return (sum(part.square().sum() for part in (x, *rest)) / size).sqrt()


class ExNODE(nn.Module):
    """Theorem 1: z(t₁) where ż = f(t, z), z(0) = x; equivariant because f is, and invertible.

    Of one call, `solver` (method, rtol, atol, options) replaces the block's own; `stats` counts.
    """

    def __init__(
        self, field, t1=1.0, method="dopri5", rtol=1e-5, atol=1e-5, gradient="backprop",
        options=None,
    ):  # fmt: skip
        super().__init__()
        self.field, self.t1 = field, t1
        self.gradient = one_of("gradient", gradient, GRADIENTS)
        self.solver = {"method": method, "rtol": rtol, "atol": atol, "options": options}

    def forward(self, x, mask=None, context=None, solver=None, stats=None) -> Tensor:
        return self.integrate(x, (0.0, self.t1), mask, context, solver, stats)

    def inverse(self, z, mask=None, context=None, solver=None, stats=None) -> Tensor:
        return self.integrate(z, (self.t1, 0.0), mask, context, solver, stats)

    def integrate(self, x, times, mask=None, context=None, solver=None, stats=None) -> Tensor:
        """z at the second of two times, where z = x at the first."""
        x, mask, context = as_sets(self.field, self.field.dim, x, mask, context)

        def f(t, z):
            return self.field(t, z, mask, context)

        how = self, self.inputs(context), solver, mask, stats
        z = ode_solve(f, keep(x, mask), times, *how)[-1]
        return keep(z, mask, x)  # a padded point stays where it is

    def forward_and_log_det(
        self, x, mask=None, context=None, noise=None, solver=None, stats=None
    ) -> tuple[Tensor, Tensor]:
        """Eq. 5, 9: z(t₁) and ∫ Tr(∂f/∂z) dt per set.

        The trace is exact, or with noise e Hutchinson's estimate: the mean over e of eᵀ (∂f/∂z) e.
        """

        def f(t, state):  # (z, log det) ↦ (f, Tr ∂f/∂z)
            if noise is None:
                return self.field.value_and_trace(t, state[0], mask, context)
            dz, je = self.field.value_and_jvp(t, state[0], noise, mask, context)
            return dz, (noise * je).sum((-2, -1)).mean(0)  # of a padded point, je is 0

        start = keep(x, mask), x.new_zeros(x.shape[:-2])
        how = self, self.inputs(context), solver, mask, stats
        z, log_det = ode_solve(f, start, (0.0, self.t1), *how)
        return keep(z[-1], mask, x), log_det[-1]

    def inputs(self, context):
        """What gradients are for, beside x."""
        return [*self.field.parameters(), *([] if context is None else [context])]


def make_field(name, dim, hidden, heads=4, time=False, context=0):
    one_of("field", name, FIELDS)
    if name == "attention":  # sets.AttentionField and sets.DeepSetsField, computed faster
        return FastAttentionField(dim, hidden, heads, time, context)
    if name == "deepsets":
        return FastDeepSetsField(dim, hidden, time=time, context=context)
    if name == "concatsquash":
        return sets.ConcatSquashField(dim, hidden, context)
    return TransformerField(dim, *one_width(hidden), heads, context)


def one_width(hidden):
    """The width of a transformer and its number of layers, from one width per layer."""
    hidden = check_widths(hidden)
    if len(set(hidden)) != 1:
        raise ValueError(f"hidden must be one width per layer, all equal, not {hidden}")
    return hidden[0], len(hidden)


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

    def forward(self, x, mask=None) -> Tensor:
        x, mask, _ = as_sets(self, self.in_dim, x, mask)
        x = keep(x, mask)
        for linear, norm in zip(self.expand, self.norms):  # φ
            x = torch.tanh(norm(linear(x), mask))
        v = pool_max(self.block(x, mask), mask).values[..., 0, :]
        return self.head(v)


# -------------------------------------------------------------------------------------- set flows


def base_log_prob(z, mask=None) -> Tensor:
    """Eq. 10: Σᵢ log N(zᵢ; 0, I) per set."""
    return -0.5 * keep(z * z + math.log(2 * math.pi), mask).sum((-2, -1))


def normal(shape, like, generator=None):
    """Draws from N(0, I), like `like`, on the generator's device: a seed has one meaning."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)


def draw_noise(x, probes, kind, generator=None):
    """Probes e with E[e eᵀ] = I, `(probes, *x.shape)`: Rademacher or Gaussian."""
    check_counts(probes=probes)
    shape, device = (probes, *x.shape), x.device if generator is None else generator.device
    if kind == "gaussian":
        return normal(shape, x, generator)
    return (2 * torch.randint(0, 2, shape, device=device, generator=generator) - 1).to(x)


class SetFlow(nn.Module):
    """Sec. 3.3: a chain of ExNODE blocks from data to N(0, I), and back.

    log p(x) = log N(z; 0, I) + Σ_blocks ∫ Tr(∂f/∂z) dt − n Σ log std  with  z = encode(x),

    the last term from the units of `standardise`. `field` is a name for `make_field`, or a function
    of `(dim, context=…)` that makes a field. `time` feeds t to attention and deepsets fields; the
    others always read it. Of one call, `trace`, `probes` and `solver` replace the model's own.
    """

    def __init__(
        self, dim, blocks=12, hidden=(128, 128, 128), heads=4, field="attention", time=False,
        context=0, t1=0.5, gradient="adjoint", trace="hutchinson", probes=1, noise="rademacher",
        **solver,
    ):  # fmt: skip
        super().__init__()
        check_counts(blocks=blocks, probes=probes)
        self.dim, self.probes = dim, probes
        self.trace = one_of("trace", trace, TRACES)
        self.noise = one_of("noise", noise, ("rademacher", "gaussian"))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))
        kind = {"hidden": hidden, "heads": heads, "time": time}
        make = field if callable(field) else partial(make_field, field, **kind)
        fields = (make(dim, context=context) for _ in range(blocks))
        self.blocks = nn.ModuleList(ExNODE(f, t1, gradient=gradient, **solver) for f in fields)

    def standardise(self, x, mask=None):
        """Let the chain see data in units of the mean and deviation of these sets, per axis."""
        points = x.flatten(0, -2) if mask is None else x[mask]
        std = points.std(0, correction=0)
        if not (std > 0).all() or not std.isfinite().all():
            raise ValueError(f"x must vary along every axis, but deviates by {std.tolist()}")
        self.mean.copy_(points.mean(0))
        self.std.copy_(std)

    def to_units(self, x, mask=None):
        """(x − mean) / std; padded points stay as they are."""
        return keep((x - self.mean) / self.std, mask, x)

    def from_units(self, x, mask=None):
        return keep(x * self.std + self.mean, mask, x)

    def read(self, x, mask=None, context=None):
        """The arguments as tensors that fit the chain; a ValueError if they do not."""
        x, mask, context = as_sets(self, self.dim, x, mask, context)
        self.blocks[0].field.check(None, x, mask, context)
        return x, mask, context

    def encode(self, x, mask=None, context=None, solver=None, stats=None) -> Tensor:
        """z = q(x): data to noise."""
        x, mask, context = self.read(x, mask, context)
        z = self.to_units(x, mask)
        for block in self.blocks:
            z = block(z, mask, context, solver, stats)
        return z

    def decode(self, z, mask=None, context=None, solver=None, stats=None) -> Tensor:
        """x = q⁻¹(z): noise to data; no trace is computed."""
        z, mask, context = self.read(z, mask, context)
        for block in reversed(self.blocks):
            z = block.inverse(z, mask, context, solver, stats)
        return self.from_units(z, mask)

    def log_prob(
        self, x, mask=None, context=None, *, trace=None, probes=None, solver=None, noise=None,
        generator=None, stats=None,
    ) -> Tensor:  # fmt: skip
        """log p(x₁, …, xₙ) per set; noise `(probes, *x.shape)` is drawn unless it is given."""
        x, mask, context = self.read(x, mask, context)
        if trace == "exact" and noise is not None:
            raise ValueError("noise is for trace='hutchinson', not for 'exact'")
        trace = one_of("trace", trace or self.trace, TRACES)
        if noise is None and trace == "hutchinson":
            probes = self.probes if probes is None else probes
            noise = draw_noise(x, probes, self.noise, generator)
        if noise is not None and noise.shape[1:] != x.shape:
            wanted = ("probes", *x.shape)
            raise ValueError(f"noise must have the shape {wanted}, not {tuple(noise.shape)}")
        z, log_det = self.to_units(x, mask), -count(x, mask) * self.std.log().sum()
        for block in self.blocks:
            z, change = block.forward_and_log_det(z, mask, context, noise, solver, stats)
            log_det = log_det + change
        return base_log_prob(z, mask) + log_det

    @torch.no_grad()
    def sample(
        self, sets, points, generator=None, context=None, mask=None, solver=None, progress=iter
    ) -> Tensor:
        """`(sets, points, dim)` from the model; any number of points, or ragged sets by a mask."""
        check_counts(sets=sets, points=points)
        mask = as_tensor("mask", mask, self.mean)
        context = as_tensor("context", context, self.mean, self.mean.dtype)
        z = normal((sets, points, self.dim), self.mean, generator)
        return self.decode_pieces(keep(z, mask), mask, context, solver, progress)

    def decode_pieces(self, z, mask=None, context=None, solver=None, progress=iter):
        """As decode, about PIECE points at a time; `progress` wraps the list of pieces."""
        size = max(1, PIECE // z.shape[-2])
        given = [[None] * len(z) if a is None else a.split(size) for a in (mask, context)]
        pieces = progress(list(zip(z.split(size), *given)))
        return torch.cat([self.decode(*piece, solver) for piece in pieces])


# -------------------------------------------------------------------------------- sets over time


class Posterior(NamedTuple):
    """N(mean, std²) over z₀, `(B, latent)` each."""

    mean: Tensor
    std: Tensor

    def sample(self, generator=None):
        return self.mean + self.std * normal(self.mean.shape, self.mean, generator)

    def log_prob(self, z):
        """log N(z; mean, std²) per series."""
        return base_log_prob(((z - self.mean) / self.std)[..., None, :]) - self.std.log().sum(-1)

    def kl(self):
        """KL(posterior ‖ N(0, I)) per series."""
        return 0.5 * (self.mean**2 + self.std**2 - 1 - 2 * self.std.log()).sum(-1)


class TemporalSetVAE(nn.Module):
    """Sec. 3.4: a latent z that follows an ODE in time, and a set flow for x_t given z_t.

    A series is x `(B, T, n, d)` at times t, `(T,)` or a row for each series, `(B, T)`, increasing;
    mask is `(B, T, n)`. A set without a single point was not observed: nothing depends on it.
    `prior`, None for N(0, I), may be a set flow for z₀ as a set of one point: beyond/prior.py.
    """

    def __init__(
        self, dim=2, latent=128, decoder="concatsquash", hidden=(512, 512, 512), heads=4, t0=0.0,
        method="dopri5", rtol=1e-3, atol=1e-4, gradient="adjoint", options=None, **flow,
    ):  # fmt: skip
        super().__init__()
        one_of("decoder", decoder, DECODERS)
        self.dim, self.latent, self.t0, self.gradient = dim, latent, t0, gradient
        sizes = (dim, 128, 128, 256, 512)
        self.points = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = nn.ModuleList(PointNorm(size) for size in sizes[1:])
        self.rnn = nn.GRU(512 + 1, 512, batch_first=True)
        self.mean, self.log_std = self.readout(), self.readout()
        nn.init.constant_(self.log_std[-1].bias, -2.0)  # z₀ carries information about x at once
        self.dynamics, self.prior = LatentField(latent), None
        self.solver = {"method": method, "rtol": rtol, "atol": atol, "options": options}
        self.decoder = SetFlow(
            dim, 1, hidden, heads, field=decoder, time=decoder == "attention", context=latent,
            t1=1.0, gradient=gradient, **self.solver, **flow,
        )  # fmt: skip

    def readout(self):
        """RNN_to_z₀ of Table 3."""
        return nn.Sequential(
            nn.Linear(512, 256), PointNorm(256), nn.ReLU(),
            nn.Linear(256, 128), PointNorm(128), nn.ReLU(),
            nn.Linear(128, self.latent),
        )  # fmt: skip

    def read(self, x, t, mask=None):
        """The arguments as tensors, t being `(B, T)`, and which sets were observed, `(B, T)`."""
        x, mask, _ = as_sets(self, self.dim, x, mask, axes=2)
        if x.dim() != 4:
            raise ValueError(f"x must be (B, T, points, {self.dim}), not {tuple(x.shape)}")
        seen = torch.ones_like(x[..., 0, 0]).bool() if mask is None else mask.any(-1)
        t = as_times(t, len(x))
        if t.shape != x.shape[:2]:
            raise ValueError(f"x must hold sets at {t.shape[1]} times, not {tuple(x.shape)}")
        check_order(t, seen)
        return x, t, mask, seen

    def encode(self, x, t, mask=None) -> Posterior:
        """p̂(z₀ | X): each set by itself, then a GRU backwards in time, with Δtᵢ = tᵢ − tᵢ₋₁."""
        x, t, mask, seen = self.read(x, t, mask)
        h = keep(x, mask)
        for i, (linear, norm) in enumerate(zip(self.points, self.norms)):
            h = norm(linear(torch.relu(h) if i else h), mask)
        h = keep(pool_max(h, mask).values[..., 0, :], seen)  # (B, T, 512)
        t = torch.where(seen, t.to(h), self.t0)
        order = torch.where(seen, -t, math.inf).argsort(-1)  # last time first, unobserved sets last
        h, t = h.take_along_dim(order[..., None], 1), t.take_along_dim(order, 1)
        gaps = -torch.diff(t, append=torch.full_like(t[:, :1], self.t0))
        states, _ = self.rnn(torch.cat([h, gaps[..., None]], -1))
        last = states.take_along_dim(seen.sum(-1)[:, None, None] - 1, 1)[:, 0]  # at the first set
        return Posterior(self.mean(last), self.log_std(last).exp())

    def latents(self, z0, t, solver=None, stats=None) -> Tensor:
        """z_t = ODESolve(z₀, θ_t, t), `(B, T, latent)`, at times on either side of t0."""
        z0 = as_tensor("z0", z0, self.decoder.mean, self.decoder.mean.dtype)
        if z0.dim() != 2 or z0.shape[-1] != self.latent:
            raise ValueError(f"z0 must be (B, {self.latent}), not {tuple(z0.shape)}")
        t, t0 = as_times(t, len(z0)), torch.tensor([self.t0], dtype=torch.float64)
        how = self, self.dynamics.parameters(), solver, None, stats
        before, after = (side.unique() for side in (t[t < t0], t[t > t0]))  # of all series
        back = ode_solve(self.dynamics, z0, torch.cat([t0, before.flip(0)]), *how)
        path = ode_solve(self.dynamics, z0, torch.cat([t0, after]), *how)
        path = torch.cat([back[1:].flip(0), path]).movedim(0, 1)
        index = torch.searchsorted(torch.cat([before, t0, after]), t).to(path.device)
        return path.take_along_dim(index[..., None], 1)

    def elbo(self, x, t, mask=None, generator=None, **how) -> Tensor:
        """Eq. 11 per series: Σ_t log p(x_t | z_t) − KL(p̂(z₀ | X) ‖ p(z₀)), for one z₀ ~ p̂."""
        log_prob, kl = self.elbo_terms(x, t, mask, generator, **how)
        return log_prob - kl

    def elbo_terms(
        self, x, t, mask=None, generator=None, *, trace=None, probes=None, solver=None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of Eq. 11, log-likelihood and KL, with a learned prior estimated by z₀."""
        x, t, mask, seen = self.read(x, t, mask)
        posterior = self.encode(x, t, mask)
        z0 = posterior.sample(generator)
        z = self.latents(z0, t, solver)
        if mask is not None:
            x, mask, z = x[seen], mask[seen], z[seen]  # each observed set, (sets, n, d)
        how = {"trace": trace, "probes": probes, "solver": solver, "generator": generator}
        log_prob = self.decoder.log_prob(x, mask, z, **how)
        log_prob = log_prob.new_zeros(seen.shape).masked_scatter(seen, log_prob)  # (B, T)
        if self.prior is None:
            return log_prob.sum(-1), posterior.kl()
        log_prior = self.prior.log_prob(z0[:, None], solver=solver, generator=generator)
        return log_prob.sum(-1), posterior.log_prob(z0) - log_prior

    def decode(
        self, z0, t, points, generator=None, continuous=False, solver=None, progress=iter, mask=None
    ) -> Tensor:
        """Eq. 13: sets x̂ `(B, T, points, d)` at any times t, from base points y ~ N(0, I).

        If continuous, each point has one y for all times, and so moves continuously. Sets are of
        the points in mask `(B, T, points)`, with zeros elsewhere.
        """
        check_counts(points=points)
        mask = as_tensor("mask", mask, self.decoder.mean)
        t, seen = as_times(t, len(z0)), None if mask is None else mask.any(-1)
        if mask is not None and mask.shape != (wanted := (*t.shape, points)):
            raise ValueError(f"mask must have the shape {wanted}, not {tuple(mask.shape)}")
        check_order(t, seen)
        z = self.latents(z0, t, solver)
        y = normal((len(z), 1 if continuous else z.shape[1], points, self.dim), z, generator)
        y = y.expand(-1, z.shape[1], -1, -1)
        if mask is None:
            x = self.decoder.decode_pieces(y.flatten(0, 1), None, z.flatten(0, 1), solver, progress)
            return x.unflatten(0, z.shape[:2])
        x = self.decoder.decode_pieces(y[seen], mask[seen], z[seen], solver, progress)
        return torch.zeros_like(y).masked_scatter(seen[..., None, None], keep(x, mask[seen]))

    @torch.no_grad()
    def sample(self, sets, t, points, generator=None, **how) -> Tensor:
        """Eq. 12: z₀ ~ p(z₀), then decode."""
        check_counts(sets=sets)
        if self.prior is None:
            z0 = normal((sets, self.latent), self.decoder.mean, generator)
        else:
            z0 = self.prior.sample(sets, 1, generator)[:, 0]
        return self.decode(z0, t, points, generator, **how)

    @torch.no_grad()
    def reconstruct(self, x, t, t_out=None, points=None, mask=None, generator=None, **how):
        """Decode the posterior mean of a series at times t_out, the observed ones by default."""
        z0 = self.encode(x, t, mask).mean
        t_out, points = t if t_out is None else t_out, len(x[0][0]) if points is None else points
        return self.decode(z0, t_out, points, generator, **how)


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


def load(run) -> nn.Module:
    """The trained model of a run directory, ready to use: `exnode.load("pretrained/chair")`."""
    from support.models import load  # which knows the options of runs, and needs this module

    return load(run)
