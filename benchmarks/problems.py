"""The problems of benchmarks/controller.py: small networks, this project's models, and DETEST.

Every state is one float64 tensor, so that all libraries measure errors in the same norm.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import exnode
from exnode import SetFlow

PRETRAINED = Path(__file__).parent.parent / "pretrained"
F64 = torch.float64


class Problem(NamedTuple):
    """y' = f(t, y) from y0 at t0 to t1."""

    group: str
    name: str
    f: Callable
    y0: torch.Tensor
    t0: float
    t1: float


def tensor(*values):
    return torch.tensor(values, dtype=F64)


# --------------------------------------------------------------------------------- small networks


def networks():
    """128 units, 64 × 2 points: initial weights, and 1.5 and 2 times as large ones."""
    for scale in (1, 1.5, 2):
        for end in (1.0, 3.0):
            for seed in range(3):
                torch.manual_seed(seed)
                layers = nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()
                net = nn.Sequential(*layers, nn.Linear(128, 2)).double().requires_grad_(False)
                for p in net.parameters():
                    p.mul_(scale)
                y0 = torch.randn(64, 2, dtype=F64)
                name = f"network, weights × {scale:g}, [0, {end:g}]"
                yield Problem("networks", name, lambda t, y, net=net: net(y), y0, 0.0, end)


# ---------------------------------------------------------------------------- this project's models


def trained(run):
    return exnode.load(PRETRAINED / run).double().requires_grad_(False)


def value(field, context=None):
    return lambda t, x: field(t, x, None, context)


def with_log_det(block, x, noise):
    """The field of (x, log det) as one vector, and where it starts."""

    def flat(t, y):
        dx, je = block.field.value_and_jvp(t, y[: x.numel()].view_as(x), noise)
        return torch.cat([dx.flatten(), (noise * je).sum((-2, -1)).mean(0)])

    return flat, torch.cat([x.flatten(), x.new_zeros(len(x))])


def models(chain_steps):
    """Fields of the paper's models, with initial and with trained weights."""
    digits = next(data.batches(data.load("synthetic", points=50).train, 2, seed=1)).x.double()
    for label, flow in chains(chain_steps):
        flow = flow.double().requires_grad_(False)
        torch.manual_seed(0)
        noise = torch.randn(1, *digits.shape, dtype=F64)
        for i in (0, 5, 11):
            f, y0 = with_log_det(flow.blocks[i], digits, noise)
            name = f"chain, {label} weights"
            yield Problem("models", name, f, y0, 0.0, 0.5)
    for run, x in (("mnist", digits), ("chair", torch.randn(1, 64, 3, dtype=F64))):
        flow = trained(run)
        f = value(flow.blocks[0].field)
        yield Problem("models", f"{run}, encode", f, flow.to_units(x), 0.0, 0.5)
        z = torch.randn(x.shape, dtype=F64)
        yield Problem("models", f"{run}, sample", f, z, 0.5, 0.0)
    yield classifier()
    yield from temporal(digits)


def chains(steps):
    torch.manual_seed(0)
    flow = SetFlow(2, 12)
    yield "initial", flow
    if steps:
        from steps import train_by_matching

        flow = flow.float().requires_grad_(True)
        train_by_matching(flow, data.load("synthetic", points=50).train, steps)
        yield "trained", flow


def classifier():
    model = trained("shapes")
    torch.manual_seed(0)
    x = torch.randn(2, 50, 3, dtype=F64)
    x = x / x.norm(dim=-1, keepdim=True)
    for linear, norm in zip(model.expand, model.norms):
        x = torch.tanh(norm(linear(x), None))
    return Problem("models", "classifier's field", value(model.block.field), x, 0.0, 1.0)


def temporal(digits):
    model = trained("turning")
    torch.manual_seed(0)
    z0 = torch.randn(2, model.latent, dtype=F64)
    yield Problem("models", "latent ODE", model.dynamics, z0, 0.0, 1.0)
    f, z = value(model.decoder.blocks[0].field, z0), torch.randn(digits.shape, dtype=F64)
    yield Problem("models", "temporal decoder", f, z, 1.0, 0.0)


# ------------------------------------------------------------------------------------------ DETEST


def linear(matrix):
    return lambda t, y: matrix @ y


def chain_matrix(leave, arrive):
    """y'ᵢ = arriveᵢ₋₁ yᵢ₋₁ − leaveᵢ yᵢ."""
    return torch.diag(-leave) + torch.diag(arrive, -1)


def heat_matrix(n):
    ones = torch.ones(n - 1, dtype=F64)
    return torch.diag(ones, 1) + torch.diag(ones, -1) - 2 * torch.eye(n, dtype=F64)


def torus(t, y):
    r = torch.hypot(y[0], y[1])
    return torch.stack([-y[1] - y[0] * y[2] / r, y[0] - y[1] * y[2] / r, y[0] / r])


