"""A learned prior p(z₀) of a TemporalSetVAE: ours, so that its samples are like the data.

    Eq. 11, KL(p̂(z₀ | X) ‖ p(z₀))    exnode.TemporalSetVAE.elbo_terms, once model.prior is a flow
    Eq. 12, z₀ ~ p(z₀)                exnode.TemporalSetVAE.sample, likewise
    p(z₀)                             fit: a SetFlow of z₀ as a set of one point

The paper's p(z₀) is N(0, I). An informative encoder puts z₀ where N(0, I) has no
mass, and what is decoded from N(0, I) is then unlike the data. Among all p, the mean over series of
KL(p̂(z₀ | X) ‖ p) is least for the mean of their posteriors (Tomczak and Welling, 2018). A flow is
fitted to draws from that mean, by matching, after the VAE is trained; encoder and decoder stay as
they are. Its density is exact, so the ELBO remains a lower bound. It starts as the Gaussian with
the mean and covariance of those draws, so that a network learns only what is not Gaussian.

Matching with a small weight of the KL leaves posteriors narrower than those that maximise the
ELBO. `width` multiplies all their deviations; their means, so reconstructions, stay as they are.

A prior belongs to the encoder that it was fitted to: prior.pt holds a fingerprint of its weights.
"""

import copy
import hashlib
import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from beyond.matching import noise_level
from exnode import Posterior, SetFlow, TemporalSetVAE, normal
from sets import Field, keep

WIDTH, LAYERS, WAVES = 384, 3, 4  # of the network
STEPS, BATCH, RATE, DECAY = 4000, 256, 1e-3, 0.995  # DECAY: of the average of the weights
FINEST = 0.1  # noise, in deviations of z₀, that matters: noise_level
CHECKS = 20  # times in a fit at which held-out series are looked at


@torch.no_grad()
def posteriors(model: TemporalSetVAE, batches: Iterable) -> Posterior:
    """p̂(z₀ | X) of all series in batches."""
    found = [model.encode(batch.x, batch.t, batch.mask) for batch in batches]
    return Posterior(*(torch.cat(part) for part in zip(*found)))


