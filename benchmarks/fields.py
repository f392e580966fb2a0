"""The fast fields against the plain ones, and both against the obvious implementation, in one run.

python benchmarks/fields.py      prints the tables and writes them into benchmarks/RESULTS.md

- plain: `sets.py`; fast: `beyond/fast.py`, with the same weights.
- obvious: three networks by nn.Sequential, softmax attention, and Hutchinson's trace by one
  vector–Jacobian product inside the forward pass.

An evaluation is forward and backward to the points and all parameters. A training step is forward
and backward of a whole model, without the optimiser.
"""

import copy
import math
import sys
from pathlib import Path

import torch
from report import machine, medians, table, write_section
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from beyond.fast import FastAttentionField, FastDeepSetsField
from exnode import SetClassifier, SetFlow
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
    """The plain and the fast field with the rival's weights."""
    fields = [kind(dim, (WIDTH,) * 3, HEADS) for kind in (AttentionField, FastAttentionField)]
    for field in fields:
        for ours, theirs in zip(field.parameters(), rival.parameters(), strict=True):
            ours.data.copy_(theirs.data.view_as(ours))
    return fields


def evaluations(shape):
    """The contenders at x of this shape, by kind of trace: each returns its gradients."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    e = torch.randint(0, 2, shape) * 2.0 - 1
    rival = Obvious(shape[-1])
    plain, fast = same_weights(rival, shape[-1])

    def gradients(model, evaluate):
        y = x.clone().requires_grad_()
        dx, trace = evaluate(y)
        return torch.autograd.grad(dx.square().sum() + trace.sum(), (y, *model.parameters()))

    def by_vjp(y):
        dx = rival(y)
        return dx, torch.autograd.grad(dx, y, e, create_graph=True)[0] * e

    def by_jvp(field, y):
        dx, je = field.value_and_jvp(0.0, y, e[None])
        return dx, je * e

    calls = {
        "obvious, one probe": lambda: gradients(rival, by_vjp),
        "plain, one probe": lambda: gradients(plain, lambda y: by_jvp(plain, y)),
        "fast, one probe": lambda: gradients(fast, lambda y: by_jvp(fast, y)),
        "plain, exact": lambda: gradients(plain, lambda y: plain.value_and_trace(0.0, y)),
        "fast, exact": lambda: gradients(fast, lambda y: fast.value_and_trace(0.0, y)),
    }
    check_alike(calls, "obvious, one probe", "plain, one probe", "fast, one probe")
    check_alike(calls, "plain, exact", "fast, exact")
    return calls


def check_alike(calls, first, *others):
    """The contenders must compute the same gradient in x."""
    expected = calls[first]()[0]
    for name in others:
        assert (calls[name]()[0] - expected).norm() < 1e-4 * expected.norm(), name


def evaluation_rows():
    rows = []
    for shape, repeats in (((128, 50, 2), 15), ((16, 512, 3), 7)):
        times = medians(evaluations(shape), repeats)
        for label, seconds in times.items():
            ratio = seconds / times["obvious, one probe"]
            shown = " × ".join(map(str, shape))
            rows.append([shown, label, f"{1e3 * seconds:.0f} ms", f"{ratio:.2f}"])
    return rows


def with_plain_fields(model):
    """A copy of the model with the fields of sets.py in place of the fast ones."""
    model = copy.deepcopy(model)
    for part in model.modules():
        fast = getattr(part, "field", None)
        if isinstance(fast, FastAttentionField):
            hidden = [layer.out_features for layer in fast.q.layers]
            part.field = AttentionField(fast.dim, hidden, fast.heads, fast.time, fast.context)
        elif isinstance(fast, FastDeepSetsField):
            hidden = [layer.out_features for layer in fast.network.layers]
            part.field = DeepSetsField(fast.dim, hidden, fast.time, fast.context)
        if fast is not None:
            part.field.load_state_dict(fast.state_dict())
    return model


def training_steps():
    """Name ↦ (model, its loss): the paper's classifiers, and a block of its flow."""
    torch.manual_seed(0)
    x, labels = torch.randn(64, 100, 3), torch.randint(40, (64,))
    y, steps = torch.randn(128, 50, 2), {}
    for field in ("deepsets", "attention"):
        steps[f"classifier, {field}, 64 × 100 × 3"] = (
            SetClassifier(3, 40, field),
            lambda model: nn.functional.cross_entropy(model(x), labels),
        )
    for trace in ("hutchinson", "exact"):
        flow = SetFlow(2, blocks=1, method="rk4", gradient="backprop", trace=trace)
        steps[f"flow, one block of RK4, {trace} trace, 128 × 50 × 2"] = (
            flow,
            lambda model: -model.log_prob(y).mean(),
        )
    return steps


def step_rows():
    rows = []
    for name, (model, loss) in training_steps().items():
        models = {"plain": with_plain_fields(model), "fast": model}
        calls = {
            label: lambda model=model, loss=loss: torch.autograd.grad(
                loss(model), [*model.parameters()]
            )
            for label, model in models.items()
        }
        times = medians(calls, 7)
        ratio = times["fast"] / times["plain"]
        rows.append([name, *(f"{1e3 * times[k]:.0f} ms" for k in models), f"{ratio:.2f}"])
    return rows


def scaling_rows():
    """Milliseconds of one evaluation without gradient, against the number of points."""
    sizes = (32, 64, 128, 256, 512, 1024, 2048)
    fields = {
        "deepsets": FastDeepSetsField(3, (128, 128)),
        "attention": FastAttentionField(3, (128,) * 3),
    }
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
        table(["x", "trace", "time", "ratio"], evaluation_rows()),
        "\nOne training step, forward and backward, with plain and with fast fields.\n",
        table(["step", "plain", "fast", "ratio"], step_rows()),
        "\nMilliseconds of one evaluation of 4 sets by the fast field, without gradient, against"
        " the number of points per set, and the exponent of the fitted power law:\n",
        table(*scaling_rows()),
    ]
    print("\n".join(text))
    write_section("fields", "\n".join(["## Fields", "", *text]))


if __name__ == "__main__":
    main()
