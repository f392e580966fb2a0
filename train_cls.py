"""Set classification, Sec. 4.2 and Table 1 of the paper.

    python train_cls.py                                    built-in shapes, no download
    python train_cls.py --data modelnet --model exnode-attention --runs 5 --cuda
    python train_cls.py --data modelnet --epochs 10 --batch-size 32 --optimizer muon \\
        --schedule one-cycle --ema 0.99 --smoothing 0.1         half an hour on one core
    python train_cls.py --data modelnet --stages 50:30,100:19:5e-4 --runs 3 --amp
    python train_cls.py --finetune runs/cls --no-augment --lr 3e-4 --epochs 8 --out runs/fine
    python train_cls.py --as results/cls-deepsets-90.json --out runs/again
    python train_cls.py --load runs/cls --evaluate --points 1000

    Table 1, four rows of models           support.models.CLASSIFIERS
    App. C.1, recipe: RK4 in one step,
    Adam 1e-3; authors' code: halved every
    20 of 120 epochs, batches of 64        the defaults; INTERVALS
    App. C.1, augmentation                 data.augment: with 1000 points or more, or --augment

Departures from the paper
- Weights are selected on held-out training sets, or with `--keep last` not at all. The test sets
  are read once, at the end, with one fixed draw of points per shape; accuracy is over all shapes,
  not a mean of batch means.
- Muon, one cycle of the learning rate, averaged weights and smoothed labels are options for when
  120 epochs are too long; docs/results.md has what they reach. The defaults are the paper's recipe.
- `--amp` computes matrix products in bfloat16, in training and in evaluations; weights, statistics,
  the state of the ODE and the loss stay in float32. Where a device lacks it, one line says so and
  all is in float32. Matching and series do not have it: in bfloat16 the matching error of the
  trained flow of chairs is 1.04 instead of 0.85.
- `--stages` trains with few points first; only the last stage is tested.
- The first layers of the baselines begin in the units of the data: their authors scale each set to
  a deviation of 1, which would hide the size of a person's own sets. ExNODE's has a batch norm.
- Before an evaluation the statistics of batch normalisation are computed anew from RENEWED training
  batches: those of training lag behind the weights, and averaged weights never had any.
- "Halved every 20 epochs" is "after each sixth of the run", so that any budget has all of it.
"""

import argparse
import copy
import itertools
import math
import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

import data
import exnode
from sets import DeepSets, SetTransformer, pool_max
from support import models, options, pages, pictures, training
from support.splits import UNLABELLED

MODEL_OPTIONS = (*options.DATA, "category", "points", "model", "valid", "seed")
TRAINING = ("augment", "valid", "smoothing", "stages", "finetune", "keep")  # not for --load
INTERVALS = 6  # of the run, each with half the learning rate of the one before
UNIT_SETS = 2000  # training sets that give the first layers their units
PAGE_SETS = 32  # of a run's page
RENEWED = 20  # batches that batch normalisation's statistics are computed from anew
KEPT = {  # numbers that a training step was seen to keep for each point; a test keeps half of them
    "exnode-deepsets": 10_000,
    "exnode-attention": 17_000,
    "deepsets": 3_000,
    "settransformer": 6_000,
}


def parse(argv=None):
    parser = options.shared("Classify sets.", "cls", epochs=120, batch_size=64)
    number = options.number
    add = parser.group("data")
    help = "Number of points in each set; if not given, 100, as in the paper beside 1000, or all"
    add("--points", type=number(int, 1, below=10**9), help=f"{help} of your own sets.")
    help = 'Classes, such as "chair,sofa", or synthetic "digits"; if not given, all.'
    add("--category", help=help)
    help = "Rotate and scale 3-D training sets; if not given, with 1000 points or more."
    add("--augment", action=argparse.BooleanOptionalAction, help=help)
    help = "Share of the training sets that is held out to select weights."
    add("--valid", type=number(float, 0, below=1), default=0.1, help=help)
    add = parser.group("the model of the paper")
    add("--model", choices=models.CLASSIFIERS, default="exnode-deepsets", help="A row of Table 1.")
    add = parser.group("ours")
    help = "Share of each label that is spread over all classes."
    add("--smoothing", type=number(float, 0, below=1), default=0.0, help=help)
    help = "Weights that are kept and tested: the best on held-out sets, or the last, which after"
    help += " one cycle of the learning rate are better than what a few hundred sets select."
    add("--keep", choices=("best", "last"), default="best", help=help)
    help = "Products in bfloat16, where the device has it; elsewhere all is in float32."
    add("--amp", action=argparse.BooleanOptionalAction, default=False, help=help)
    help = "Train in stages, each from the best weights of the one before: points:epochs or"
    help += " points:epochs:lr for each, such as 50:30,100:19:5e-4. Only the last is tested."
    add("--stages", type=stages, metavar="N:E,N:E:LR", help=help)
    help = "Start from the best weights of a RUN, whose data and model options are the defaults."
    add("--finetune", type=options.path, metavar="RUN", help=help)
    add = parser.group("from a finished run")
    add("--evaluate", action="store_true", help="Only test the best weights of --load RUN.")
    help = "Write the probability of each class for each of your own sets at PATH."
    add("--score", type=options.path, metavar="PATH", help=help)
    help = "With --evaluate, test the last weights in place of the best."
    add("--last", action="store_true", help=help)
    return check(parser, parser.parse_args(argv), argv)


