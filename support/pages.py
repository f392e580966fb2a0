"""The pages of the three experiments, for viewer.write: what a script has drawn, and its run.

    train_flow.py        samples and their way from noise, beside real sets     flow_page
    train_temporal.py    series over time, in the paper's boxes                series_page
    train_cls.py         test sets with true and predicted labels              cls_page

Sets are tensors or arrays `(B, n, d)`, a mask is `(B, n)`; series are `(T, n, d)`, NaN where there
is no point. `test` holds the numbers of a test, as in results.json; where it is not given, the
page has those of results.json in the folder `run`, if there are any, and always the options and
curves that the folder has.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from solvers import SolverError
from support import viewer
from support.checkpoints import read_json, read_metrics
from support.progress import say
from support.viewer import Cloud

Sets = torch.Tensor | np.ndarray


def flow_page(
    path: str | Path,
    samples: Sets,
    mask: Sets | None = None,
    *,
    way: Sets | None = None,
    real: Sets | None = None,
    labels: Sequence[str] | None = None,
    nats: Callable | None = None,
    **story,
):
    """Samples beneath real sets of the same sizes; way `(F, b, n, d)`: frames of the first b.

    nats: sets `(B, n, d)` → log p / n of each, or None for a page without densities.
    """
    clouds = []
    for kind, x in (("real", real), ("sample", samples)):
        for i, value in enumerate([] if x is None else densities(nats, x)):
            moves = kind == "sample" and way is not None and i < way.shape[1]
            frames = array(way[:, i] if moves else x[i][None])
            there = slice(None) if mask is None else array(mask[i])
            cloud = Cloud(frames[:, there], str(i + 1), kind, log_density=value)
            cloud.label = labels[i] if labels else None
            clouds.append(cloud)
    write(path, clouds, **story)


def densities(nats, x):
    """log p / n of each set, None where the solver found none: a page is no reason to fail."""
    try:
        return [None] * len(x) if nats is None else array(nats(x)).tolist()
    except SolverError as e:
        say(f"the page has no densities: {e}")
        return [None] * len(x)


def series_page(path: str | Path, rows: Sequence[tuple], trained: Sequence[float], **story):
    """Rows (name, kind, times, sets `(T, n, d)`); those of a model have the paper's boxes."""
    clouds = []
    for name, kind, times, sets in rows:
        x = array(sets)
        cloud = Cloud(x[:, ~np.isnan(x).all((0, 2))], str(name), kind, times=list(times))
        if kind not in viewer.GIVEN:
            cloud.boxes = [box(t, trained) for t in times]
        clouds.append(cloud)
    write(path, clouds, **story)


def box(t: float, trained: Sequence[float]) -> str | None:
    """Fig. 5: red between trained times, green beyond them, none at them."""
    if np.isclose(t, trained, rtol=0, atol=1e-9).any():
        return None
    return "red" if min(trained) < t < max(trained) else "green"


def cls_page(
    path: str | Path,
    x: Sets,
    mask: Sets | None,
    true: Sequence[str],
    predicted: Sequence[str],
    **story,
):
    """Test sets, those with a wrong prediction first."""
    x, clouds = array(x), []
    for i in sorted(range(len(x)), key=lambda i: true[i] == predicted[i]):
        there = slice(None) if mask is None else array(mask[i])
        clouds.append(Cloud(x[i, there], label=true[i], predicted=predicted[i]))
    write(path, clouds, **story)


def write(path, clouds, *, run, title, test=None, about=""):
    """The page, with what the folder of its run holds; its path goes to stderr."""
    run, results = Path(run), {}
    if test is not None:
        results = {"test": test}
    elif (run / "results.json").is_file():
        found = read_json(run / "results.json")
        results = found if isinstance(found, dict) else {"results": found}
    if (run / "config.json").is_file():
        results = {**results, "config": read_json(run / "config.json")}
    curves = read_metrics(run) if (run / "metrics.jsonl").is_file() else []
    viewer.write(path, clouds, title=title, about=about, results=results, curves=curves)
    say(f"{path}: open it in a browser, to turn and play the sets")


def array(x):
    return x.detach().cpu().numpy() if torch.is_tensor(x) else np.asarray(x)
