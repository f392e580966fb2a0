"""Models against Jacobians, closed forms, importance samples and the paper's table."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sets import (
    F32,
    F64,
    GARBAGE,
    SEEDS,
    FakeCuda,
    affine,
    attention,
    close,
    draw_mask,
    fake_cuda,
    filled,
    looking,
    network,
    one_by_one,
    same_after_copies,
    widened,
)
from torch import distributions, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import exnode
from beyond.matching import matching_loss, temporal_matching_loss
from exnode import (
    DECODERS,
    ExNODE,
    Posterior,
    SetClassifier,
    SetFlow,
    TemporalSetVAE,
    draw_noise,
)
from sets import DeepSets, Field, PointNorm, SetTransformer, keep
from solvers import Stats

RK4 = {"method": "rk4", "options": {"step_size": 0.1}}
TIGHT = {"method": "dopri5", "rtol": 1e-9, "atol": 1e-9}
BATCHES = st.sampled_from([(), (2,), (1, 2)])
ELEMENTARY = st.sampled_from(["attention", "deepsets", "concatsquash"])  # with their own traces
CLASSIFIERS = {
    "deepsets": lambda: SetClassifier(2, 3, "deepsets"),
    "attention": lambda: SetClassifier(2, 3, "attention"),
    "DeepSets": lambda: DeepSets(2, 3, 8),
    "SetTransformer": lambda: SetTransformer(2, 3, 8, 2, inducing=3),
}
all_classifiers = pytest.mark.parametrize("name", CLASSIFIERS)
all_traces = pytest.mark.parametrize("trace", ["exact", "hutchinson"])


def make_flow(seed=0, dim=2, blocks=2, field="attention", scale=2.0, **how):
    """A flow in float64 that bends: its blocks differ, and their fields are far from linear."""
    torch.manual_seed(seed)
    flow = SetFlow(dim, blocks, (8, 8), 2, field, **{"gradient": "backprop", **RK4, **how}).double()
    with torch.no_grad():
        for p in flow.parameters():
            p.mul_(scale)
    return looking(flow)


def make_vae(seed=0, dim=2, latent=3, **how):
    torch.manual_seed(seed)
    how = {"hidden": (8, 8), "heads": 2, "trace": "exact", "gradient": "backprop", **RK4, **how}
    return looking(TemporalSetVAE(dim, latent, **how).double().eval())


def series(batch=2, n=4, dim=2, ts=(0.1, 0.5, 0.6)):
    t = torch.tensor(ts, dtype=F64)
    return torch.randn(batch, len(t), n, dim, dtype=F64), t


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class By(Field):
    """A field from a formula f(t, x, context), without parameters that matter."""

    def __init__(self, dim, f, trace=None, context=0):
        super().__init__(dim, True, context)
        self.f, self.trace, self.weight = f, trace, nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, t, x, mask=None, context=None):
        return self.f(t, x, context)

    def value_and_trace(self, t, x, mask=None, context=None):
        return self(t, x, mask, context), x.new_full(x.shape[:-2], self.trace)


def by_hand(*fields, dim=1, t1=0.5, **how):
    """A flow whose blocks have the given fields."""
    flow = SetFlow(dim, len(fields), 8, 2, t1=t1, trace="exact", **{**RK4, **how}).double()
    for block, field in zip(flow.blocks, fields):
        block.field = field
    return flow


# ----------------------------------------------------------------------------- ExNODE, classifiers


@all_classifiers
@settings(max_examples=6)
@given(SEEDS, st.integers(1, 6), GARBAGE)
def test_a_padded_set_has_the_logits_of_its_points(name, seed, n, value):
    torch.manual_seed(seed)
    model, x = CLASSIFIERS[name]().double().eval(), torch.randn(3, n, 2, dtype=F64)
    mask = draw_mask((3, n))
    logits = model(filled(x, mask, value), mask)
    for (i,), here in one_by_one(mask):
        close(model(x[i : i + 1, here]), logits[i : i + 1])


@all_classifiers
@pytest.mark.parametrize("batch", [(), (2, 3), (2, 128)])
def test_classifier_takes_any_axes_of_batch(name, batch):
    model, x = CLASSIFIERS[name]().double().eval(), torch.randn(*batch, 4, 2, dtype=F64)
    with torch.no_grad():
        for part in model.modules():  # each channel its own statistics
            if isinstance(part, nn.BatchNorm1d):
                part.running_mean.normal_()
        close(model(x), model(x.view(-1, 4, 2)).view(*batch, 3))


@all_classifiers
def test_padding_changes_neither_training_nor_gradients_of_a_classifier(name):
    model, x, mask = (
        CLASSIFIERS[name]().double(),
        torch.randn(4, 5, 2, dtype=F64),
        draw_mask((4, 5)),
    )
    mask[0], found = True, []
    for part in model.modules():
        part.p = 0.0  # no dropout
    contents = [(filled(x, mask, value), mask) for value in (1.0, 1e30, math.nan)]
    for content, here in (*contents, widened(x, mask)):
        content = content.clone().requires_grad_()
        loss = model(content, here).square().sum()
        grads = torch.autograd.grad(loss, [content, *model.parameters()])
        assert not grads[0][~here].any()
        found.append((loss, grads[0][here], grads[1:]))
    close(found[1:], [found[0]] * 3, 1e-8)


# ---------------------------------------------------------- Table 3, written out from the weights


def uneven(model):
    """Every bias, weight and statistic of batch normalisation its own, so that each one counts."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                for x in (part.weight, part.running_var):
                    x.uniform_(0.5, 2.0)
                for x in (part.bias, part.running_mean):
                    x.normal_()
    return model.double().eval()


def bn(norm, x):
    scaled = (x - norm.running_mean) / (norm.running_var + 1e-5).sqrt()
    return scaled * norm.weight + norm.bias


