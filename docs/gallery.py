"""docs/index.html: samples of the pretrained models, to turn and to play in a browser.

python docs/gallery.py    writes it anew, in a minute or two of one core; no data are needed
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import exnode
import train_flow
from support import flow_pictures, flows, models, pages, viewer
from support.viewer import Cloud

ROOT = Path(__file__).parent.parent
FLOWS = {  # heading: run, sets, points, frames from noise to data
    "Chairs, from a flow on ModelNet40: sets of 1,024 points": ("chair", 6, 1024, 9),
    "Airplanes, from a flow on ModelNet40: sets of 1,024 points": ("airplane", 6, 1024, 9),
    "Digits, from the paper's chain of 12 blocks: sets of 50 points": ("mnist-paper", 12, 50, 17),
}
TURNING = "Turning digits, from a VAE with a learned prior, trained at t = 0, 0.25, …, 1"
ABOUT = """Samples of the pretrained models of exnode, a reference implementation of Exchangeable
 Neural ODE for Set Modeling (Li et al., NeurIPS 2020): play the time. Three flows carry noise to
 sets of points; the fourth model makes sets that move. None were chosen: they are those of seed 0.
"""


def flow_sets(section, name, sets, points, frames):
    """Sets on their way from noise to data."""
    run = ROOT / "pretrained" / name
    args = train_flow.parse(["--load", str(run), "--sample", "1"])
    model, noise = exnode.load(run), torch.Generator().manual_seed(0)
    z = exnode.normal((sets, points, model.dim), model.mean, noise)
    way = flow_pictures.paths(model, z, frames, solver=flows.sampler(args))
    return [Cloud(way[:, i].numpy(), str(i + 1), section=section) for i in range(sets)]


def turning_sets(series=12, points=100, times=31):
    """Series with the paper's boxes between trained times and beyond them."""
    run = ROOT / "pretrained" / "turning"
    model = models.load(run, learned_prior=True)
    t = torch.linspace(0, 1.5, times, dtype=torch.float64).tolist()
    noise = torch.Generator().manual_seed(0)
    x = model.sample(series, t, points, noise, continuous=True).numpy()
    boxes = [pages.box(time, [0, 0.25, 0.5, 0.75, 1]) for time in t]
    return [Cloud(one, str(i), "", TURNING, times=t, boxes=boxes) for i, one in enumerate(x, 1)]


def main(path=ROOT / "docs" / "index.html"):
    sets = [cloud for title, what in FLOWS.items() for cloud in flow_sets(title, *what)]
    viewer.write(path, [*sets, *turning_sets()], title="exnode: samples", about=ABOUT)
    print(f"{path}: {Path(path).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
