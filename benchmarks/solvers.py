"""Our solvers against torchdiffeq, zuko and torchode: same field and tolerance, alternating.

python benchmarks/solvers.py      prints the tables and writes them into benchmarks/RESULTS.md

Times are medians, as ratios to torchdiffeq's in the same run. Errors are relative, in norm, against
a float64 solution at tolerance 1e-10. Memory is the growth of a fresh process's peak during one
call.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torchdiffeq
from report import machine, medians, table, write_section
from rivals import LIBRARIES
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import solvers
from sets import AttentionField


class MLP(nn.Module):
    """Two inputs, 64 hidden units: so cheap that the solver's own work shows."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, t, y):
        return 3 * self.net(y)


class Swirl(nn.Module):
    """y' = tanh(W y): next to no memory of its own beside a large state."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, t, y):
        return torch.tanh(self.linear(y))


class Counted(nn.Module):
    """A field that counts its evaluations, for both libraries alike."""

    def __init__(self, field):
        super().__init__()
        self.field, self.nfe = field, 0

    def forward(self, t, y):
        self.nfe += 1
        return self.field(t, y)


def make(name):
    """A field, y0, t, tolerance and the number of repetitions."""
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(), torch.randn(64, 2), torch.tensor([0.0, 5.0]), 1e-6, 31
    field = AttentionField(2, (128, 128, 128))
    with torch.no_grad():  # as lively as a trained one: about 20 evaluations for the paper's block
        field.out.weight.mul_(4)
    return field, torch.randn(128, 50, 2), torch.tensor([0.0, 0.5]), 1e-5, 5


def relative(a, b):
    a, b = torch.cat([x.flatten() for x in a]).double(), torch.cat([x.flatten() for x in b])
    return ((a - b).norm() / b.norm()).item()


GRADIENTS = {
    "torchdiffeq, backprop": (torchdiffeq.odeint, {}),
    "torchdiffeq, adjoint": (torchdiffeq.odeint_adjoint, {}),
    "ours, backprop": (solvers.odeint, {}),
    "ours, checkpoint": (solvers.odeint_checkpoint, {}),
    "ours, adjoint": (solvers.odeint_adjoint, {}),
    "ours, adjoint, seminorm": (solvers.odeint_adjoint, {"adjoint_options": {"norm": "seminorm"}}),
}


def loss_gradient(solver, field, y0, t, **keywords):
    """The gradient of Σ y(t₁)² with respect to y0 and every parameter."""
    y0 = y0.detach().requires_grad_()
    loss = solver(field, y0, t, **keywords)[-1].square().sum()
    return torch.autograd.grad(loss, (y0, *field.parameters()))


def forward_rows(name):
    field, y0, t, tol, repeats = make(name)
    field = Counted(field).requires_grad_(False)
    exact = solvers.odeint(field.double(), y0.double(), t.double(), rtol=1e-10, atol=1e-10)[-1]
    field.float()
    calls, rows = {}, {}
    for label, solver in LIBRARIES.items():
        calls[label] = lambda s=solver: s(field, y0, *t.tolist(), tol)
        field.nfe = 0
        error = relative([calls[label]()], [exact])
        rows[label] = [f"{name}, forward", label, field.nfe, f"{error:.1e}"]
    times = medians(calls, repeats)
    for label, row in rows.items():
        row[2:2] = [f"{times[label] / times['torchdiffeq']:.2f}", f"{1e3 * times[label]:.1f} ms"]
        row += ["", f"{peak(name, label + ', forward'):.0f} MB"]
    return list(rows.values())


def gradient_rows(name):
    field, y0, t, tol, repeats = make(name)
    field = Counted(field)
    tight = {"rtol": 1e-10, "atol": 1e-10}
    exact = loss_gradient(solvers.odeint_checkpoint, field.double(), y0.double(), t, **tight)
    field.float()
    calls, rows = {}, {}
    for label, (solver, keywords) in GRADIENTS.items():
        keywords = {"rtol": tol, "atol": tol, **keywords}
        calls[label] = lambda s=solver, k=keywords: loss_gradient(s, field, y0, t, **k)
        field.nfe = 0
        error = relative(calls[label](), exact)
        rows[label] = [f"{name}, gradient", label, field.nfe, "", f"{error:.1e}"]
    times = medians(calls, repeats)
    for label, row in rows.items():
        ratio = times[label] / times["torchdiffeq, adjoint"]
        row[2:2] = [f"{ratio:.2f}", f"{1e3 * times[label]:.1f} ms"]
        row.append(f"{peak(name, label):.0f} MB")
    return list(rows.values())


def overhead_rows():
    """Microseconds per step on y' = −y, where the solver's own work is all there is."""
    rows = []
    for method, stages, options in (("dopri5", 6, None), ("rk4", 4, {"step_size": 0.02})):
        rows += overhead(method, stages, options)
    return rows


def overhead(method, stages, options):
    y0, t = torch.ones(8), torch.tensor([0.0, 20.0])
    keywords = {"method": method, "rtol": 1e-6, "atol": 1e-9, "options": options}
    calls, steps = {}, {}
    for label, solver in (("torchdiffeq", torchdiffeq.odeint), ("ours", solvers.odeint)):
        calls[label] = lambda s=solver: s(lambda t, y: -y, y0, t, **keywords)
        count = []
        solver(lambda t, y, count=count: count.append(t) or -y, y0, t, **keywords)
        steps[label] = len(count) // stages
    times = medians(calls, 15)
    per_step = {label: 1e6 * times[label] / steps[label] for label in calls}
    ratio = {label: per_step[label] / per_step["torchdiffeq"] for label in calls}
    return [
        [method, label, steps[label], f"{per_step[label]:.0f} µs", f"{ratio[label]:.2f}"]
        for label in calls
    ]


def memory_rows():
    """Peak memory of a gradient with 10, 100 and 1,000 rk4 steps."""
    rows = []
    for label in ("ours, backprop", "ours, checkpoint", "ours, adjoint"):
        counts = (10, 100) if "backprop" in label else (10, 100, 1000)  # 1,000: too many GB
        peaks = [peak("steps", label, steps) for steps in counts]
        cells = [f"{mb:.1f} MB" for mb in peaks] + ["not run"] * (3 - len(peaks))
        rows.append([label, *cells, f"{peaks[-1] / peaks[0]:.2f}"])
    return rows


def peak(name, label, steps=0):
    """Peak memory in MB that one call adds, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", json.dumps([name, label, steps])]
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=exact)
    return float(run.stdout)