def rk4_step(f, x, h):
    k1 = f(0.0, x)
    k2 = f(h / 2, x + h / 2 * k1)
    k3 = f(h / 2, x + h / 2 * k2)
    k4 = f(h, x + h * k3)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def deepsets_field(field):
    """f(x) = FC(h − max h)."""

    def f(t, x):
        h = network(field.network, x)
        return affine(field.out, h - h.amax(-2, keepdim=True))

    return f


def attention_field(field):
    """f(x) = FC(tanh(q + softmax(q kᵀ / √h) v)), in four heads."""

    def f(t, x):
        q, k, v = (network(net, x) for net in (field.q, field.k, field.v))
        return affine(field.out, torch.tanh(q + attention(q, k, v, 4)))

    return f


FORMULAS = {"deepsets": deepsets_field, "attention": attention_field}


@pytest.mark.parametrize("name", FORMULAS)
def test_classifier_is_the_paper_s_formula(name):
    model, x = uneven(SetClassifier(3, 5, name)), torch.randn(2, 4, 3, dtype=F64)
    h = x
    for layer, norm in zip(model.expand, model.norms):
        h = bn(norm, affine(layer, h)).tanh()
    v = rk4_step(FORMULAS[name](model.block.field), h, 1.0).amax(-2)
    first, norm, _, last = model.head
    close(model(x), affine(last, bn(norm, affine(first, v)).tanh()))


def test_set_flow_is_the_paper_s_chain_of_attention_blocks():
    torch.manual_seed(0)
    flow, x = SetFlow(2, trace="exact", method="rk4").double(), torch.randn(3, 4, 2, dtype=F64)
    flow.mean.fill_(0.3), flow.std.copy_(torch.tensor([0.8, 1.7]))

    def chain(x):
        z = (x - 0.3) / flow.std
        for block in flow.blocks:
            z = rk4_step(attention_field(block.field), z, 0.5)
        return z

    close(flow.encode(x), chain(x))
    for one, log_p in zip(x, flow.log_prob(x)):
        jacobian = torch.autograd.functional.jacobian(chain, one).view(8, 8)
        base = distributions.Normal(0.0, 1.0).log_prob(chain(one)).sum()
        close(log_p, base + jacobian.slogdet()[1], 1e-5)


def gru(rnn, h, x):
    """Cho et al. (2014), as torch has its gates."""
    (a, b, c), (d, e, f) = (
        (x @ w.T + bias).chunk(3, -1)
        for x, w, bias in (
            (x, rnn.weight_ih_l0, rnn.bias_ih_l0),
            (h, rnn.weight_hh_l0, rnn.bias_hh_l0),
        )
    )
    r, z = (a + d).sigmoid(), (b + e).sigmoid()
    return (1 - z) * (c + r * f).tanh() + z * h


def test_temporal_encoder_is_the_paper_s_formula():
    vae, (x, t) = uneven(TemporalSetVAE(2, 3, t0=-0.2)), series()
    h = x
    for i, (layer, norm) in enumerate(zip(vae.points, vae.norms)):
        h = bn(norm, affine(layer, h))
        h = h.relu() if i < 3 else h.amax(-2)  # after the last BN comes the maximum
    state = torch.zeros(2, 512, dtype=F64)
    for i, before in ((2, t[1]), (1, t[0]), (0, torch.tensor(-0.2))):
        gap = (t[i] - before).expand(2, 1)
        state = gru(vae.rnn, state, torch.cat([h[:, i], gap], -1))
    readouts = []
    for readout in (vae.mean, vae.log_std):
        a, norm, _, b, norm2, _, c = readout
        readouts.append(affine(c, bn(norm2, affine(b, bn(norm, affine(a, state)).relu())).relu()))
    close(vae.encode(x, t), Posterior(readouts[0], readouts[1].exp()))


def test_latent_ode_and_concat_squash_decoder_are_the_paper_s_formulas():
    vae, z0 = (
        uneven(TemporalSetVAE(2, 3, method="rk4", trace="exact")),
        torch.randn(2, 3, dtype=F64),
    )
    layers = [layer for layer in vae.dynamics.network if isinstance(layer, nn.Linear)]

    def latent(t, z):
        return affine(layers[2], affine(layers[1], affine(layers[0], z).tanh()).tanh())

    z = torch.stack([rk4_step(latent, z0, -0.3), z0, rk4_step(latent, z0, 0.4)], 1)
    close(vae.latents(z0, [-0.3, 0.0, 0.4]), z)

    def squash(s, x):  # (W x + b) σ(W_g (t, z) + b_g) + W_s (t, z), tanh between
        tz = torch.cat([torch.full((2, 3, 1), s, dtype=F64), z], -1)[..., None, :]
        for i, layer in enumerate(vae.decoder.blocks[0].field.layers):
            x = affine(layer.linear, x.tanh() if i else x) * affine(layer.gate, tz).sigmoid()
            x = x + tz @ layer.shift.weight.T
        return x

    x = torch.randn(2, 3, 4, 2, dtype=F64)
    close(vae.decoder.encode(x, context=z), rk4_step(squash, x, 1.0))


# -------------------------------------------------------------------------------------- likelihoods


@settings(max_examples=8)
@given(SEEDS, ELEMENTARY, st.integers(1, 3), st.integers(1, 2), BATCHES, st.booleans())
def test_likelihood_is_base_density_plus_log_determinant(seed, field, n, dim, batch, masked):
    how = {"trace": "exact", "context": 2, "time": True, "options": {"step_size": 0.17}}
    flow = make_flow(seed, dim, field=field, scale=1.0, **how)
    x, z = torch.randn(*batch, n, dim, dtype=F64), torch.randn(*batch, 2, dtype=F64)
    mask = draw_mask(x.shape[:-1]) if masked else None
    log_prob = flow.log_prob(x, mask, z)
    here = torch.ones(x.shape[:-1]).bool() if mask is None else mask
    for i, points in one_by_one(here) if batch else [((), here)]:
        alone, encode = x[i][points], partial(flow.encode, context=z[i])
        jacobian = torch.autograd.functional.jacobian(encode, alone).view(alone.numel(), -1)
        base = distributions.Normal(0, 1).log_prob(encode(alone)).sum()
        close(log_prob[i], base + torch.linalg.slogdet(jacobian)[1], 1e-4)
    probes = math.sqrt(n * dim) * basis(x)
    close(flow.log_prob(x, mask, z, noise=probes), log_prob, 1e-8)