class GaussianField(Field):
    """The field that matches N(0, C) to N(0, I) along straight paths, and a network's correction.

    Along the eigenvectors of C, with variances λ, x_t = (1 − t) x + t z has the variance r² and

        E[z − x | x_t] = (t − (1 − t) λ)/r² x_t,   r² = (1 − t)² λ + t².

    What is not Gaussian is left to √λ/r · network(t, x_t / r), which starts at 0: in these scales,
    its input and its target have a variance of about 1 at every t (Karras et al., 2022).
    """

    def __init__(self, dim, width, layers, context=0):
        super().__init__(dim, time=True, context=context)
        self.register_buffer("basis", torch.eye(dim))
        self.register_buffer("variance", torch.ones(dim))
        self.first, self.last = nn.Linear(dim, width), nn.Linear(width, dim)
        self.widen = nn.ModuleList(nn.Linear(width + 2 * WAVES, width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        nn.init.zeros_(self.last.weight), nn.init.zeros_(self.last.bias)

    def forward(self, t, x, mask=None, context=None):
        x, t = self.inputs(t, x, mask, context)
        r = ((1 - t) ** 2 * self.variance + t**2).sqrt()
        u = x @ self.basis
        linear = (t - (1 - t) * self.variance) / r**2 * u
        f = linear + self.variance.sqrt() / r * self.network(t, u / r)
        return keep(f @ self.basis.T, mask)

    def network(self, t, y):
        """Residual layers h + B silu(A (h, waves of t)); time is finest near 0, where z₀ are."""
        angles = torch.log1p(20 * t) * torch.arange(1, WAVES + 1, dtype=t.dtype, device=t.device)
        waves = torch.cat([angles.sin(), angles.cos()], -1).expand(*y.shape[:-1], -1)
        h = self.first(y)
        for widen, narrow in zip(self.widen, self.narrow):
            h = h + narrow(F.silu(widen(torch.cat([h, waves], -1))))
        return self.last(h)


def make(latent: int) -> SetFlow:
    """A flow of z₀; its density needs a tangent per coordinate, and no estimate."""
    how = {"trace": "exact", "gradient": "backprop", "rtol": 1e-3, "atol": 1e-4}
    field = partial(GaussianField, width=WIDTH, layers=LAYERS)
    return SetFlow(latent, 1, field=field, t1=1.0, **how)


def start(train: Posterior) -> SetFlow:
    """The flow that is the Gaussian with the mean and covariance of draws from `train`."""
    flow = make(train.mean.shape[-1]).to(train.mean)
    covariance = train.mean.T.cov(correction=0) + train.std.square().mean(0).diag()
    std = covariance.diag().sqrt()
    flow.mean.copy_(train.mean.mean(0)), flow.std.copy_(std)
    field = flow.blocks[0].field
    variance, basis = torch.linalg.eigh((covariance / std[:, None] / std).double())
    field.variance.copy_(variance), field.basis.copy_(basis)
    return flow


def loss_of(flow, posterior, draws):
    """∫ (1 − s) |f(s, x_s) − E[z − x | x_s, X]|² du per coordinate, x = z₀ ~ p̂(z₀ | X), s = s(u).

    As matching_loss, but given X, x is N(m, σ²), so that the mean of the target is known:
    E[z − x | x_s, X] = (s (x_s − m) − (1 − s) σ² x_s)/((1 − s)² σ² + s²).
    """
    m, std = flow.to_units(posterior.mean), posterior.std / flow.std
    place = torch.rand(len(m), 1, generator=draws, device=m.device, dtype=m.dtype)
    u = (torch.arange(len(m), device=m.device)[:, None] + place) / len(m)
    s = noise_level(u, FINEST)
    x_s = torch.lerp(Posterior(m, std).sample(draws), normal(m.shape, m, draws), s)
    target = (s * (x_s - m) - (1 - s) * std**2 * x_s) / (((1 - s) * std) ** 2 + s**2)
    v = flow.blocks[0].field(s[:, 0], x_s[:, None])[:, 0]
    return ((1 - s) * (v - target).square()).mean()


def fit(train: Posterior, valid: Posterior, seed=0, progress=iter) -> SetFlow:
    """A flow fitted to draws from `train`, with the weights that match those of `valid` best."""
    draws = torch.Generator(train.mean.device).manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        flow = start(train)
    optimizer, average = torch.optim.Adam(flow.parameters(), lr=RATE), copy.deepcopy(flow)
    best, kept = math.inf, None
    for step in progress(range(STEPS)):
        rows = torch.randint(len(train.mean), (BATCH,), generator=draws, device=draws.device)
        loss = loss_of(flow, Posterior(train.mean[rows], train.std[rows]), draws)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        share = max(1 - DECAY, 9 / (10 + step))  # forget the start sooner
        for mine, new in zip(average.parameters(), flow.parameters()):
            mine.data.lerp_(new.data, share)
        if (step + 1) % max(STEPS // CHECKS, 1) == 0 and (error := held_out(average, valid)) < best:
            best, kept = error, copy.deepcopy(average)
    if kept is None:
        raise FloatingPointError("the prior's loss is not finite")
    return kept.eval()


@torch.no_grad()
def held_out(flow, valid):
    """The loss of one fixed draw from held-out posteriors."""
    return loss_of(flow, valid, torch.Generator(valid.mean.device).manual_seed(0)).item()


# -------------------------------------------------------------------------------------- prior.pt
def fingerprint(model) -> str:
    """Of the encoder's weights."""
    parts = ("points.", "norms.", "rnn.", "mean.", "log_std.")
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if name.startswith(parts):
            sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def as_state(flow: SetFlow, model: TemporalSetVAE, width=1.0) -> dict:
    """What prior.pt holds: a flow fitted to the model's posteriors, `width` times as wide."""
    state = {"prior": flow.state_dict(), "latent": flow.dim, "width": float(width)}
    return state | {"encoder": fingerprint(model)}


def check(state: dict, model: TemporalSetVAE):
    """A ValueError unless this is the prior.pt of this model."""
    if state.get("latent") != model.latent:
        raise ValueError(f"a prior of {state.get('latent')} latent numbers, not {model.latent}")
    if state.get("encoder") != fingerprint(model):
        raise ValueError("a prior of other weights, since the run has changed")
    width = state.get("width")
    if not isinstance(width, float) or not 0 < width < math.inf:
        raise ValueError(f"posteriors of {str(width)[:20]} times their width")


@torch.no_grad()
def attach(flow: SetFlow, width: float, model: TemporalSetVAE):
    """Let the model have this prior, and posteriors that are as wide as those it was fitted to."""
    model.log_std[-1].bias.add_(math.log(width))
    model.prior = flow.to(next(model.parameters())).eval()
