"""The pictures of series, as in Figures 5 to 8 of the paper.

    Fig. 5, 6, samples, red and green    draw_samples: samples.png, moving.png; pages.box
    Fig. 7, conditional samples          draw_reconstructions: reconstructions.png
    Fig. 8, interpolation of z₀          draw_latent: latent.png

x is `(B, T, n, d)`, NaN where there is no point. A row of a picture is (label, times, sets).
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
from support import pages, pictures, training
from support.series import (
    at_times,
    draw_series,
    full_mask,
    is_own,
    moving,
    observed_series,
    spread,
    tested_times,
    usual_times,
    with_nan,
)


def draw_rows(path, rows, trained, title):
    """Rows (label, times, sets (T, n, d)): of the model, in boxes, if the label is not in grey."""
    middle, limits = window(*(sets for _, _, sets in rows))
    titles = [[f"t = {t:.4g}" for t in times] for _, times, _ in rows]
    grey = [label in ("true", "given") for label, _, _ in rows]
    frames = [[None if g else pages.box(t, trained) for t in row[1]] for g, row in zip(grey, rows)]
    picture = pictures.point_grid(
        [[as_seen(x, middle) for x in sets] for _, _, sets in rows],
        titles=titles[0] if all(t == titles[0] for t in titles) else titles,
        row_labels=[label for label, _, _ in rows],
        frames=frames,
        title=title,
        colours=["grey" if g else "blue" for g in grey],
        limits=limits,
    )
    pictures.write_png(path, picture)


def draw_moving(path, x, times, trained, title, across=6):
    """An animation of series x (B, T, n, d): a frame for each time."""
    (middle, limits), images = window(x), []
    for k, t in enumerate(times):
        sets = [as_seen(series[k], middle) for series in x]
        rows = [sets[i : i + across] for i in range(0, len(x), across)]
        frames = [[pages.box(t, trained)] * len(row) for row in rows]
        head = f"{title}, t = {t:.2f}"
        images.append(pictures.point_grid(rows, frames=frames, title=head, limits=limits))
    pictures.write_apng(path, images, [0.1] * (len(images) - 1) + [1.0])


def as_seen(x, middle):
    """The points of a set (n, d) as pictures show them, in two or three axes; None if none."""
    return pictures.as_seen(x - middle)


def window(*sets):
    """The mean of all points, and (−a, a) about it that holds all but a hundredth, with room."""
    points = np.concatenate([s.reshape(-1, s.shape[-1]) for s in sets])
    middle = np.nanmean(points, 0)
    a = 1.2 * float(np.nanquantile(np.abs(points - middle), 0.99)) or 1.0
    return middle, (-a, a)


def draw_run(args, model, test, draws):
    """All pictures of a run, in --out."""
    out = Path(args.out)
    draw_curves(out, args)
    draw_samples(out, args, model, draws)
    draw = draw_own_reconstructions if is_own(args) else draw_reconstructions
    draw(out, args, model, test, draws)


@torch.no_grad()
def draw_page(path, args, model, split, draws, test):
    """Test series, what the model makes of them at any time, and samples, as a page."""
    few, run = split.some(4), args.load or args.out
    if is_own(args):
        batch = few.batch(device=draws.device)
        z0, true = model.encode(batch.x, batch.t, batch.mask).mean, observed_series(batch)
        known, points = usual_times(run), batch.x.shape[-2]
        trained = at = np.unique(np.linspace(known[0], known[-1], 29).round(9)).tolist()
    else:
        trained, points = args.times, args.points
        at = np.linspace(trained[0], trained[-1] + 0.5, 31).round(9).tolist()
        x, truth = (at_times(few, t).draw(np.arange(len(few)))[0] for t in (trained, at))
        z0, true = model.encode(x, trained).mean, [(at, series) for series in truth]
    made = model.decode(z0, at, **moving(args, draws) | {"points": points}).cpu().numpy()
    rows = [(k, "true", *series) for k, series in enumerate(true, 1)]
    rows += [(k, "model", at, sets) for k, sets in enumerate(made, 1)]
    samples = draw_series(args, model, run, 8, at, draws)
    rows += [(k, "sample", at, sets) for k, sets in enumerate(samples, 1)]
    title = f"{Path(args.out).name}: test series of {args.data}, and what the model makes of them"
    pages.series_page(path, rows, trained, run=run, test=test, title=title)


def draw_curves(out, args):
    """curves.png: ELBO, KL and loss, one above the other."""
    line, objective = partial(training.curve, out), args.objective
    units = "the units of the file" if is_own(args) else "pixels"
    held = {"ELBO": line("valid_elbo"), "log-likelihood": line("valid_log_likelihood")}
    panels = [(held, "nats per point", f"held-out series, in {units}")]
    panels += [({"KL": line("valid_kl")}, "nats per series", "held-out series")]
    panels += [({"loss": line("loss")}, objective, f"training by --objective {objective}")]
    images = [pictures.curves(s, "step", y, title, size=(720, 260)) for s, y, title in panels]
    pictures.write_png(out / "curves.png", np.concatenate(images))


def draw_samples(out, args, model, draws):
    """samples.png and moving.png: series from the prior."""
    if is_own(args):
        at, title = usual_times(out), "samples"
        trained = fine = np.unique(np.linspace(at[0], at[-1], 29).round(9)).tolist()
    else:
        trained, at = args.times, tested_times(args.times)
        title = "samples; red: between trained times, green: beyond"
        fine = np.linspace(trained[0], trained[-1] + 0.5, 31).round(9).tolist()
    x = draw_series(args, model, out, 6, at, draws)
    rows = [(str(i + 1), at, sets) for i, sets in enumerate(x)]
    draw_rows(out / "samples.png", rows, at if is_own(args) else trained, title)
    x = draw_series(args, model, out, 12, fine, draws)
    draw_moving(out / "moving.png", x, fine, trained, "samples")


@torch.no_grad()
def draw_reconstructions(out, args, model, split, draws):
    """reconstructions.png and latent.png: of the first test series of (up to) four classes."""
    trained, at = args.times, tested_times(args.times)
    _, first = np.unique(split.labels[split.index], return_index=True)
    first = first if len(first) > 1 else np.arange(len(split))
    truth = at_times(split, at).draw(first[spread(len(first), 4)])[0]
    x = torch.from_numpy(truth[:, [at.index(t) for t in trained]]).to(draws.device)
    z0 = model.encode(x, trained).mean
    x = model.decode(z0, at, **moving(args, draws)).cpu().numpy()
    pairs = [(("true", at, a), ("model", at, b)) for a, b in zip(truth, x)]
    title = "test series, and what the model makes of their sets at times without a box"
    draw_rows(out / "reconstructions.png", [row for pair in pairs for row in pair], trained, title)
    ends = [("true", at, truth[k]) for k in (0, -1)]
    draw_latent(out, model, z0, at, trained, ends, moving(args, draws))


@torch.no_grad()
def draw_own_reconstructions(out, args, model, split, draws):
    """reconstructions.png and latent.png of (up to) four of a person's own test series."""
    few = split.some(4)
    batch = next(data.batches(few, len(few), training=False, device=draws.device))
    mask = full_mask(batch)
    z0 = model.encode(batch.x, batch.t, mask).mean
    how = {**moving(args, draws), "points": mask.shape[-1]}
    made = with_nan(model.decode(z0, batch.t, mask=mask, **how), mask)
    truth, t = with_nan(batch.x, mask), batch.t.expand(mask.shape[:2]).tolist()
    rows, known = [], [time for times in t for time in times]
    for i, seen in enumerate(mask.any(-1).cpu().numpy()):
        pick = np.flatnonzero(seen)[spread(seen.sum(), 5)]
        times = [t[i][k] for k in pick]
        rows += [("true", times, truth[i, pick]), ("model", times, made[i, pick])]
    title = "test series, and what the model makes of them"
    draw_rows(out / "reconstructions.png", rows, known, title)
    at = usual_times(out)
    draw_latent(out, model, z0, at, known + at, (rows[0], rows[-2]), how)


def draw_latent(out, model, z0, at, trained, ends, how):
    """latent.png: z₀ on a line between those of two series, whose rows are `ends`."""
    share = torch.linspace(0, 1, 6, device=z0.device)[:, None]
    x = model.decode(torch.lerp(z0[:1], z0[-1:], share), at, **how).cpu().numpy()
    rows = [(f"{a:.1f}", at, sets) for a, sets in zip(share[:, 0].tolist(), x)]
    title = "z0 on the line between those of two test series"
    draw_rows(out / "latent.png", [ends[0], *rows, ends[1]], trained, title)
