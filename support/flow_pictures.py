"""The pictures of a set flow: its learning curve, samples beside real sets, noise becoming data.

`draw_page` shows the latter two as a page to turn and play them in.
"""

from pathlib import Path

import torch

import exnode
from sets import count
from support import flows, pages, pictures, training

PAGE_SETS, PAGE_FRAMES = 8, 13  # of a run's page: samples, and times on their way from noise


def draw_run(args, model, test):
    """The pictures of a run: curves.png, samples.png, path.png and path-moving.png."""
    out = Path(args.out)
    series = {"validation": training.curve(out, "valid_ppll")}
    curve = pictures.curves(series, "step", "PPLL, nats per point")
    pictures.write_png(out / "curves.png", curve)
    draw_beside(out / "samples.png", args, model, test)
    batch = test.batch(5, model.mean.device)
    given = flows.condition(args, model, batch)
    draw_path(out / "path", args, model, *batch.x.shape[:2], batch.mask, given)


def draw_beside(path, args, model, test):
    """Nine real sets, and eighteen samples, as large as those and nine others, beneath."""
    real, mask, samples = flows.draw_like(args, model, test.some(18))
    draw_samples(path, as_seen(samples, mask), as_seen(real, mask)[:9])


def draw_samples(path, samples, real=None):
    """Rows of samples, nine or, of many points, fewer and larger, beneath as many real sets."""
    across, cell = (9, 112) if max(map(len, samples)) <= 1024 else (4, 252)
    rows = [samples[i : i + across] for i in range(0, len(samples), across)]
    labels, colours = ["samples"] + [""] * (len(rows) - 1), ["blue"] * len(rows)
    if real is not None:
        rows, labels, colours = [real, *rows], ["real", *labels], ["grey", *colours]
    grid = pictures.point_grid(rows, row_labels=labels, colours=colours, cell=cell)
    pictures.write_png(path, grid)


def draw_path(name, args, model, sets, points, mask=None, context=None):
    """How the first five of `flows.draw_sets` come from noise: two pictures, and the paths."""
    generator = torch.Generator().manual_seed(args.seed)
    z = exnode.normal((sets, points, model.dim), model.mean, generator)
    z, mask, context = (a if a is None else a[:5] for a in (z, mask, context))
    at = paths(model, z, 25, mask, context, flows.sampler(args))  # (frames, sets, n, d)
    seen = [as_seen(frame, mask) for frame in at]
    rows = [[frame[i] for frame in seen[::3]] for i in range(len(z))]
    names = [f"{k / 8:.2f}" for k in range(9)]
    grid = pictures.point_grid(rows, names, title="from noise to data, over time")
    pictures.write_png(f"{name}.png", grid)
    limits = (float(at[0].min()), float(at[0].max()))
    frames = [pictures.point_grid([frame], limits=limits, cell=160) for frame in seen]
    hold = [frames[0]] * 4 + frames + [frames[-1]] * 12
    pictures.write_apng(f"{name}-moving.png", hold, 0.08)
    return at


@torch.no_grad()
def paths(model, z, frames, mask=None, context=None, solver=None):
    """Where points are on the way from noise to data: `(frames, ...)`, in the units of data."""
    at, blocks = [z], len(model.blocks)
    s = torch.linspace(1, 0, frames).tolist()
    for start, end in zip(s, s[1:]):  # in time of the whole chain, block i owning [i, i + 1] / K
        for i in reversed(range(blocks)):
            high, low = min(start * blocks - i, 1.0), max(end * blocks - i, 0.0)
            if high > low:
                block = model.blocks[i]
                times = (high * block.t1, low * block.t1)
                z = block.integrate(z, times, mask, context, solver)
        at.append(z)
    return torch.stack([model.from_units(z) for z in at])


@torch.no_grad()
def draw_page(path, args, model, split, found):
    """Real sets beside samples on their way from noise, with their densities, as a page."""
    few = split.some(min(PAGE_SETS, args.batch_size))
    batch = few.batch(len(few), model.mean.device)
    x, mask, given = batch.x, batch.mask, flows.condition(args, model, batch)
    z = exnode.normal(x.shape, model.mean, torch.Generator().manual_seed(args.seed))
    way = paths(model, z, PAGE_FRAMES, mask, given, flows.sampler(args))

    def nats(x):
        noise = torch.Generator(x.device).manual_seed(args.seed)
        how = {"solver": flows.dopri5(max(args.tolerance, 1e-3)), "generator": noise}
        log_p = model.log_prob(x, mask, given, **how, **flows.test_trace(args))
        return log_p / count(x, mask) + split.log_unit

    labels = few.label_names if args.condition == "label" else None
    title = f"{Path(args.out).name}: sets of {args.data}, and samples of a flow"
    how = {"way": way, "real": x, "labels": labels, "nats": nats, "test": found}
    pages.flow_page(path, way[-1], mask, run=args.load or args.out, title=title, **how)


def as_seen(x, mask=None):
    """Tensors of sets as pictures show them."""
    return [pictures.as_seen(points) for points in as_arrays(x, mask)]


def as_arrays(x, mask=None):
    """The points that each set of x has, as arrays."""
    x = x.cpu().numpy()
    return list(x) if mask is None else [one[there] for one, there in zip(x, mask.cpu().numpy())]