def basis(x):
    """The n·d unit vectors of every set: as probes, times √(n d), their mean eᵀJe is tr J."""
    n, d = x.shape[-2:]
    e = torch.eye(n * d, dtype=F64).view(n * d, *[1] * (x.dim() - 2), n, d)
    return e.expand(n * d, *x.shape)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_hutchinson_is_unbiased_with_noise_that_is_fixed_within_a_solve_and_kept_nowhere(kind):
    flow = make_flow(trace="hutchinson", noise=kind, method="rk4", options=None)
    x = torch.randn(3, 2, dtype=F64).expand(4000, 3, 2)
    found = flow.log_prob(x, generator=seeded())
    exact = flow.log_prob(x[:1], noise=math.sqrt(6) * basis(x[:1]))
    assert 0.01 < found.std() < 10
    assert (found.mean() - exact).abs() < 4 * found.std() / math.sqrt(4000)
    e = draw_noise(x, 1, kind, seeded())
    assert e.square().mean().sub(1).abs() < 0.05
    assert (e.abs().sub(1).abs().max() < 1e-12) == (kind == "rademacher")
    close(flow.log_prob(x, noise=e), found, 0)
    flow.probes = 16
    many = flow.log_prob(x[:500], generator=seeded(1))
    assert 3 < found.std() / many.std() < 5  # √16 = 4
    x = x[:1].clone().requires_grad_()
    first = flow.log_prob(x, generator=seeded())
    flow.log_prob(x, generator=seeded(1))
    again = flow.log_prob(x, generator=seeded())
    close(*(torch.autograd.grad(value.sum(), x)[0] for value in (first, again)), 0)


@pytest.mark.parametrize("field", ["attention", "deepsets", "concatsquash"])
@pytest.mark.parametrize("n", [1, 2])
def test_density_integrates_to_one(field, n):
    flow = make_flow(dim=1, field=field, scale=1.5, trace="exact")
    axis = torch.linspace(-9, 9, 121, dtype=F64)
    x = torch.cartesian_prod(*[axis] * n).view(-1, n, 1)
    with torch.no_grad():
        density = flow.log_prob(x).exp() * (axis[1] - axis[0]) ** n
    assert density.max() > 1e-4
    assert density.sum().item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("how", [RK4, {**TIGHT, "rtol": 1e-7, "atol": 1e-7}])
@all_traces
def test_three_gradients_of_the_likelihood_agree(how, trace):
    flow = make_flow(trace=trace, context=2, time=True, **{"options": None, **how})
    x, z = torch.randn(3, 4, 2, dtype=F64, requires_grad=True), torch.randn(3, 2, dtype=F64)
    mask, found = draw_mask((3, 4)), {}
    for gradient in ("backprop", "checkpoint", "adjoint"):
        for block in flow.blocks:
            block.gradient = gradient
        context = z.clone().requires_grad_()
        loss = flow.log_prob(x, mask, context, generator=seeded()).sum()
        found[gradient] = torch.autograd.grad(loss, [x, context, *flow.parameters()])
    assert not found["backprop"][0][~mask].any()
    close(found["checkpoint"], found["backprop"], 1e-9)
    close(found["adjoint"], found["backprop"], 1e-3 if how is RK4 else 1e-4)


@settings(max_examples=4)
@given(SEEDS, GARBAGE, st.sampled_from([RK4, {**TIGHT, "rtol": 1e-7, "atol": 1e-7}]))
def test_padding_changes_neither_the_likelihood_nor_its_gradients(seed, value, how):
    flow = make_flow(seed, scale=1.0, trace="exact", **{"options": None, **how})
    x, mask, found = torch.randn(3, 4, 2, dtype=F64), draw_mask((3, 4)), []
    for content in (x, filled(x, mask, value)):
        content.requires_grad_()
        log_prob = flow.log_prob(content, mask)
        grads = torch.autograd.grad(log_prob.sum(), [content, *flow.parameters()])
        assert not grads[0][~mask].any()
        found.append((log_prob, grads))
    close(found[1], found[0], 1e-12 if how is RK4 else 1e-5)
    for i, here in one_by_one(mask):
        close(flow.log_prob(x[i][here]), log_prob[i], 1e-10 if how is RK4 else 1e-5)


def test_samples_have_the_density_of_the_model_for_any_number_of_points():
    rates = [(0.4, -0.9), (-0.7, 0.5)]  # ẋ = a x + b mean(x), and over all blocks t₁ Σ
    n, sets, t1 = 3, 4000, 0.5
    a, ab = (t1 * sum(rate) for rate in zip(*[(a, a + b) for a, b in rates]))

    def field(n, a, b):
        return By(1, lambda t, x, z: a * x + b * x.mean(-2, keepdim=True), trace=n * a + b)

    for points in (n, 5):
        flow = by_hand(*(field(points, *rate) for rate in rates), t1=t1)
        mean = torch.full((points, points), 1 / points, dtype=F64)
        shrink = math.exp(-a) * (torch.eye(points) - mean) + math.exp(-ab) * mean  # x = shrink z
        x = flow.sample(sets, points, seeded())
        assert x.shape == (sets, points, 1)
        gaussian = distributions.MultivariateNormal(
            torch.zeros(points, dtype=F64), shrink @ shrink.T
        )
        close(flow.log_prob(x), gaussian.log_prob(x[..., 0]), 1e-6)
        parts = (
            (x.mean(-2), math.exp(-ab) / math.sqrt(points)),
            (x[:, 0] - x.mean(-2), math.exp(-a) * math.sqrt(1 - 1 / points)),
        )
        for part, std in parts:
            assert abs(part.mean()) < 5 * std / math.sqrt(sets)
            assert abs(part.var() / std**2 - 1) < 5 * math.sqrt(2 / sets)


