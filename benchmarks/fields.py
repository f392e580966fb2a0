"""Our fields against the obvious implementation, in one run.

python benchmarks/fields.py      prints the tables and writes them into benchmarks/RESULTS.md

The rival: three networks by nn.Sequential, plain softmax attention, and Hutchinson's trace by one
vector–Jacobian product inside the forward pass. Each call is an evaluation with its trace, forward
and backward to the points and all parameters.
"""

import math
import sys
from pathlib import Path

import torch
from report import machine, medians, table, write_section
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from sets import AttentionField, DeepSetsField

WIDTH, HEADS = 128, 4


class Obvious(nn.Module):
    """The paper's attention field as one would write it first."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (
            nn.Sequential(
                nn.Linear(dim, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
                nn.Linear(WIDTH, WIDTH),
            )
            for _ in range(3)
        )  # fmt: skip
        self.out = nn.Linear(WIDTH, dim)

    def forward(self, x):
        q, k, v = (
            net(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for net in (self.q, self.k, self.v)
        )
        a = torch.softmax(q @ k.mT / math.sqrt(WIDTH // HEADS), -1)
        return self.out(torch.tanh((q + a @ v).transpose(-2, -3).flatten(-2)))


def same_weights(rival, dim):
    field = AttentionField(dim, (WIDTH, WIDTH, WIDTH), HEADS)
    for ours, theirs in zip(field.parameters(), rival.parameters(), strict=True):
        ours.data.copy_(theirs.data.view_as(ours))
    return field


def calls_at(shape):
    """The contenders at x of this shape: each returns its gradients."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    e = torch.randint(0, 2, shape) * 2.0 - 1
    rival = Obvious(shape[-1])
    field = same_weights(rival, shape[-1])

    def gradients(model, evaluate):
        y = x.clone().requires_grad_()
        dx, trace = evaluate(y)
        return torch.autograd.grad(dx.square().sum() + trace.sum(), (y, *model.parameters()))

    def by_vjp(y):
        dx = rival(y)
        return dx, torch.autograd.grad(dx, y, e, create_graph=True)[0] * e

    def by_jvp(y):
        dx, je = field.value_and_jvp(0.0, y, e[None])
        return dx, je * e

    a, b = gradients(rival, by_vjp)[0], gradients(field, by_jvp)[0]
    assert (a - b).norm() < 1e-4 * a.norm(), "the contenders must compute the same"
    return {
        "obvious, one probe": lambda: gradients(rival, by_vjp),
        "ours, one probe": lambda: gradients(field, by_jvp),
        "ours, exact": lambda: gradients(field, lambda y: field.value_and_trace(0.0, y)),
    }


def trace_rows():
    rows = []
    for shape, repeats in (((128, 50, 2), 15), ((16, 512, 3), 7)):
        times = medians(calls_at(shape), repeats)
        for label, seconds in times.items():
            ratio = seconds / times["obvious, one probe"]
            shown = " × ".join(map(str, shape))
            rows.append([shown, label, f"{1e3 * seconds:.0f} ms", f"{ratio:.2f}"])
    return rows


def scaling_rows():
    """Milliseconds of one evaluation without gradient, against the number of points."""
    sizes = (32, 64, 128, 256, 512, 1024, 2048)
    fields = {"deepsets": DeepSetsField(3, (128, 128)), "attention": AttentionField(3, (128,) * 3)}
    rows = []
    for name, field in fields.items():
        for what in ("value", "exact trace"):
            costs = []
            for n in sizes:
                x = torch.randn(4, n, 3)
                evaluate = field if what == "value" else field.value_and_trace
                with torch.no_grad():
                    call = {"": lambda f=evaluate, x=x: f(0.0, x)}
                    costs.append(1e3 * medians(call, 5)[""])
            logs = torch.tensor([sizes, costs], dtype=torch.float64).log()
            centred = logs - logs.mean(1, keepdim=True)
            slope = (centred[0] @ centred[1]) / (centred[0] @ centred[0])
            rows.append([name, what, *(f"{ms:.1f}" for ms in costs), f"{slope:.2f}"])
    return ["field", "what", *map(str, sizes), "exponent"], rows


def main():
    text = [
        machine(),
        "\nOne evaluation of the paper's attention field with its trace, forward and backward; the"
        " ratio is to Hutchinson's trace by one vector–Jacobian product.\n",
        table(["x", "trace", "time", "ratio"], trace_rows()),
        "\nMilliseconds of one evaluation of 4 sets, without gradient, against the number of points"
        " per set, and the exponent of the fitted power law:\n",
        table(*scaling_rows()),
    ]
    print("\n".join(text))
    write_section("fields", "\n".join(["## Fields", "", *text]))


if __name__ == "__main__":
    main()