def stages(text):
    """An argparse type: the text itself, if `parse_stages` can read it."""
    parse_stages(text)
    return text


def parse_stages(text):
    """[(points, epochs, lr or None), …] of "points:epochs,points:epochs:lr"."""
    count, rate = options.number(int, 1, below=10**9), options.number(float, 0, below=1e38)
    found = []
    for part in text.split(","):
        points, epochs, *rest = part.split(":")
        (lr,) = map(rate, rest) if rest else [None]
        found.append((count(points), count(epochs), lr))
    return found


def check(parser, args, argv):
    """Options that go together, and those that come from another run."""
    if args.recipe is not None:
        return options.repeat(parser, args, argv)
    if args.evaluate + (args.score is not None) != bool(args.load):
        parser.error("--load RUN goes with one of --evaluate and --score PATH")
    if args.last and not args.evaluate:
        parser.error("--last goes with --load RUN and --evaluate")
    if args.finetune and (args.load or args.runs > 1):
        parser.error("--finetune RUN trains one run: leave out --load and --runs")
    if args.load:
        args = options.parse_finished(args.load, parser, argv, more=TRAINING)
    elif options.goes_on(args):
        args = options.parse_as_in(args.out, parser, argv)
    elif args.finetune:
        args = options.parse_as_in(args.finetune, parser, argv, MODEL_OPTIONS)
    options.check_data(parser, args, data.NAMES)
    if args.stages and not args.load:
        points, epochs, _ = parse_stages(args.stages)[-1]
        known = (args.points, args.epochs) == (points, epochs)  # of a run that goes on or again
        names = ("minutes",) if known else ("points", "epochs", "minutes")
        options.refuse(parser, args, names, "is for one stage: --stages has its own")
        args.points, args.epochs = points, epochs
    return args


def check_memory(args, world, points):
    """An error if a batch at once takes more memory than there is."""
    sets = args.batch_size // world.size
    kept = KEPT[args.model]
    if world.amp and args.model == "exnode-attention":  # four n x n matrices for each of four heads
        kept += 8 * points
    need = 4 * kept * sets * points // (2 if args.load else 1)
    training.check_memory(need, world, f"{sets} sets of {points} points at once")


def load_sets(args):
    which = {"category": args.category, "points": points(args), "seed": args.seed}
    how = {"task": "classify", "valid": args.valid, "augment": args.augment}
    splits = data.load(args.data, args.root, **which, **how, **options.own_data(args))
    if len(splits.train.classes) < 2:
        classes = splits.train.classes
        fault = "no labels" if classes == UNLABELLED else f"one class only, {classes[0]}"
        raise training.UsageError(f"--data {args.data}: {fault}")
    return splits


def points(args):
    """In each set; None for all of a person's own."""
    return args.points or (100 if args.data in data.NAMES else None)


def load_checked(args, world):
    """The splits, if a batch of their sets fits in memory."""
    if args.points:  # before they are drawn
        check_memory(args, world, args.points)
    splits = load_sets(args)
    check_memory(args, world, data.span(splits.train.points)[1])
    return splits


def make_model(args, split):
    return models.build(vars(args), split.dim, len(split.classes))


@torch.no_grad()
def confusion_matrix(model, split, batch_size, world):
    """Counts (true, predicted) over all sets of a split, and the mean loss."""
    size, loss = len(split.classes), torch.zeros((), dtype=torch.float64, device=world.device)
    counts = torch.zeros(size * size, dtype=torch.int64, device=world.device)
    for batch in data.batches(split, batch_size, training=False, workers=1, **world.share):
        with world.autocast():
            logits = model(batch.x, batch.mask).float()
        pair = batch.label * size + logits.argmax(-1)
        counts += torch.bincount(pair, minlength=size * size)
        loss += F.cross_entropy(logits, batch.label, reduction="sum")
    loss = world.sum(loss).item() / len(split)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss of {len(split)} sets is {loss}, so the weights are bad")
    return world.sum(counts).view(size, size).cpu(), loss


