"""1. Theorem 1 and the exact trace, on a toy set.    python docs/1_theorem.py [FOLDER]

A field f on sets is permutation-equivariant if f(πx) = π f(x). Theorem 1: then so is the flow
x ↦ z(1) of the ODE ż = f(t, z), z(0) = x; and the flow is invertible, by the same ODE backwards.
So sets have a density with the change of variables of Eq. 5,

    log p(x) = log p(z(1)) + ∫ Tr ∂f/∂z dt ,

which needs the trace of a Jacobian of n·d rows, not its determinant.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from exnode import ExNODE
from sets import AttentionField
from support import pictures, viewer

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/docs")
out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)

# A set of 20 points in the plane, and a block: a field, and the solver that integrates it.
x = torch.rand(20, 2) * 2 - 1
block = ExNODE(AttentionField(dim=2, hidden=(32, 32)), t1=4.0, rtol=1e-9, atol=1e-9)
with torch.no_grad():  # fields begin small: larger weights, for points that move visibly
    for p in block.parameters():
        p.mul_(1.5)

# Theorem 1: to permute and then to flow is to flow and then to permute; and the way back exists.
z, order = block(x), torch.randperm(len(x))
print("equivariance:", f"{(block(x[order]) - z[order]).abs().max():.1e}")
print("invertibility:", f"{(block.inverse(z) - x).abs().max():.1e}")

# The exact trace of the field at once, beside the diagonal of its whole 40 × 40 Jacobian.
_, trace = block.field.value_and_trace(0.0, x)
jacobian = torch.autograd.functional.jacobian(lambda x: block.field(0.0, x), x).reshape(40, 40)
print("trace:", f"{trace:.9f}, by autograd {jacobian.trace():.9f}")

# Its integral over time is the log-determinant of the whole flow, which autograd finds at the
# cost of 40 backward passes through the solver.
_, log_det = block.forward_and_log_det(x)
whole = torch.autograd.functional.jacobian(block, x).reshape(40, 40).slogdet().logabsdet
print("log-determinant:", f"{log_det:.9f}, by autograd {whole:.9f}")

# The set on its way, as a picture and as a page to play.
times = torch.linspace(0, block.t1, 21).tolist()
with torch.no_grad():
    frames = torch.stack([x] + [block.integrate(x, (0.0, t)) for t in times[1:]]).numpy()
names = [f"t = {t:.2f}" for t in times[::5]]
pictures.write_png(out / "1_theorem.png", pictures.point_grid([frames[::5]], names))
viewer.write(out / "1_theorem.html", [frames], title="A flow on a set")
print(f"{out}/1_theorem.png and .html")