@pytest.mark.parametrize("context", [None, torch.randn(5, 2, dtype=F64)])
@pytest.mark.parametrize("masked", [False, True])
def test_sampling_in_pieces_gives_the_same_sets_and_shows_progress(context, masked, monkeypatch):
    flow, seen = make_flow(context=0 if context is None else 2), []
    mask = draw_mask((5, 9)) if masked else None
    whole = flow.sample(5, 9, seeded(), context, mask)
    z = keep(exnode.normal((5, 9, 2), flow.mean, seeded()), mask)
    close(whole, flow.decode(z, mask, context))

    def progress(pieces):
        seen.append([len(z) for z, *_ in pieces])
        return pieces

    monkeypatch.setattr(exnode, "PIECE", 20)
    close(flow.sample(5, 9, seeded(), context, mask, progress=progress), whole)
    assert seen == [[2, 2, 1]]


def test_sampling_computes_no_trace_and_costs_are_counted():
    flow, stats = make_flow(trace="exact", method="rk4", options=None), Stats()
    for block in flow.blocks:
        block.field.value_and_trace = block.field.value_and_jvp = None
    x = flow.sample(2, 7, seeded())
    assert not x.requires_grad
    close(flow.sample(2, 7, seeded()), x, 0)
    flow.encode(x, stats=stats)
    flow.decode(x, stats=stats)
    assert stats.nfe == 2 * 2 * 4


def test_a_flow_in_units_of_its_data_is_the_same_flow_of_scaled_data():
    mask = draw_mask((6, 4))
    x = filled(torch.randn(6, 4, 2, dtype=F64) * torch.tensor([0.1, 3.0]) + 5, mask, 9.0)
    flow = make_flow(trace="exact")
    plain = copy.deepcopy(flow)
    flow.standardise(x, mask)
    y = flow.to_units(x, mask)
    close(y[mask].mean(0), torch.zeros(2, dtype=F64), 1e-9)
    close(y[mask].square().mean(0), torch.ones(2, dtype=F64), 1e-9)
    change = mask.sum(-1) * flow.std.log().sum()
    close(flow.log_prob(x, mask), plain.log_prob(y, mask) - change, 1e-9)
    close(flow.encode(x, mask), plain.encode(y, mask), 1e-9)
    close(flow.decode(flow.encode(x, mask), mask), x, 1e-4)
    plain.standardise(x.view(2, 3, 4, 2))  # without a mask, all points count
    close((plain.mean, plain.std), (x.view(-1, 2).mean(0), x.view(-1, 2).std(0, correction=0)))


# -------------------------------------------------------------------------------- sets over time


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=3)
@given(SEEDS, st.integers(1, 4), GARBAGE)
def test_padding_changes_neither_posterior_nor_elbo(decoder, seed, n, value):
    vae, (x, t), found = make_vae(seed, decoder=decoder), series(n=n), []
    mask = draw_mask(x.shape[:-1])
    for content, here in ((x, mask), (filled(x, mask, value), mask), widened(x, mask)):
        content = content.clone().requires_grad_()
        trained = vae.train().encode(content, t, here)
        elbo = vae.eval().elbo(content, t, here, seeded())
        found.append((trained, elbo))
        assert not torch.autograd.grad(elbo.sum(), content)[0][~here].any()
        vae.load_state_dict(make_vae(seed, decoder=decoder).state_dict())  # as before training
    close(found[1:], [found[0]] * 2, 1e-8)


@settings(max_examples=5)
@given(SEEDS, st.booleans())
def test_elbo_is_the_sum_of_log_likelihoods_minus_one_kl(seed, masked):
    vae, (x, t) = make_vae(seed), series()
    mask = draw_mask(x.shape[:-1]) if masked else None
    q = vae.encode(x, t, mask)
    normal = distributions.Normal(q.mean, q.std)
    kl = distributions.kl_divergence(normal, distributions.Normal(0.0, 1.0)).sum(-1)
    close(q.kl(), kl)
    z0 = q.sample(seeded())
    likelihood = [
        vae.decoder.log_prob(
            x[:, i], None if mask is None else mask[:, i], vae.latents(z0, t)[:, i]
        )
        for i in range(3)
    ]
    close(vae.elbo(x, t, mask, seeded()), sum(likelihood) - kl)
    close(vae.elbo_terms(x, t, mask, seeded()), (sum(likelihood), kl))


def test_data_without_spread_along_an_axis_have_no_units():
    flat = torch.rand(4, 5, 2) * torch.tensor([1.0, 0.0])
    for x in (flat, torch.rand(1, 1, 2), torch.full((2, 3, 2), math.nan)):
        with pytest.raises(ValueError, match="vary along every axis"):
            SetFlow(2, 1, (8, 8)).standardise(x)


