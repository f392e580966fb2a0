"""Four adaptive Dormand–Prince solvers behind one signature: y(t1) from y0 at t0."""

import sys
from pathlib import Path

import torch
import torchdiffeq
import torchode
import zuko

sys.path.insert(0, str(Path(__file__).parent.parent))
import solvers


def ours(f, y0, t0, t1, tol):
    t = torch.tensor([t0, t1], dtype=torch.float64)
    return solvers.odeint(f, y0, t, rtol=tol, atol=tol)[-1]


def by_torchdiffeq(f, y0, t0, t1, tol):
    t = torch.tensor([t0, t1], dtype=y0.dtype)
    return torchdiffeq.odeint(f, y0, t, rtol=tol, atol=tol)[-1]


def by_zuko(f, y0, t0, t1, tol):
    return zuko.utils.odeint(f, y0, t0, t1, rtol=tol, atol=tol)


def by_torchode(f, y0, t0, t1, tol):
    """Its batch is a single problem here, so that its error norm is that of the others."""
    term = torchode.ODETerm(lambda t, y: f(t[0], y[0].view_as(y0)).reshape(1, -1))
    control = torchode.IntegralController(atol=tol, rtol=tol, term=term)
    solver = torchode.AutoDiffAdjoint(torchode.Dopri5(term=term), control)
    t = torch.tensor([[t0, t1]], dtype=y0.dtype)
    start = torchode.InitialValueProblem(y0=y0.reshape(1, -1), t_eval=t)
    return solver.solve(start).ys[0, -1].view_as(y0)


LIBRARIES = {
    "ours": ours,
    "torchdiffeq": by_torchdiffeq,
    "zuko": by_zuko,
    "torchode": by_torchode,
}
