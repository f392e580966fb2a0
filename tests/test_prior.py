"""beyond/prior.py: the field in closed form, its density, and fits to posteriors that are known."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from beyond import prior
from beyond.matching import matching_loss
from exnode import Posterior, TemporalSetVAE

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(prior, "WIDTH", 32)


def some_posteriors(count, latent, seed=0, centres=None):
    """Posteriors about correlated points, or about one of a few centres."""
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, latent, generator=g, dtype=DOUBLE)
    mean[:, 1:] += 0.8 * mean[:, :1]
    if centres is not None:
        mean = centres[torch.arange(count) % len(centres)] + 0.05 * mean
    std = 0.1 + 0.2 * torch.rand(count, latent, generator=g, dtype=DOUBLE)
    return Posterior(3 + 2 * mean, std)


def gaussian_of(posterior):
    """The Gaussian with the mean and covariance of a draw from a mixture of posteriors."""
    centred = posterior.mean - posterior.mean.mean(0)
    covariance = centred.T @ centred / len(centred) + (posterior.std**2).mean(0).diag()
    return MultivariateNormal(posterior.mean.mean(0), covariance)


def small_vae(latent=3, **settings):
    torch.manual_seed(0)
    how = {"hidden": (8,), "trace": "exact", "gradient": "backprop", **settings}
    return TemporalSetVAE(2, latent, **how).double().eval()


# ------------------------------------------------------------------------------- the field
def test_a_prior_starts_as_the_gaussian_of_the_posteriors():
    posterior = some_posteriors(200, 4)
    flow, wanted = prior.start(posterior), gaussian_of(posterior)
    z0 = posterior.sample(torch.Generator().manual_seed(1))[:20]
    tight = {"method": "dopri5", "rtol": 1e-6, "atol": 1e-6}
    with torch.no_grad():
        found = flow.log_prob(z0[:, None], solver=tight)
        drawn = flow.sample(4000, 1, torch.Generator().manual_seed(2), solver=tight)[:, 0]
    assert torch.allclose(found, wanted.log_prob(z0), atol=1e-4)
    assert torch.allclose(drawn.mean(0), wanted.mean, atol=0.2)
    assert torch.allclose(drawn.T.cov(), wanted.covariance_matrix, atol=0.5)


def test_the_trace_of_the_field_is_that_of_its_jacobian():
    field = prior.start(some_posteriors(50, 3)).blocks[0].field
    torch.manual_seed(0)
    with torch.no_grad():
        for p in field.parameters():
            p.normal_(0, 0.3)
    x, t = torch.randn(5, 1, 3, dtype=DOUBLE), torch.rand(5, dtype=DOUBLE)
    _, trace = field.value_and_trace(t, x)
    for i in range(5):
        jacobian = torch.autograd.functional.jacobian(lambda y, i=i: field(t[i], y), x[i])
        assert trace[i].item() == pytest.approx(jacobian.view(3, 3).trace().item())


def test_the_loss_has_its_least_value_where_the_field_is_that_of_the_only_posterior():
    """One posterior N(m, σ²): the Gaussian start is the field itself, and nothing is left."""
    one = Posterior(torch.tensor([[1.0, -2.0]], dtype=DOUBLE), torch.tensor([[0.5, 2.0]]).double())
    many = Posterior(*(part.expand(500, -1) for part in one))
    flow, draws = prior.start(many), torch.Generator().manual_seed(0)
    assert prior.loss_of(flow, many, draws).item() == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        flow.blocks[0].field.last.bias.fill_(0.1)
    assert prior.loss_of(flow, many, draws).item() > 1e-4


def test_the_known_mean_of_the_target_has_the_gradient_of_matching():
    """Replacing z − x by its mean given x_s and the series changes the gradient by noise only."""
    posterior = some_posteriors(1000, 2, centres=torch.eye(2, dtype=DOUBLE))
    flow, gradients = prior.start(posterior), []
    for loss in (
        lambda g: prior.loss_of(flow, posterior, g),
        lambda g: matching_loss(flow, posterior.sample(g)[:, None], coupling="none", generator=g),
    ):
        each = []
        for seed in range(20):
            found = loss(torch.Generator().manual_seed(seed))
            each.append(torch.autograd.grad(found, flow.blocks[0].field.last.weight)[0].flatten())
        gradients.append(torch.stack(each))
    difference = gradients[0].mean(0) - gradients[1].mean(0)
    error = (gradients[0].var(0) + gradients[1].var(0)).div(20).sqrt()
    assert ((difference / error).square().mean()).item() < 2
    assert gradients[0].var(0).mean() < gradients[1].var(0).mean()


# ------------------------------------------------------------------------------- the fit
def test_a_fit_finds_the_clusters_that_a_gaussian_misses(monkeypatch):
    monkeypatch.setattr(prior, "STEPS", 400)
    centres = torch.tensor([[-1.0, -1], [1, 1], [1, -1]], dtype=DOUBLE)
    train, valid = (some_posteriors(n, 2, seed, centres) for n, seed in ((600, 0), (200, 1)))
    steps = []
    flow = prior.fit(train, valid, 0, lambda items: [steps.append(1) or i for i in items])
    assert len(steps) == 400
    z0 = valid.sample(torch.Generator().manual_seed(3))
    with torch.no_grad():
        log_p = flow.log_prob(z0[:, None]).mean().item()
        drawn = flow.sample(300, 1, torch.Generator().manual_seed(4))[:, 0]
    components = Normal(train.mean[:, None], train.std[:, None])
    best = components.log_prob(z0).sum(-1).logsumexp(0) - math.log(len(train.mean))
    assert log_p > gaussian_of(train).log_prob(z0).mean().item() + 0.5
    assert log_p < best.mean().item() + 0.1
    torch.manual_seed(5)
    drawn = torch.stack([drawn, gaussian_of(train).sample((300,))])
    nearest = (drawn[:, :, None] - (3 + 2 * centres)).norm(dim=-1).min(-1).values
    mine, gaussian = (nearest < 1).double().mean(-1).tolist()
    assert mine > gaussian + 0.2
    again = prior.fit(train, valid, 0)
    assert all(map(torch.equal, flow.state_dict().values(), again.state_dict().values()))


def test_a_fit_whose_loss_is_not_finite_says_so(monkeypatch):
    monkeypatch.setattr(prior, "STEPS", 3)
    monkeypatch.setattr(prior, "RATE", math.inf)
    with pytest.raises(FloatingPointError, match="not finite"):
        prior.fit(some_posteriors(20, 2), some_posteriors(20, 2), 0)


# ------------------------------------------------------------------------------- in the VAE
@torch.no_grad()
def test_with_a_standard_normal_flow_the_elbo_is_that_of_the_paper():
    vae = small_vae()
    x, t = torch.randn(400, 2, 3, 2, dtype=DOUBLE), [0.0, 0.5]
    log_p, kl = vae.elbo_terms(x, t, generator=torch.Generator().manual_seed(0))
    vae.prior = prior.make(3).double()  # whose field is that of N(0, I) to itself
    same, drawn = vae.elbo_terms(x, t, generator=torch.Generator().manual_seed(0))
    assert torch.equal(log_p, same)
    error = (drawn - kl).std().item() / 20
    assert (drawn - kl).mean().item() == pytest.approx(0, abs=4 * error)
    assert error < 0.5


@torch.no_grad()
def test_the_kl_of_a_draw_is_the_difference_of_two_log_densities():
    vae = small_vae()
    vae.prior = prior.start(some_posteriors(30, 3))
    x, t = torch.randn(5, 2, 3, 2, dtype=DOUBLE), [0.0, 0.5]
    q = vae.encode(x, t)
    z0 = q.sample(torch.Generator().manual_seed(0))
    _, kl = vae.elbo_terms(x, t, generator=torch.Generator().manual_seed(0))
    wanted = Normal(*q).log_prob(z0).sum(-1) - gaussian_of(some_posteriors(30, 3)).log_prob(z0)
    assert torch.allclose(kl, wanted, rtol=1e-2)


@torch.no_grad()
def test_samples_are_decoded_from_the_prior():
    vae, seen = small_vae(), []
    vae.prior = prior.start(some_posteriors(300, 3))
    vae.decode = lambda z0, *a, **how: seen.append(z0)
    vae.sample(2000, [0.0], 4, torch.Generator().manual_seed(0))
    wanted = gaussian_of(some_posteriors(300, 3))
    assert torch.allclose(seen[0].mean(0), wanted.mean, atol=0.2)


# ------------------------------------------------------------------------------- prior.pt
def test_a_prior_belongs_to_its_encoder_whatever_happens_to_the_decoder():
    vae = small_vae()
    state = prior.as_state(prior.make(3), vae)
    prior.check(state, vae)
    with torch.no_grad():
        vae.decoder.mean.add_(1)
        vae.dynamics.network[0].weight.add_(1)
    prior.check(state, vae)
    with pytest.raises(ValueError, match="3 latent numbers, not 2"):
        prior.check(state, small_vae(2))
    for change in (vae.mean[-1].bias, vae.log_std[0].weight, vae.points[2].bias):
        with torch.no_grad():
            change.view(-1)[0] += 1e-3
        with pytest.raises(ValueError, match="other weights"):
            prior.check(state, vae)
        with torch.no_grad():
            change.view(-1)[0] -= 1e-3
    with torch.no_grad():
        vae.norms[0].running_mean.add_(1e-3)  # of batch normalisation
    with pytest.raises(ValueError, match="other weights"):
        prior.check(state, vae)
    for width in (None, 0.0, math.nan, "2"):
        with pytest.raises(ValueError, match="times their width"):
            prior.check(prior.as_state(prior.make(3), vae) | {"width": width}, vae)


@torch.no_grad()
def test_a_prior_comes_with_the_width_of_the_posteriors_that_it_was_fitted_to():
    vae = small_vae()
    x, t = torch.randn(5, 2, 3, 2, dtype=DOUBLE), [0.0, 0.5]
    before = vae.encode(x, t)
    prior.attach(prior.make(3), 2.5, vae)
    after = vae.encode(x, t)
    assert torch.equal(after.mean, before.mean)
    assert torch.allclose(after.std, 2.5 * before.std)
    assert vae.prior.mean.dtype == DOUBLE
