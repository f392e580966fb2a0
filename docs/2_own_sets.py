"""2. A flow on your own ragged sets: densities, samples, anomalies.    python docs/2_own_sets.py

The sets here are necklaces: 8 to 24 points, evenly spaced on a circle with its own place, size and
phase, each point shifted a little. A set flow learns their density. It then tells sets that are
not necklaces from those that are: by log p / n, nats per point, which is comparable between sizes.

For files, train_flow.py does the same: --data my-sets.npz, then --score and --sample.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
from beyond.matching import matching_loss
from exnode import SetFlow
from support import pages, pictures

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/docs")
out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)


def necklace(even=True):
    """Points on a circle; not even: at random angles, which is what a stranger looks like."""
    n = int(torch.randint(8, 25, ()))
    angle = (torch.arange(n) / n if even else torch.rand(n)) * 2 * math.pi + 6 * torch.rand(())
    ring = torch.stack([angle.cos(), angle.sin()], -1) * (0.5 + torch.rand(()))
    return ring + 0.5 * torch.randn(2) + 0.03 * torch.randn(n, 2)


# Ragged sets are padded to one tensor and a mask, True where a point exists.
x, mask = data.pad([necklace() for _ in range(2000)])  # (2000, 24, 2) and (2000, 24)
flow = SetFlow(dim=2, blocks=1, hidden=(64, 64, 64), field="transformer", rtol=1e-3, atol=1e-3)
flow.standardise(x, mask)  # the flow works in units of the data; densities stay in those of x

# Matching trains the flow without a solver in the loop.
optimizer = torch.optim.Adam(flow.parameters(), 3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS := 400)
for step in range(STEPS):
    some = torch.randint(len(x), (64,))
    loss = matching_loss(flow, x[some], mask[some], coupling="none", finest=0.03)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 0:
        print(f"step {step}, loss {loss:.3f}")


# Densities of new necklaces and of strangers: log p of the ordered set, per point. A transformer's
# trace is Hutchinson's estimate; attention and deepsets fields have it exactly.
@torch.no_grad()
def nats(x, mask):
    return flow.eval().log_prob(x, mask, probes=4) / mask.sum(-1)


known, strange = (data.pad([necklace(even) for _ in range(64)]) for even in (True, False))
scores = nats(*known), nats(*strange)
print("nats per point:", " against ".join(f"{s.mean():.2f}" for s in scores))
higher = (scores[0][:, None] > scores[1]).double().mean()
print(f"a necklace has the higher score than a stranger in {100 * higher:.0f} % of pairs")

# Samples have any sizes that a mask asks for.
with torch.no_grad():
    samples = flow.sample(9, 24, mask=mask[:9])
sets = [[s[m].numpy() for s, m in zip(*pair)][:9] for pair in (known, strange, (samples, mask[:9]))]
names = ["necklaces", "strangers", "samples"]
pictures.write_png(out / "2_own_sets.png", pictures.point_grid(sets, row_labels=names))
how = {"run": out, "title": "Necklaces", "nats": lambda x: nats(x, mask[:9])}
pages.flow_page(out / "2_own_sets.html", samples, mask[:9], real=x[:9], **how)
