"""For an owner of a GPU, in a minute: all that computes agrees there with the CPU.

    pytest -m cuda

Fields, solvers, the three gradients, models and a few steps of each script.
"""

import copy

import pytest
import torch
from test_exnode import CLASSIFIERS, make_flow, make_vae, seeded, series
from test_sets import F64, FIELDS, build, close, draw_mask

import train_cls
import train_flow
import train_temporal
from beyond.matching import Moments, assign, exchange, matching_loss, temporal_matching_loss
from solvers import METHODS, odeint, odeint_adjoint, odeint_checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
TOL = 1e-8


def agree(model, run, *tensors, tol=TOL):
    """run(model, *tensors) and its gradients, here and on the GPU."""
    found = []
    for device in ("cpu", "cuda"):
        here = copy.deepcopy(model).to(device)
        given = [None if a is None else a.detach().clone().to(device) for a in tensors]
        given = [
            a.requires_grad_() if a is not None and a.is_floating_point() else a for a in given
        ]
        outputs = run(here, *given)
        inputs = [*here.parameters(), *(a for a in given if a is not None and a.requires_grad)]
        loss = sum(out.square().sum() for out in outputs)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        assert all(out.device.type == device for out in outputs)
        found.append([None if a is None else a.cpu() for a in (*outputs, *grads)])
    close(found[1], found[0], tol)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_field_agrees(name, masked):
    x, z, e = torch.randn(3, 5, 2), torch.randn(3, 2), torch.randn(2, 3, 5, 2)
    mask = draw_mask((3, 5)) if masked else None

    def run(field, x, z, e):
        here = None if mask is None else mask.to(x.device)
        trace = field.value_and_trace(0.3, x, here, z)
        return field(0.3, x, here, z), *trace, *field.value_and_jvp(0.3, x, e, here, z)

    agree(build(name, context=2), run, x.double(), z.double(), e.double())


@pytest.mark.parametrize("method", METHODS)
def test_every_solver_and_gradient_agrees(method):
    net, x = torch.nn.Linear(3, 3).double(), torch.randn(4, 3, dtype=F64)
    t, options = torch.tensor([0.0, 0.4, 1.0], dtype=F64), {}
    if method != "dopri5":
        options = {"step_size": 0.1}

    def run(net, x):
        def f(t, x):
            return torch.tanh(net(x)) * (1 + t)

        how, params = {"method": method, "options": options}, [*net.parameters()]
        return (
            odeint(f, x, t, **how),
            odeint_checkpoint(f, x, t, params=params, **how),
            odeint_adjoint(f, x, t, adjoint_params=params, **how),
        )

    agree(net, run, x)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_classifier_agrees(name):
    x, mask = torch.randn(4, 5, 2, dtype=F64), draw_mask((4, 5))
    model = CLASSIFIERS[name]().double()
    for part in model.modules():
        part.p = 0.0  # no dropout
    agree(model, lambda model, x: (model(x),), x)
    agree(model, lambda model, x: (model(x, mask.to(x.device)),), x)


@pytest.mark.parametrize("field", ["attention", "deepsets", "concatsquash", "transformer"])
def test_every_flow_agrees(field):
    x, mask = torch.randn(3, 5, 2, dtype=F64), draw_mask((3, 5))

    def run(flow, x):
        here, e = mask.to(x.device), torch.ones(1, *x.shape, dtype=F64, device=x.device)
        z = flow.encode(x, here)
        return (
            flow.log_prob(x, here, trace="exact"), flow.log_prob(x, here, noise=e), z,
            flow.decode(z, here), flow.sample(3, 4, seeded()),
        )  # fmt: skip

    agree(make_flow(field=field, scale=1.0), run, x)


@pytest.mark.parametrize("decoder", ["concatsquash", "attention", "transformer"])
def test_every_temporal_model_agrees(decoder):
    x, t = series()
    mask = draw_mask(x.shape[:-1])
    mask[0, 1] = False

    def run(vae, x):
        here = mask.to(x.device)
        posterior = vae.encode(x, t, here)
        z0 = posterior.mean
        made = vae.decode(z0, t, 3, seeded(), continuous=True)
        log_p = vae.decoder.log_prob(x, context=vae.latents(z0, t), trace="exact")
        elbo = vae.elbo(x, t, here, seeded(), trace="exact")
        return *posterior, posterior.kl(), made, log_p, elbo, vae.sample(2, t, 3, seeded())

    agree(make_vae(decoder=decoder), run, x)


def test_matching_runs_and_its_parts_agree():
    x, spare, z = (torch.randn(4, n, 2, dtype=F64) for n in (5, 7, 5))
    s = torch.tensor([0.01, 0.1, 0.5, 0.9], dtype=F64)
    parts = [
        (assign(x.to(d), z.to(d)), exchange(*(a.to(d) for a in (x, spare, z, s))))
        for d in ("cpu", "cuda")
    ]
    close([part.cpu() for part in parts[1]], list(parts[0]), TOL)
    flow, vae = make_flow().cuda(), make_vae()
    vae.moments = Moments(3, 7).double()
    x, t = series()
    losses = (
        matching_loss(flow, x.cuda()),
        matching_loss(flow, x[:, 0].cuda(), coupling="none", spare=x[:, 1].cuda()),
        temporal_matching_loss(vae.cuda(), x.cuda(), t, moments=1.0, times=2, pieces=2)[0],
    )
    for loss in losses:
        loss.backward()
        assert loss.isfinite()


TINY = ["--batch-size", "540", "--epochs", "1", "--points", "5", "--every", "100"]
FLOW = [*TINY, "--blocks", "1", "--hidden", "8", "--heads", "2", "--test-sets", "4"]
TIMES = [*TINY, "--hidden", "8,8", "--latent", "2", "--times", "0,1", "--category", "1"]
TIMES += ["--valid-series", "8", "--test-series", "8"]
SCRIPTS = {
    "cls": (train_cls, TINY, "accuracy", 0.1),
    "flow": (train_flow, [*FLOW, "--trace", "exact"], "ppll", 0.02),
    "temporal": (train_temporal, [*TIMES, "--trace", "exact"], "elbo", 0.2),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_few_steps_of_every_script_agree(name, tmp_path):
    script, options, metric, tolerance = SCRIPTS[name]
    here = script.main([*options, "--out", str(tmp_path / "cpu")])
    there = script.main([*options, "--out", str(tmp_path / "cuda"), "--cuda"])
    assert there["device"].startswith("cuda")
    assert there["test"][metric] == pytest.approx(here["test"][metric], abs=tolerance)