def test_elbo_is_a_lower_bound_that_importance_weights_close():
    vae, (x, t), normal = (
        make_vae(latent=1, dim=1),
        series(1, 2, 1, (0.0, 1.0)),
        distributions.Normal,
    )
    x, samples = x.expand(2000, -1, -1, -1), 2000
    with torch.no_grad():
        vae.mean[-1].bias.fill_(1.0)
        vae.log_std[-1].bias.fill_(-0.7)
        q, elbo, grid = (
            vae.encode(x, t),
            vae.elbo(x, t, generator=seeded()),
            torch.arange(-8, 8, 0.02),
        )
        z0 = torch.cat([q.sample(seeded(1)), grid[:, None].to(F64)])
        given = vae.decoder.log_prob(x[:1].expand(len(z0), -1, -1, -1), context=vae.latents(z0, t))
        joint = given.sum(-1) + normal(0, 1).log_prob(z0[:, 0])
        log_w = joint[:samples] - normal(*q).log_prob(z0[:samples])[:, 0]
        exact = joint[samples:].logsumexp(0) + math.log(0.02)  # by quadrature over the prior
    error = 4 * (elbo.std() + log_w.std()) / math.sqrt(samples)
    assert error < 0.3 * q.kl()[0]
    assert abs(elbo.mean() - log_w.mean()) < error
    assert elbo.mean() < exact - error
    assert abs(log_w.logsumexp(0) - math.log(samples) - exact) < 0.1


def linear_dynamics(vae, rates):
    vae.dynamics.network = nn.Linear(len(rates), len(rates), bias=False).double()
    vae.dynamics.network.weight.data = rates


@settings(max_examples=10)
@given(SEEDS, st.sets(st.sampled_from([-0.7, -0.2, 0.0, 0.25, 0.4, 0.9, 1.3]), min_size=1))
def test_latents_follow_the_ode_before_at_and_after_t0_on_any_grid(seed, ts):
    vae, t = (
        make_vae(seed, t0=0.25, method="dopri5", rtol=1e-8, atol=1e-8, options=None),
        sorted(ts),
    )
    z0, rates = torch.randn(2, 3, dtype=F64), torch.randn(3, 3, dtype=F64)
    t = torch.tensor(t, dtype=F64)
    finer = torch.cat([t, t + 0.01, torch.tensor([-1.0, 2.0])]).sort().values
    close(vae.latents(z0, finer)[:, torch.isin(finer, t)], vae.latents(z0, t), 1e-6)
    linear_dynamics(vae, rates)
    flows = torch.matrix_exp((t - 0.25)[:, None, None] * rates)
    close(vae.latents(z0, t), torch.einsum("tij,bj->bti", flows, z0), 1e-5)


@settings(max_examples=8)
@given(SEEDS, st.booleans())
def test_series_with_their_own_times_and_missing_sets_are_as_each_by_itself(seed, ragged):
    vae, t = make_vae(seed, t0=0.2), torch.rand(3, 4, dtype=F64).sort(-1).values
    x, mask = torch.randn(3, 4, 5, 2, dtype=F64), None
    seen = torch.ones(3, 4, dtype=torch.bool)
    if ragged:
        seen, mask = draw_mask((3, 4)), draw_mask((3, 4, 5))
        mask = mask & seen[..., None]
        x = filled(x, mask, 1e30)
    x.requires_grad_()
    posterior, z = vae.encode(x, t, mask), vae.latents(z0 := torch.randn(3, 3, dtype=F64), t)
    log_prob, kl = vae.elbo_terms(x, t, mask, seeded())
    if ragged:
        assert not torch.autograd.grad((log_prob - kl).sum(), x)[0][~mask].any()
    draws = posterior.sample(seeded())
    for i, here in enumerate(seen):
        own, times = (x[i : i + 1, here], t[i, here]), t[i]
        there = None if mask is None else mask[i : i + 1, here]
        alone = vae.encode(*own, there)
        close((posterior.mean[i], posterior.std[i]), (alone.mean[0], alone.std[0]))
        close(z[i], vae.latents(z0[i : i + 1], times)[0], 1e-5)
        given = vae.latents(draws[i : i + 1], own[1])
        close(log_prob[i], vae.decoder.log_prob(own[0], there, given).sum(), 1e-4)
        close(kl[i], alone.kl()[0])
    made = vae.decode(z0, t, 5, seeded(), continuous=True)
    y = torch.randn(3, 1, 5, 2, dtype=F64, generator=seeded()).expand(3, 4, 5, 2)
    close(made, vae.decoder.decode(y, context=z))


def test_arrays_lists_and_other_precisions_are_read_as_the_model_s_own():
    x, t = series(ts=(0.0, 0.5, 1.0))
    mask, vae = draw_mask(x.shape[:-1]), make_vae().float()
    flow, classifier = make_flow(context=2).float(), SetClassifier(2, 3).eval()
    single, z = x.float(), torch.ones(2, 3, 2)
    for kind in (lambda a: a.numpy(), lambda a: a.tolist(), lambda a: a.double()):
        close(flow.encode(kind(x), mask, z.double()), flow.encode(single, mask, z), 1e-6)
        close(flow.decode(kind(x), context=kind(z)), flow.decode(single, context=z), 1e-6)
        how = {"noise": torch.ones(1, *x.shape)}
        close(flow.log_prob(kind(x), None, kind(z), **how), flow.log_prob(single, None, z, **how))
        close(classifier(kind(x)), classifier(single))
        how = {"mask": mask, "generator": seeded()}
        close(vae.elbo(kind(x), kind(t), mask, seeded()), vae.elbo(single, t, mask, seeded()))
        close(vae.reconstruct(kind(x), t.tolist(), **how).shape, x.shape)
        how = {"context": kind(z[:, 0]), "mask": mask[:, 0].tolist(), "generator": seeded()}
        wanted = flow.sample(2, 4, seeded(), z[:, 0], mask[:, 0])
        close(flow.sample(2, 4, **how), wanted, 1e-6)
    close(classifier(x.numpy(), mask.numpy()), classifier(single, mask))
    close(classifier(x.long()), classifier(single.long().float()))
    z0, how = torch.randn(2, 3), {"points": 4, "generator": seeded()}
    made = vae.decode(z0, t, mask=mask.tolist(), **how)
    close(made, vae.decode(z0, t, 4, seeded(), mask=mask), 1e-6)
    block = make_flow().blocks[0]
    close(block(x.numpy()), block(x))


