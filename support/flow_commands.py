"""What a finished run of train_flow.py does beside its test: --sample K and --score PATH."""

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import data
import exnode
from support import flow_pictures, flows, options, own_sets, pages, training
from support.files import write_whole
from support.splits import UNLABELLED


def sizes_of(args):
    """Sizes of the training sets of --load RUN by class, {} where it has no sets.json."""
    found = training.read_sets(args.load)
    if found is None and args.condition == "label":
        raise training.UsageError(f"--load {args.load}: no sets.json, which names its labels")
    return found["sizes"] if found else {}


def check_context(model, size, where):
    """An error if a flow is not conditioned on `size` numbers for each set."""
    if size != (wanted := model.blocks[0].field.context):
        fault = f"{size} numbers for a set, where the flow is conditioned on {wanted}"
        raise training.UsageError(f"{where}: {fault}")


# ---------------------------------------------------------------------------------------- samples
def sample(args):
    """--sample K: sets as .npy (NaN where there is no point), .npz, .ply and PNG in --out."""
    world, model = training.connect(args), flows.read_run(args)
    model.to(world.device)
    least = 4 * args.sample * (args.points or 1) * model.dim
    flows.check_memory(args, world, args.points or 1, 1, least)  # before sizes are drawn
    sizes, context = choose_sets(args, model)
    points = int(sizes.max())
    at_once, whole = min(args.sample, -(-exnode.PIECE // points)), 4 * args.sample * points
    flows.check_memory(args, world, points, at_once, whole * model.dim)
    mask = torch.arange(points) < torch.from_numpy(sizes)[:, None]
    there = None if mask.all() else mask.to(world.device)
    name = Path(args.out) / f"samples-{args.sample}x{args.points or points}-seed{args.seed}"
    training.make_folder(args.out)
    begun = time.monotonic()
    sets = flows.draw_sets(args, model, args.sample, points, there, context).cpu()
    seconds = (time.monotonic() - begun) / args.sample
    write_samples(name, sets, mask)
    flow_pictures.draw_samples(f"{name}.png", flow_pictures.as_seen(sets[:27], mask[:27]))
    training.say(f"{name}.npy, .npz and .png: {seconds:.3g} s per set")
    way = None
    if args.path:
        drawn = args.sample, points, there, context
        way = flow_pictures.draw_path(f"{name}-path", args, model, *drawn)
        training.say(f"{name}-path.png and -path-moving.png: from noise to data")
    labels = None
    if args.condition == "label":
        labels = [list(sizes_of(args))[k] for k in context.argmax(-1)]
    title = f"{args.sample} samples of {Path(args.load).name}"
    how = {"way": way, "labels": labels, "run": args.load, "title": title}
    pages.flow_page(f"{name}.html", sets, mask, **how)
    return {"samples": sets, "mask": mask, "seconds_per_sample": seconds}


def choose_sets(args, model):
    """Sizes `(K,)` and conditions `(K, c)` or None of --sample K sets.

    Sizes are --points, or drawn from those of the training sets, of the same label if there is one.
    """
    every, rng = sizes_of(args), np.random.default_rng(args.seed)
    names, counts = list(every), [sum(n for _, n in pairs) for pairs in every.values()]
    if args.label is not None and not every.get(args.label):
        there = ", ".join(name for name in names if every[name]) or "none"
        raise training.UsageError(f"--label {args.label}: there are {there}")
    label = rng.choice(len(names), args.sample, p=np.divide(counts, sum(counts))) if names else None
    if args.label is not None:
        label = np.full(args.sample, names.index(args.label))
    usual = data.POINTS["mnist" if model.dim == 2 else "modelnet"]["flow"]
    sizes = np.full(args.sample, args.points or usual)
    if names and not args.points:
        pairs = [np.array(every[names[k]]) for k in label]
        sizes = np.array([rng.choice(p[:, 0], p=p[:, 1] / p[:, 1].sum()) for p in pairs])
    if args.condition == "label":
        return sizes, F.one_hot(torch.from_numpy(label), len(names)).to(model.mean)
    if args.context:
        check_context(model, len(args.context), "--context")
    given = args.context and torch.tensor([args.context] * args.sample).to(model.mean)
    return sizes, given


def write_samples(name, sets, mask):
    """NAME.npy, NAME.npz with x and mask, and, in 3-D, a folder NAME with a PLY file for each."""
    x = sets.masked_fill(~mask[..., None], math.nan).numpy()
    write_whole(f"{name}.npy", lambda f: np.save(f, x))
    arrays = {"x": sets.numpy(), "mask": mask.numpy()}
    write_whole(f"{name}.npz", lambda f: np.savez(f, **arrays))
    if x.shape[-1] == 3:
        training.make_folder(name)
        for i, points in enumerate(flow_pictures.as_arrays(sets, mask), 1):
            own_sets.write_ply(name / f"{i:0{len(str(len(x)))}}.ply", points)


# ----------------------------------------------------------------------------------------- scores
def score(args):
    """--score PATH: a CSV with log p of every set there, the smallest first."""
    world, model = training.connect(args), flows.read_run(args)
    split = data.load_all(args.score, args.data, points=args.points, **options.own_data(args))
    if split.dim != model.dim:
        raise training.UsageError(f"--score {args.score}: {split.dim}-D, the model {model.dim}-D")
    sizes, sets = split.sizes, args.batch_size // world.size
    flows.check_memory(args, world, int(sizes.max()), sets, pairs=True)
    label = split.label_names
    split = with_conditions(args, model, split, f"--score {args.score}")
    values = flows.log_probs(
        args, model.to(world.device), split, world, flows.dopri5(args.tolerance)
    )
    known = training.test_quantiles(args.load)
    share = [""] * len(values) if known is None else np.interp(values, known, np.arange(101))
    rows = zip(split.names, label, sizes.tolist(), values * sizes, values, share)
    rows = sorted(rows, key=lambda row: row[4])
    head = ("name", "label", "points", "log_p", "nats_per_point", "percentile")
    path = training.write_table(args.out, f"scores-{Path(args.score).stem}.csv", head, rows)
    training.say(f"{path}: {len(values)} sets, {values.mean():.4f} nats per point on average")
    if known is None:
        training.say("percentiles are left out: --load RUN has no results.json of a test")
    else:
        area = f"area under the curve {1 - share.mean() / 100:.3f}"
        training.say(f"on average at percentile {share.mean():.1f} of the test sets: {area}")
    return {"names": split.names, "nats_per_point": values, "points": sizes}


def with_conditions(args, model, split, where):
    """A split that has what the flow is conditioned on, its labels numbered as in the run."""
    if args.condition == "context":
        if split.context is None:
            raise training.UsageError(f"{where}: no context, which the flow needs")
        check_context(model, split.context.shape[1], where)
    if args.condition != "label":
        return split
    names = list(sizes_of(args))
    if split.classes == UNLABELLED:
        raise training.UsageError(f"{where}: no labels, which the flow needs")
    if strange := sorted(set(split.classes) - set(names)):
        raise training.UsageError(f"{where}: no class {strange[0]!r} in {args.load}")
    number = np.array([names.index(name) for name in split.classes])
    return replace(split, labels=number[split.labels], classes=tuple(names))
