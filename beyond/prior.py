"""A learned prior p(z₀) of a TemporalSetVAE: ours, so that its samples are like the data.

    Eq. 11, KL(p̂(z₀ | X) ‖ p(z₀))    exnode.TemporalSetVAE.elbo_terms, once model.prior is a flow
    Eq. 12, z₀ ~ p(z₀)                exnode.TemporalSetVAE.sample, likewise
    p(z₀)                             fit: a SetFlow of z₀ as a set of one point

The paper's p(z₀) is N(0, I). An encoder that tells much of its series puts z₀ where N(0, I) has no
mass, and what is decoded from N(0, I) is then unlike the data. Among all p, the mean over series of
KL(p̂(z₀ | X) ‖ p) is least for the mean of their posteriors (Tomczak and Welling, 2018). A flow is
fitted to draws from that mean, by matching, after the VAE is trained; encoder and decoder stay as
they are. Its density is exact, so the ELBO remains a lower bound.

A prior belongs to the encoder that it was fitted to: prior.pt holds a fingerprint of its weights.
"""

import copy
import hashlib
import math
from collections.abc import Iterable

import torch

from beyond.matching import matching_loss
from beyond.muon import Muon
from exnode import Posterior, SetFlow, TemporalSetVAE

WIDTHS = (512, 512, 512)
STEPS, BATCH, RATE, DECAY = 3000, 256, 1e-3, 0.995  # DECAY: of the average of the weights
CHECKS = 20  # times in a fit at which held-out series are looked at


@torch.no_grad()
def posteriors(model: TemporalSetVAE, batches: Iterable) -> Posterior:
    """p̂(z₀ | X) of all series in batches."""
    found = [model.encode(batch.x, batch.t, batch.mask) for batch in batches]
    return Posterior(*(torch.cat(part) for part in zip(*found)))


def make(latent: int, hidden=WIDTHS) -> SetFlow:
    """A flow of z₀; its density needs a tangent per coordinate, and no estimate."""
    how = {"trace": "exact", "gradient": "backprop", "rtol": 1e-3, "atol": 1e-4}
    return SetFlow(latent, 1, hidden, field="concatsquash", t1=1.0, **how)


def fit(train: Posterior, valid: Posterior, seed=0, progress=iter) -> SetFlow:
    """A flow fitted to draws from `train`, with the weights that match those of `valid` best."""
    draws = torch.Generator(train.mean.device).manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        flow = make(train.mean.shape[-1]).to(train.mean)
    flow.standardise(train.sample(draws)[:, None])
    optimizer, average = Muon(flow.parameters(), lr=RATE), copy.deepcopy(flow)
    best, kept = math.inf, None
    for step in progress(range(STEPS)):
        rows = torch.randint(len(train.mean), (BATCH,), generator=draws, device=draws.device)
        z0 = Posterior(train.mean[rows], train.std[rows]).sample(draws)
        loss = matching_loss(flow, z0[:, None], coupling="none", generator=draws)
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
    """The matching loss of one fixed draw from held-out posteriors."""
    draws = torch.Generator(valid.mean.device).manual_seed(0)
    z0 = valid.sample(draws)[:, None]
    return matching_loss(flow, z0, coupling="none", generator=draws).item()


# -------------------------------------------------------------------------------------- prior.pt
def fingerprint(model) -> str:
    """Of the encoder's weights."""
    parts = ("points.", "norms.", "rnn.", "mean.", "log_std.")
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if name.startswith(parts):
            sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def as_state(flow: SetFlow, model: TemporalSetVAE) -> dict:
    """What prior.pt holds."""
    return {"prior": flow.state_dict(), "latent": flow.dim, "encoder": fingerprint(model)}


def check(state: dict, model: TemporalSetVAE):
    """A ValueError unless this is the prior.pt of this model."""
    if state.get("latent") != model.latent:
        raise ValueError(f"a prior of {state.get('latent')} latent numbers, not {model.latent}")
    if state.get("encoder") != fingerprint(model):
        raise ValueError("a prior of other weights, since the run has changed")