def test_another_trace_or_solver_holds_for_one_call_only():
    flow, x = make_flow(trace="hutchinson"), torch.randn(3, 4, 2, dtype=F64)
    state, stats = copy.deepcopy(flow.__dict__["_buffers"]), Stats()
    exact = flow.log_prob(x, noise=math.sqrt(8) * basis(x))
    close(flow.log_prob(x, trace="exact"), exact, 1e-8)
    assert (flow.log_prob(x) - exact).abs().max() > 1e-3
    few, many = (flow.log_prob(x, probes=p, generator=seeded()) for p in (1, 400))
    assert (many - exact).abs().max() < (few - exact).abs().max()
    one = {"method": "euler", "options": {"step_size": 0.5}}
    flow.log_prob(x, solver=one, stats=stats)
    flow.decode(flow.encode(x, solver=one, stats=stats), solver=one, stats=stats)
    flow.sample(2, 3, solver=one)
    assert stats.nfe == 6
    assert (flow.encode(x, solver=one) - flow.encode(x)).abs().max() > 1e-3
    vae, (x, t) = make_vae(trace="hutchinson"), series()
    terms = vae.elbo_terms(x, t, None, seeded(), trace="exact", solver=one)
    z = vae.latents(vae.encode(x, t).sample(seeded()), t, one)
    close(terms[0], vae.decoder.log_prob(x, None, z, trace="exact", solver=one).sum(-1))
    close(vae.elbo(x, t, None, seeded(), trace="exact", solver=one), terms[0] - terms[1])
    assert (flow.trace, vae.decoder.trace, vae.solver["method"]) == ("hutchinson",) * 2 + ("rk4",)
    close(flow.__dict__["_buffers"], state, 0)


def test_sets_are_decoded_from_the_latent_of_their_time():
    vae, (x, t) = make_vae(latent=2), series(ts=(-0.3, 0.0, 0.8))
    shift = By(2, lambda s, x, z: -z[..., None, :].expand_as(x), context=2)  # x = y + z_t
    vae.decoder.blocks[0].field, z0 = shift, torch.randn(2, 2, dtype=F64)
    sets = vae.decode(z0, t, 4000, seeded())
    assert sets.shape == (2, 3, 4000, 2)
    assert (sets.mean(-2) - vae.latents(z0, t)).abs().max() < 5 / math.sqrt(4000)
    assert (sets.var(-2) - 1).abs().max() < 5 * math.sqrt(2 / 4000)
    mean, out = vae.encode(x, t).mean, torch.tensor([0.1, 2.0], dtype=F64)
    close(vae.reconstruct(x, t, out, 7, generator=seeded()), vae.decode(mean, out, 7, seeded()), 0)
    assert vae.reconstruct(x, t).shape == x.shape
    assert vae.reconstruct(x[:1], t).shape == x[:1].shape
    series_of_prior = vae.sample(4000, t[1:2], 3, seeded())
    assert series_of_prior.shape == (4000, 1, 3, 2)
    assert (series_of_prior.var((0, 1)) - 2).abs().max() < 5 * 2 * math.sqrt(2 / 4000)


def test_points_are_independent_given_z_unless_the_decoder_attends():
    for decoder, coupled in zip(DECODERS, (False, True, True)):
        flow, x = make_vae(decoder=decoder).decoder, torch.randn(1, 3, 2, dtype=F64)
        z = torch.randn(1, 3, dtype=F64)
        together, alone = flow.encode(x, context=z)[:, :1], flow.encode(x[:, :1], context=z)
        assert torch.allclose(together, alone) != coupled


# ------------------------------------------------------------------------------ the paper's sizes


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (partial(SetClassifier, 3, 40), 581_416),
        (partial(SetClassifier, 3, 40, "attention"), 516_392),
        (partial(SetFlow, 2), 1_205_784),
    ],
)
def test_number_of_parameters(model, size):
    assert sum(p.numel() for p in model().parameters()) == size


def test_one_width_stands_for_two_layers():
    for field in ("attention", "deepsets", "transformer"):
        one, two = (SetFlow(2, 1, hidden, field=field).state_dict() for hidden in (16, (16, 16)))
        assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in two.items()}
    assert len(SetFlow(2, 1, (16,), field="transformer").blocks[0].field.layers) == 1


def linears(module):
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]


def test_temporal_model_has_the_layers_of_the_papers_table():
    vae = TemporalSetVAE()
    assert linears(vae.points) == [(2, 128), (128, 128), (128, 256), (256, 512)]
    assert [norm.num_features for norm in vae.norms] == [128, 128, 256, 512]
    assert (vae.rnn.input_size, vae.rnn.hidden_size, vae.rnn.num_layers) == (513, 512, 1)
    for readout in (vae.mean, vae.log_std):
        kinds = [nn.Linear, PointNorm, nn.ReLU] * 2 + [nn.Linear]
        assert [type(layer) for layer in readout] == kinds
        assert linears(readout) == [(512, 256), (256, 128), (128, 128)]
    assert vae.log_std[-1].bias.eq(-2).all()  # a narrow posterior to begin with
    assert vae.mean[-1].bias.abs().max() < 0.1
    assert linears(vae.dynamics) == [(128, 256), (256, 256), (256, 128)]
    sizes = [(2, 512), (512, 512), (512, 512), (512, 2)]
    assert linears(vae.decoder) == [s for a, b in sizes for s in ((a, b), (129, b), (129, b))]
    block, flow = vae.decoder.blocks[0], SetFlow(2)
    assert (len(vae.decoder.blocks), block.t1, block.gradient) == (1, 1.0, "adjoint")
    assert block.solver == {"method": "dopri5", "rtol": 1e-3, "atol": 1e-4, "options": None}
    assert (len(flow.blocks), flow.blocks[0].t1, flow.trace) == (12, 0.5, "hutchinson")
    assert (flow.probes, flow.noise, vae.t0) == (1, "rademacher", 0)
    settings = {"method": "dopri5", "rtol": 1e-5, "atol": 1e-5, "options": None}
    assert flow.blocks[0].solver == settings