def measure_peak(name, label, steps):
    keywords = {}
    if name == "steps":
        torch.manual_seed(0)
        field, y0, t, tol = Swirl(), torch.randn(200_000, 2), torch.tensor([0.0, 1.0]), 1e-5
        keywords = {"method": "rk4", "options": {"step_size": 1 / steps}}
    else:
        field, y0, t, tol, _ = make(name)
    if label.endswith("forward"):
        solver = LIBRARIES[label.removesuffix(", forward")]
        field.requires_grad_(False)
        call = lambda f, y, n: solver(f, y, *n.tolist(), tol)  # noqa: E731
    else:
        solver, more = GRADIENTS[label]
        keywords = {"rtol": tol, "atol": tol, **keywords, **more}
        call = lambda f, y, n: loss_gradient(solver, f, y, n, **keywords)  # noqa: E731
    small = y0[:1]
    call(field, small, t)  # load everything that the first call loads
    before = high_water()
    call(field, y0, t)
    print(high_water() - before)


def high_water():
    """This process's peak in MB; getrusage would start from the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def check_agreement():
    """Results and gradients are those of torchdiffeq, whichever of the two is imported."""
    field = MLP().double()
    t, y0 = torch.tensor([1, 0.25, 0], dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64)
    for name in ("odeint", "odeint_adjoint"):
        for method, options in (("dopri5", {}), ("rk4", {"step_size": 0.01})):
            how = {"rtol": 1e-9, "atol": 1e-9, "method": method, "options": options}
            found = []
            for library in (solvers, torchdiffeq):
                ys = getattr(library, name)(field, y0.clone().requires_grad_(), t, **how)
                found.append((ys, *torch.autograd.grad(ys.square().sum(), [*field.parameters()])))
            torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def main():
    check_agreement()
    columns = ["problem", "solver", "time ratio", "time", "f calls", "error", "gradient error"]
    rows = []
    for name in ("mlp", "attention"):
        rows += forward_rows(name) + gradient_rows(name)
    text = [
        machine(),
        "\nSame field, same tolerance (mlp: 64 × 2, 1e-6; attention: the paper's field on 128 × 50"
        " × 2, 1e-5). Forward ratios are to torchdiffeq's dopri5, gradient ratios to its adjoint."
        " Calls count forward and backward together.\n",
        table([*columns, "peak"], rows),
        "\nThe solver's own work, per step, on y' = −y:\n",
        table(["method", "solver", "steps", "per step", "ratio"], overhead_rows()),
        "\nPeak memory of a gradient against the number of rk4 steps (a state of 1.6 MB):\n",
        table(["gradient", "10", "100", "1,000", "last / first"], memory_rows()),
    ]
    print("\n".join(text))
    write_section("solvers", "\n".join(["## Solvers", "", *text]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        measure_peak(*json.loads(sys.argv[2]))
    else:
        main()