def test_metrics(model, split, batch_size, world):
    counts, loss = confusion_matrix(model, split, batch_size, world)
    hits, sets = counts.diagonal().tolist(), counts.sum(1).tolist()
    per_class = {name: h / n if n else None for name, h, n in zip(split.classes, hits, sets)}
    tested = [accuracy for accuracy in per_class.values() if accuracy is not None]
    return {
        "accuracy": sum(hits) / sum(sets),
        "class_accuracy": sum(tested) / len(tested),
        "loss": loss,
        "per_class": per_class,
        "confusion": counts.tolist(),
    }


def renew_statistics(model, batches, world):
    """Batch normalisation as the weights now have it, from RENEWED training batches."""
    some = itertools.islice(batches(0, 0), RENEWED)
    with world.autocast():
        training.renew_statistics(model, some, lambda model, batch: model(batch.x, batch.mask))


def train(args, world):
    """Each of --stages from the best weights of the one before; the last is selected and tested."""
    *before, last = each_stage(args)
    found = []
    for stage in before:
        with training.directory(stage, world, "best") as results:
            found.append(results or train_stage(stage, world)[0].finish(None))
    run, test = train_stage(last, world)
    metrics = test_metrics(run.model, test, args.batch_size, world)
    training.say(f"test accuracy {metrics['accuracy']:.4f}")
    if world.rank == 0:
        draw_confusion(Path(args.out) / "confusion.png", metrics, args.model)
        draw_page(Path(args.out) / "view.html", args, run.model, test, metrics)
    run.args = args  # its results are those of all stages
    earlier = [{k: results[k] for k in ("best", "epochs", "seconds")} for results in found]
    return run.finish(metrics, test_sets=len(test), **({"earlier": earlier} if earlier else {}))


def each_stage(args):
    """The options of each stage: a run in a folder of its own, the last of them in --out itself."""
    if not args.stages:
        return [args]
    found = []
    for k, (points, epochs, lr) in enumerate(parse_stages(args.stages), 1):
        stage = copy.copy(args)
        stage.points, stage.epochs, stage.lr = points, epochs, args.lr if lr is None else lr
        stage.finetune = found[-1].out if found else args.finetune
        stage.stages, stage.out = None, str(Path(args.out) / f"stage{k}")
        found.append(stage)
    stage.stages, stage.out = args.stages, args.out
    return found


def train_stage(args, world):
    """The Run, with its best weights, and the test sets, which nothing has read."""
    splits = load_checked(args, world)
    if world.rank == 0:
        training.write_sets(args.out, splits.train)
    batches = data.epochs(splits.train, args.batch_size, args.seed, **world.share)

    def start(model):
        if args.finetune:
            training.load_best(model, args.finetune)
        elif args.data not in data.NAMES or not isinstance(model, exnode.SetClassifier):
            start_in_units(model, *splits.train.batch(UNIT_SETS)[:2])

    def loss(model, batch):
        with world.autocast():
            logits = model(batch.x, batch.mask).float()
        return F.cross_entropy(logits, batch.label, label_smoothing=args.smoothing)

    def evaluate(model):
        renew_statistics(model, batches, world)
        counts, loss = confusion_matrix(model, splits.valid, args.batch_size, world)
        return {"valid_accuracy": counts.trace().item() / len(splits.valid), "valid_loss": loss}

    make, steps = partial(make_model, args, splits.train), data.steps(splits.train, args.batch_size)
    run = training.begin(args, world, make, start, steps, INTERVALS)
    run.fit(loss, batches, evaluate, best="valid_accuracy", keep=args.keep)
    if world.rank == 0:
        draw_curves(Path(args.out), args.model)
    return run, splits.test


def start_in_units(model, x, mask):
    """The layers that see points begin in their units: as the baselines' authors scale each set."""
    if isinstance(model, DeepSets):
        models.start_in_units(model.layers[0], x - pool_max(x, mask).values, mask)
    elif isinstance(model, SetTransformer):
        first = model.blocks[0]
        for layer in (first.gather.k, first.gather.v, first.spread.q):
            models.start_in_units(layer, x, mask)
    else:
        models.start_in_units(model.expand[0], x, mask)