# ------------------------------------------------------------------ devices, precisions, copies

ONE_STEP = {"method": "rk4", "hidden": (8, 8), "heads": 2}
FLOWS = {
    **{
        f: partial(SetFlow, 2, 1, field=f, **ONE_STEP)
        for f in ("attention", "deepsets", "transformer")
    },
    "exact": partial(SetFlow, 2, 1, trace="exact", **ONE_STEP),
}


def run_flow(flow, x, t, mask):
    z = flow.encode(x, mask)
    outputs = flow.log_prob(x, mask), z, flow.decode(z, mask), flow.sample(2, 3)
    if mask is None:
        return outputs
    losses = matching_loss(flow, x, coupling="none", spare=x[:, :3]), matching_loss(flow, x, mask)
    return *outputs, *losses


def run_vae(vae, x, t, mask):
    parts = *vae.encode(x, t, mask), *vae.elbo_terms(x, t), *temporal_matching_loss(vae, x, t)
    return *parts, vae.elbo(x, t), vae.sample(2, t, 3), vae.reconstruct(x, t, 1 + t, 5)


MODULES = {
    **{
        name: (make, lambda model, x, t, mask: (model(x, mask), model(x)))
        for name, make in CLASSIFIERS.items()
    },
    **{name: (make, run_flow) for name, make in FLOWS.items()},
    "vae": (partial(TemporalSetVAE, 2, 3, **ONE_STEP), run_vae),
    "vae-attention": (partial(TemporalSetVAE, 2, 3, "attention", **ONE_STEP), run_vae),
}


@pytest.mark.parametrize("name", MODULES)
def test_models_run_on_a_gpu_without_waiting_for_it_and_never_mix_devices(name):
    (make, run), shape = MODULES[name], (2, 3, 4) if "vae" in name else (2, 4)
    model, t, on_host = make(), torch.tensor([0.0, 0.5, 1.0]), torch.ones(*shape, 2)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), FakeCuda():
        mask = torch.ones(shape, device="cuda") > 0
        x = torch.ones(*shape, 2, device="cuda")
        for out in run(fake_cuda(model), x, t, mask):
            assert (out.device.type, out.dtype) == ("cuda", F32)
        with pytest.raises(RuntimeError, match="device"):
            run(model, on_host, t, None)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_precision_stays_and_copies_and_saved_states_give_the_same(name, dtype):
    (make, run), shape = MODULES[name], (2, 3, 4) if "vae" in name else (2, 4)
    x, mask = torch.randn(*shape, 2, dtype=dtype), draw_mask(shape)

    def outputs(model):
        torch.manual_seed(3)
        return run(model, x, torch.tensor([0.1, 0.5, 1.0], dtype=F64), mask)

    model = make().to(dtype).eval()
    assert {out.dtype for out in outputs(model)} == {dtype}
    same_after_copies(model, outputs)


# -------------------------------------------------------------------------------------- bad input

X, M, T = torch.ones(2, 3, 2), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0.0, 0.5, 1.0])
SMALL = {"hidden": (8, 8), "heads": 2, "blocks": 2}
SETS = [
    ((torch.ones(2, 3, 4),), r"x must be .*2\).*\(2, 3, 4\)"),
    ((torch.ones(2),), r"x must be .*\(2,\)"),
    ((torch.ones(2, 0, 2),), r"at least one point.*\(2, 0, 2\)"),
    ((X, M[:, :2]), r"mask must be .*\(2, 3\).*\(2, 2\)"),
    ((X, M.int()), "mask must be bool.*int32"),
    ((X, M & torch.tensor([[True], [False]])), "mask must leave every set at least one point"),
    ((X * math.nan,), "x must be finite"),
    ((X / 0,), "x must be finite"),
]


def test_a_series_that_ended_may_repeat_its_last_time_and_has_no_sets_there():
    vae, (x, _) = make_vae(decoder="attention"), series()
    t = torch.tensor([[0, 0.5, 1], [0.2, 0.7, 0.7]], dtype=F64)
    mask = torch.ones(x.shape[:-1], dtype=bool)
    mask[0, 1, 2:] = mask[1, 2] = False
    z0 = vae.encode(x, t, mask).mean
    close(z0[1:], vae.encode(x[1:, :2], t[1:, :2]).mean)
    made = vae.decode(z0, t, 4, seeded(), mask=mask)
    y, z = exnode.normal(x.shape, x, seeded()), vae.latents(z0, t)
    close(made[0, 0], vae.decoder.decode(y[0, 0], None, z[0, 0]))
    close(made[0, 1, :2], vae.decoder.decode(y[0, 1, :2], None, z[0, 1]))
    assert not made[~mask].any()
    for call in (lambda: vae.elbo(x, t), lambda: vae.decode(z0, t, 4)):
        with pytest.raises(ValueError, match="increasing"):
            call()


def flow_call(method, *args, how=None, **kwargs):
    return lambda: getattr(SetFlow(2, **{**SMALL, **kwargs}), method)(*args, **(how or {}))


def vae_call(method, *args, **how):
    return lambda: getattr(TemporalSetVAE(2, 3, hidden=8, heads=2), method)(*args, **how)


