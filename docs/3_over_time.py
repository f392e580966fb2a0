"""3. Sets over time: a set at any time from a few.    python docs/3_over_time.py [FOLDER]

The series here are rings of 24 points that grow, each at its own pace, and each observed at two
times of its own among 0, 0.1, …, 1. A TemporalSetVAE (Sec. 3.4) reads them backwards in time into
z₀; an ODE carries z₀ to any t, and a set flow conditioned on z_t makes the set there.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from beyond.matching import Moments, temporal_matching_loss
from exnode import TemporalSetVAE
from support import pages, pictures

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/docs")
out.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)


def rings(pace, t):
    """Sets (B, T, 24, 2) of rings with the radius 0.2 + pace · t, at times t (B, T)."""
    angle = 2 * math.pi * torch.rand(*t.shape, 24)
    ring = torch.stack([angle.cos(), angle.sin()], -1)
    return (0.2 + pace[:, None] * t)[..., None, None] * ring + 0.03 * torch.randn(*t.shape, 24, 2)


def draw(series):
    """Series with random paces, each observed at two different times."""
    pace, t = 1.5 * torch.rand(series), torch.rand(series, 11).argsort(-1)[:, :2] / 10
    t = t.sort(-1).values
    return rings(pace, t), t, pace


# Training: the decoder by matching, and what keeps z₀ near its prior, the KL of Eq. 11. `moments`
# is a second loss on the encoder, which learns slowly through the noise of matching.
vae = TemporalSetVAE(dim=2, latent=8, decoder="transformer", hidden=(48, 48), gradient="backprop")
vae.moments = Moments(8)
vae.decoder.standardise(draw(500)[0])  # it works in units of the data
optimizer = torch.optim.Adam(vae.parameters(), 3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS := 400)
for step in range(STEPS):
    x, t, _ = draw(32)
    error, kl = temporal_matching_loss(vae, x, t, coupling="none", moments=20.0)
    loss = error + 0.02 * kl.mean() / x[0].numel()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 0:
        print(f"step {step}, loss {loss:.3f}, KL {kl.mean():.1f} nats")

# New series: from their two sets to a set at any time. The rival copies the nearer of the two.
x, t, pace = draw(64)
at = torch.linspace(0, 1.25, 26, dtype=torch.float64)
truth = rings(pace, at.float().expand(64, -1))
made = vae.eval().reconstruct(x, t, at, continuous=True)  # each point moves continuously
nearest = (t[:, None] - at.float()[:, None]).abs().argmin(-1)  # (64, 26)
copy = x.take_along_dim(nearest[..., None, None], 1)
for name, when in (("up to t = 1", at <= 1), ("beyond it", at > 1)):
    true, ours, rival = (s[:, when].norm(dim=-1).mean(-1) for s in (truth, made, copy))
    errors = ((ours - true).abs().mean(), (rival - true).abs().mean())
    print("radius {}: off by {:.3f}, that of a copy by {:.3f}".format(name, *errors))

# Boxes as in the paper's Fig. 5: red within the times of training, green beyond them.
rows = []
for i in range(4):
    rows += [(i + 1, "true", at.tolist(), truth[i]), (i + 1, "model", at.tolist(), made[i])]
pages.series_page(out / "3_over_time.html", rows, [0.0, 1.0], run=out, title="Rings that grow")
some = range(0, 26, 5)
grid = pictures.point_grid(
    [[sets[k].numpy() for k in some] for *_, sets in rows],
    titles=[f"t = {at[k]:g}" for k in some],
    row_labels=[kind for _, kind, *_ in rows],
    frames=[[pages.box(at[k], [0, 1]) if row % 2 else None for k in some] for row in range(8)],
    colours=["grey", "blue"] * 4,
)
pictures.write_png(out / "3_over_time.png", grid)