def draw_curves(out, title):
    """curves.png in the run directory."""
    names = ("loss", "valid_loss", "valid_accuracy")
    series = {name.replace("_", " "): training.curve(out, name, over="epoch") for name in names}
    pictures.write_png(out / "curves.png", pictures.curves(series, "epoch", title=title))


def draw_confusion(path, metrics, title):
    title = f"{title}: accuracy {metrics['accuracy']:.4f}"
    matrix = pictures.confusion(metrics["confusion"], list(metrics["per_class"]), title)
    pictures.write_png(path, matrix)


@torch.no_grad()
def draw_page(path, args, model, split, test):
    """Some test sets with their true and predicted labels, as a page."""
    few, device = split.some(min(PAGE_SETS, args.batch_size)), next(model.parameters()).device
    batch = few.batch(device=device)
    names = [few.classes[k] for k in model(batch.x, batch.mask).argmax(-1)]
    how = {"run": args.load or args.out, "test": test}
    title = f"{Path(args.out).name}: {args.model} on test sets of {args.data}"
    pages.cls_page(path, batch.x, batch.mask, few.label_names, names, title=title, **how)


def evaluate_only(args):
    world = training.connect(args)
    splits = load_checked(args, world)
    if list(splits.test.classes) != (known := class_names(args)):
        names = (", ".join(classes)[:50] for classes in (known, splits.test.classes))
        fault = "classes {}, but the sets are of {}".format(*names)
        raise training.UsageError(f"--load {args.load}: a model of the {fault}")
    model = make_model(args, splits.test)
    (training.load_last if args.last else training.load_best)(model, args.load)
    model.to(world.device).eval()
    if args.last:  # the best have their statistics from the evaluation that found them
        batches = data.epochs(splits.train, args.batch_size, args.seed, **world.share)
        renew_statistics(model, batches, world)
    test = test_metrics(model, splits.test, args.batch_size, world)
    training.say(f"test accuracy {test['accuracy']:.4f}")
    results = training.write_evaluation(test, args, world)
    if world.rank == 0:
        draw_confusion(Path(args.out) / "evaluation.png", test, args.model)
        draw_page(Path(args.out) / "evaluation.html", args, model, splits.test, test)
    return results


def score(args):
    """--score PATH: a CSV with the probability of each class for every set there."""
    world, model = training.connect(args), load_model(args)
    split = data.load_all(args.score, args.data, points=points(args), **options.own_data(args))
    classes = class_names(args)
    if split.dim != model.in_dim:
        raise training.UsageError(
            f"--score {args.score}: {split.dim}-D, the model {model.in_dim}-D"
        )
    check_memory(args, world, int(split.sizes.max()))
    model.to(world.device)
    batches = data.batches(split, args.batch_size, training=False, device=world.device)
    total = data.steps(split, args.batch_size, training=False)
    with torch.no_grad(), world.autocast():
        watched = training.watch("sets", batches, total)
        parts = [model(b.x, b.mask).float().softmax(-1) for b in watched]
    shares = torch.cat(parts).cpu()
    best = [classes[k] for k in shares.argmax(-1)]
    rows = zip(split.names, split.label_names, split.sizes.tolist(), best, *shares.T.tolist())
    rows = [row for _, row in sorted(zip(split.index, rows))]  # as in the file
    head = ("name", "label", "points", "predicted", *classes)
    path = training.write_table(args.out, f"scores-{Path(args.score).stem}.csv", head, rows)
    training.say(f"{path}: {len(split)} sets")
    return {"names": split.names, "classes": classes, "probabilities": shares}


def load_model(args):
    """The trained classifier of --load RUN."""
    kinds = exnode.SetClassifier, DeepSets, SetTransformer
    return training.load_model("--load", args.load, exnode.load, kinds, "of a classifier")


def class_names(args):
    """The names of a run's classes: those in its sets.json, or of the data that it names."""
    if found := training.read_sets(args.load):
        return list(found["sizes"])
    config = training.read_config(args.load)
    return list(data.class_names(config.get("data", args.data), "classify", config.get("category")))


def main(argv=None):
    """The results, also printed: of one run, of --runs, of --evaluate or of --score."""
    args = parse(argv)
    if args.recipe:
        return [main(words) for words in args.recipe][-1]
    if args.score is not None:
        return score(args)
    if args.evaluate:
        return evaluate_only(args)
    return training.in_directory(args, train, "accuracy")


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