S = torch.ones(2, 3, 4, 2)
TIMES = [
    (torch.tensor([0, 1, 0.5]), r"t must .*increasing.*0.5\]"),
    (torch.tensor([0, 0.5, 0.5]), r"t must .*increasing.*0.5\]"),
    (torch.tensor([[0.0, 1, 2], [0, 3, 2]]), r"t must .*increasing.*3.0, 2.0\]"),
    (torch.tensor([0, 1, math.nan]), "t must be finite.*nan"),
    (torch.tensor([0, 1, math.inf]), "t must be finite.*inf"),
    (T.expand(3, 3), r"t must be times \(T,\) or \(2, T\), not \(3, 3\)"),
    (T[0], r"t must be times"),
    (torch.tensor([]), "t must be times"),
    (["now"], "t must be a tensor or an array of numbers"),
]
SETTINGS = {"blocks": 0, "probes": 0, "heads": 3, "hidden": 0, "trace": "approximate",
            "noise": "uniform", "gradient": "forward", "field": "convolution"}  # fmt: skip
METHODS = "log_prob", "encode", "decode"
BAD = [
    *[(flow_call(m, *args), says) for m in METHODS for args, says in SETS],
    *[(lambda args=args: SetClassifier(2, 3)(*args), says) for args, says in SETS],
    *[
        (flow_call("sample", 1, 1, **{key: value}), f"{key}.*{value}")
        for key, value in SETTINGS.items()
    ],
    (flow_call("sample", 1, 1, field="transformer", hidden=(8, 16)), r"hidden .*8, 16"),
    (flow_call("sample", 1, 1, field="transformer", hidden=0), "hidden must be positive .*0"),
    (lambda: SetClassifier(3, 4, "transformer"), "field must .*'transformer'"),
    (lambda: TemporalSetVAE(decoder="deepsets"), "decoder must .*'deepsets'"),
    (lambda: ExNODE(nn.Identity(), gradient="exact"), "gradient must .*'exact'"),
    (flow_call("sample", 0, 3), "sets must .*0"),
    (flow_call("sample", 3, 0), "points must .*0"),
    (flow_call("sample", 3, (50, 100)), r"points must be an integer .*\(50, 100\)"),
    (flow_call("sample", 3, 2.5), "points must be an integer .*2.5"),
    (flow_call("log_prob", [[["a", "b"]]]), "x must be a tensor or an array of numbers"),
    (flow_call("log_prob", [[[1.0, 2.0], [3.0]]]), "x must be a tensor or an array of numbers"),
    (flow_call("log_prob", X, how={"trace": "half"}), "trace must .*'half'"),
    (flow_call("log_prob", X, how={"probes": 0}), "probes must .*0"),
    (flow_call("log_prob", X, how={"solver": {"method": "rk9"}}), "method must .*'rk9'"),
    (flow_call("log_prob", X, None, torch.ones(2, 5)), "context must .*0 .*5"),
    (flow_call("log_prob", X, None, None, context=5), "context must .*5 .*0"),
    (flow_call("log_prob", X, None, torch.ones(3, 5), context=5), r"context must .*\(3, 5\)"),
    (flow_call("log_prob", X, how={"noise": X[None], "trace": "exact"}), "noise is for .*exact"),
    (flow_call("log_prob", X, how={"noise": X}), r"noise must .*\(2, 3, 2\)"),
    (flow_call("log_prob", X, how={"noise": X[None, :, :2]}), r"noise must .*\(1, 2, 2, 2\)"),
    *[(vae_call("elbo", S, t), says) for t, says in TIMES],
    *[(vae_call("decode", torch.ones(2, 3), t, 3), says) for t, says in TIMES],
    (vae_call("elbo", S[:, :2], T), r"x must hold .*3 times.*\(2, 2, 4, 2\)"),
    (vae_call("elbo", S, T, S[..., 0] < 0), "at least one point"),
    (vae_call("elbo", S[..., :1], T), r"x must be .*2\).*\(2, 3, 4, 1\)"),
    (vae_call("elbo", S[0], T), r"x must be .*\(3, 4, 2\)"),
    (vae_call("elbo", S * math.nan, T), "x must be finite"),
    (vae_call("elbo", S, T, M), "mask must be bool of shape"),
    (vae_call("sample", 0, T, 3), "sets .*0"),
    (vae_call("sample", 2, T, 0), "points? .*0"),
    (vae_call("decode", torch.ones(2, 3), T, -1), "points? .*-1"),
    (vae_call("decode", torch.ones(2, 4), T, 3), r"z0 must .*\(2, 4\)"),
    (vae_call("reconstruct", S, T, points=0), "points? .*0"),
    (vae_call("decode", torch.ones(2, 3), T, 5, mask=S[..., 0] > 0), r"mask must .*\(2, 3, 5\)"),
]
ids = [f"{i}-{says}" for i, (_, says) in enumerate(BAD)]


@pytest.mark.parametrize(("call", "says"), BAD, ids=ids)
def test_bad_input_is_a_value_error_that_names_it(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_padding_changes_not_even_the_steps_of_an_adaptive_solver():
    flow = SetFlow(2, 2, (8, 8), trace="exact", rtol=1e-3, atol=1e-3).double()
    x, padding = torch.randn(3, 5, 2, dtype=F64), 1e3 * torch.randn(3, 4, 2, dtype=F64)
    padded, mask = torch.cat([x, padding], 1), torch.arange(9).expand(3, 9) < 5
    counts, found = (Stats(), Stats()), []
    for sets, stats in zip(((padded, mask), (x,)), counts):  # by SetFlow's default, the adjoint
        log_p = flow.log_prob(*sets, stats=stats)
        found.append((log_p.detach(), *torch.autograd.grad(log_p.sum(), [*flow.parameters()])))
    close(*found, 1e-10)
    assert counts[0] == counts[1]
    assert counts[0].backward_nfe > 0
    for content in (padded, filled(padded, mask, math.nan)):
        z = flow.encode(content, mask)
        close(z[:, :5], flow.encode(x), 1e-10)
        assert torch.equal(z[:, 5:].nan_to_num(7.0), content[:, 5:].nan_to_num(7.0))