MASSES = tensor(
    1.00000597682, 0.000954786104043, 0.000285583733151, 0.0000437273164546, 0.0000517759138449,
    0.00000277777777778,
)  # fmt: skip
PLANETS = tensor(
    [3.42947415189, 3.35386959711, 1.35494901715],
    [6.64145542550, 5.97156957878, 2.18231499728],
    [11.2630437207, 14.6952576794, 6.27960525067],
    [-30.1552268759, 1.65699966404, 1.43785752721],
    [-21.1238353380, 28.4465098142, 15.3882659679],
    [-0.557160570446, 0.505696783289, 0.230578543901],
    [-0.415570776342, 0.365682722812, 0.169143213293],
    [-0.325325669158, 0.189706021964, 0.0877265322780],
    [-0.0240476254170, -0.287659532608, -0.117219543175],
    [-0.176860753121, -0.216393453025, -0.0148647893090],
)


def planets(t, y):
    """The outer planets around the sun, each pulled by it and by the others."""
    x, v = y[:5], y[5:]
    m, r = MASSES[1:, None], x.norm(dim=-1, keepdim=True)
    gap = x[None] - x[:, None]  # from i to j
    pull = gap / (gap.norm(dim=-1, keepdim=True) + torch.eye(5, dtype=F64)[..., None]) ** 3
    own = -(MASSES[0] + m) * x / r**3
    others = (m[None] * (pull - (x / r**3)[None] * (1 - torch.eye(5, dtype=F64))[..., None])).sum(1)
    return torch.cat([v, 2.95912208286 * (own + others)])


def orbit(t, y):
    return torch.cat([y[2:], -y[:2] / y[:2].norm() ** 3])


def second_order(acceleration):
    return lambda t, y: torch.stack([y[1], acceleration(t, y[0], y[1])])


def detest():
    """Hull, Enright, Fellen and Sedgwick (1972): 25 problems on [0, 20]."""
    ten, pairs = torch.zeros(10, dtype=F64), torch.arange(1, 10, dtype=F64)
    ten[0] = 1
    one = torch.ones(9, dtype=F64)
    last = lambda leave: torch.cat([leave, tensor(0)])  # noqa: E731
    many = torch.zeros(51, dtype=F64)
    many[0] = 1
    cases = {
        "A1": (lambda t, y: -y, tensor(1)),
        "A2": (lambda t, y: -(y**3) / 2, tensor(1)),
        "A3": (lambda t, y: y * torch.cos(t), tensor(1)),
        "A4": (lambda t, y: y / 4 * (1 - y / 20), tensor(1)),
        "A5": (lambda t, y: (y - t) / (y + t), tensor(4)),
        "B1": (
            lambda t, y: torch.stack([2 * (y[0] - y[0] * y[1]), -(y[1] - y[0] * y[1])]),
            tensor(1, 3),
        ),
        "B2": (linear(tensor([-1, 1, 0], [1, -2, 1], [0, 1, -1])), tensor(2, 0, 1)),
        "B3": (lambda t, y: torch.stack([-y[0], y[0] - y[1] ** 2, y[1] ** 2]), tensor(1, 0, 0)),
        "B4": (torus, tensor(3, 0, 0)),
        "B5": (
            lambda t, y: torch.stack([y[1] * y[2], -y[0] * y[2], -0.51 * y[0] * y[1]]),
            tensor(0, 1, 1),
        ),
        "C1": (linear(chain_matrix(last(one), one)), ten),
        "C2": (linear(chain_matrix(last(pairs), pairs)), ten),
        "C3": (linear(heat_matrix(10)), ten),
        "C4": (linear(heat_matrix(51)), many),
        "C5": (planets, PLANETS),
    }
    for i, e in enumerate((0.1, 0.3, 0.5, 0.7, 0.9), 1):
        cases[f"D{i}"] = (orbit, tensor(1 - e, 0, 0, ((1 + e) / (1 - e)) ** 0.5))
    cases |= {
        "E1": (
            second_order(lambda t, y, v: -(v / (t + 1) + (1 - 0.25 / (t + 1) ** 2) * y)),
            tensor(0.6713967071418030, 0.09540051444747446),
        ),
        "E2": (second_order(lambda t, y, v: (1 - y**2) * v - y), tensor(2, 0)),
        "E3": (
            second_order(lambda t, y, v: y**3 / 6 - y + 2 * torch.sin(2.78535 * t)),
            tensor(0, 0),
        ),
        "E4": (second_order(lambda t, y, v: 0.032 - 0.4 * v**2), tensor(30, 0)),
        "E5": (second_order(lambda t, y, v: torch.sqrt(1 + v**2) / (25 - t)), tensor(0, 0)),
    }
    for name, (f, y0) in cases.items():
        yield Problem("DETEST", name, f, y0, 0.0, 20.0)
