"""Densities and samples of sets, Sec. 4.3 and Table 2 of the paper.

    python train_flow.py                                            built-in sets, no download
    python train_flow.py --data modelnet --category chair --cuda    the paper's experiment
    python train_flow.py --data mnist --objective matching          without a solver in the loop
    python train_flow.py --finetune runs/flow --out runs/fine       then by likelihood, or again by
                                                                    --objective matching
    python train_flow.py --as results/flow-chair-paper.json         a run again, with all its stages
    python train_flow.py --load runs/flow --sample 9 --points 4096  more points than in training
    python train_flow.py --load runs/flow --evaluate

    Table 2, PPLL in the paper's units            ppll, Split.log_unit
    Fig. 3, samples beside real sets              draw_run: samples.png
    Fig. 4, more points than in training          --sample K --points N
    App. C.2, recipe: 12 blocks, dopri5 at 1e-5,
    Adam 1e-3, halved every 100 epochs, batches
    of 128; authors' code: 1000 epochs            the defaults; INTERVALS

PPLL is log p(x₁, …, xₙ) / n of an ordered set, in nats; for SpatialMNIST in units of pixels, for
ModelNet of the scaled shape. Bits per dimension are −PPLL / (d ln 2) in the same units.

Departures from the paper
- `--objective matching` regresses the same field on straight paths from data to noise. It puts
  data into units of their own mean and deviation first (`SetFlow.standardise`). `--spare` lowers
  the variance of its targets by more points of each shape, and a chain's weights begin at the scale
  of the noise that each block owns (`start_at_scale`): `beyond/matching.py`.
- The test likelihood has the exact trace, or for the transformer, which has no shortcut to it,
  Hutchinson's unbiased estimate with --probes probes, unless --trace says otherwise.
- Weights are selected on held-out training sets, of which about VALID_POINTS points are read, by
  dopri5 at a tolerance of 1e-3 at the tightest. The test sets are read once, at the end, by dopri5
  at --tolerance, whatever --method training has: fixed steps have errors of their own, which
  training through them could exploit. `tolerance_error` beside a test's PPLL is by how many nats
  per point a set is off at that tolerance: the most among CHECKED_SETS, solved at a hundredth.
- Samples of a flow trained by matching, whose paths are nearly straight, are solved by a few
  steps of rk4, which come as close to the solution as dopri5 at 1e-3: support/flows.py.
- "Halved every 100 epochs" is "after each tenth of the run", so that any budget has all of it.
- A transformer field, its view, Muon and averaged weights are options; what they gain is in
  docs/trials.md. By matching or Muon, a chain's output layers learn in proportion to their sizes.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import data
import exnode
from beyond.likelihood import sampled_log_prob
from beyond.matching import COUPLINGS, in_proportion, matching_loss, start_at_scale
from beyond.transformer import deepen
from sets import count
from solvers import SolverError, Stats
from support import metrics, models, options, training
from support.flow_commands import sample, score, with_conditions
from support.flow_pictures import draw_beside, draw_page, draw_run
from support.flows import (
    check_memory,
    condition,
    dopri5,
    draw_like,
    log_probs,
    read_run,
    test_trace,
)

FIELDS = ("attention", "deepsets", "transformer")
INTERVALS = 10  # of the run, each with half the learning rate of the one before
VALID_POINTS = 6400  # points, of all sets together, in an evaluation
SCORE_SETS = 1000  # samples that are scored at the end
UNIT_SETS = 2000  # training sets that give a flow its units
CHECKED_SETS = 8  # test sets that are solved once more, at a hundredth of the tolerance
ADVICE = "on a CPU, --objective matching trains the same model without a solver in the loop"
ONLY_WITH = {  # options that would otherwise do nothing
    "steps": ("method", "rk4", "rk5"),
    "gradient": ("objective", "likelihood"),
    "method": ("objective", "likelihood"),
    "coupling": ("objective", "matching"),
    "finest": ("objective", "matching"),
    "spare": ("coupling", "none"),
    "heads": ("field", "attention", "transformer"),
    "time": ("field", "attention", "deepsets"),
    "fine": ("field", "transformer"),
    "probes": ("trace", None, "hutchinson"),
    "amp": ("trace", "sampled"),
}
TRAINING = (
    "objective", "finetune", "gradient", "method", "steps", "coupling", "finest", "spare", "clip",
    "amp",
)  # fmt: skip
MODEL_OPTIONS = ("blocks", "hidden", "heads", "field", "time", "fine", "condition")


def parse(argv=None):
    usual = {"epochs": 1000, "batch_size": 128, "every": 250}
    parser = options.shared("Model the density of sets.", "flow", **usual)
    number = options.number
    add = parser.group("data")
    help = "Number of points in each set; if not given, 50 on mnist and 512 on modelnet, as in the"
    add("--points", type=number(int, 1, below=10**10), help=f"{help} paper.")
    help = 'Class of the sets, such as "chair"; if not given, all, or synthetic digits.'
    add("--category", help=help)
    help = "Number of test sets that are read at the end; if not given, all."
    add("--test-sets", type=number(int, 2), help=help)
    help = "Condition the flow on the label of a set, or on the context that your own sets have."
    add("--condition", choices=("label", "context"), help=help)
    add = parser.group("the model of the paper")
    help = "Vector field of each block; the transformer is ours."
    add("--field", choices=FIELDS, default="attention", help=help)
    help = "Number of blocks in the chain."
    add("--blocks", type=number(int, 1, below=1000), default=12, help=help)
    help = "Widths of a field's layers."
    add("--hidden", type=options.widths, default="128,128,128", metavar="W,W", help=help)
    add("--heads", type=number(int, 1, below=2**16), default=4, help="Number of attention heads.")
    add("--time", action="store_true", help="Let attention and deepsets fields read the ODE's t.")
    help = "Trace of the density; if not given, hutchinson in training, and in the test exact, or"
    help += " hutchinson for the transformer; sampled, which is ours, costs half in training."
    add("--trace", choices=(*exnode.TRACES, "sampled"), help=help)
    help = "Number of probes of Hutchinson's estimator."
    add("--probes", type=number(int, 1, below=10**4), default=1, help=help)
    help = "How the likelihood is differentiated."
    add("--gradient", choices=exnode.GRADIENTS, default="adjoint", help=help)
    help = "Solver in training; every evaluation is by dopri5."
    add("--method", choices=("dopri5", "rk4", "rk5"), default="dopri5", help=help)
    help = "Relative and absolute tolerance of dopri5."
    add("--tolerance", type=number(float, 1e-12, below=1), default=1e-5, help=help)
    help = "Number of steps of rk4 or rk5 in each block."
    add("--steps", type=number(int, 1, below=10**6), default=1, help=help)
    add = parser.group("training")
    help = "Matrix products of training in bfloat16, where the device has it: with --trace sampled."
    add("--amp", action=argparse.BooleanOptionalAction, default=False, help=help)
    add("--clip", type=number(float, 1e-9), help="Largest norm of a gradient; if not given, any.")
    add = parser.group("ours")
    help = "What training maximises or fits; matching needs no solver in the loop."
    choices = ("likelihood", "matching")
    add("--objective", choices=choices, default="likelihood", help=help)
    help = "Start from the best weights of a RUN, whose data and model, and for matching"
    help += " --coupling, --finest and --spare, are then the defaults; units of data stay RUN's."
    help += " More layers (--hidden) of a transformer begin as the identity."
    add("--finetune", type=options.path, metavar="RUN", help=help)
    help = "Let a transformer in one block also see near neighbours, at the scale of the noise: for"
    add("--fine", action="store_true", help=f"{help} shapes with flat parts.")
    help = "How matching pairs noise with points."
    add("--coupling", choices=COUPLINGS, default="swaps", help=help)
    help = "Smallest noise that matching resolves, as a share of the data's deviation."
    add("--finest", type=number(float, 1e-6, below=1), default=0.1, help=help)
    help = "Number of further points of each shape, with which matching replaces a target by its"
    help += " mean given the noisy point: far less noise in training. For ModelNet (1536 of 2048)"
    help += " and built-in sets."
    add("--spare", type=number(int, 0, below=10**9), default=0, metavar="K", help=help)
    add = parser.group("from a finished run")
    add("--sample", type=number(int, 1), metavar="K", help="Draw K sets from --load RUN.")
    help = "With --sample, also draw how the first five come from noise."
    add("--path", action="store_true", help=help)
    help = "Class of the samples, for a flow conditioned on labels; if not given, any."
    add("--label", metavar="NAME", help=help)
    help = "Context of the samples, for a flow conditioned on it."
    add("--context", type=options.numbers, metavar="C,C", help=help)
    help = "Write log p of each of your own sets at PATH, and how it compares with test sets."
    add("--score", type=options.path, metavar="PATH", help=help)
    add("--evaluate", action="store_true", help="Only test the best weights of --load RUN.")
    args = parser.parse_args(argv)
    return check(parser, args, argv)


def check(parser, args, argv):
    """Options that go together, and those that come from another run."""
    if args.recipe is not None:
        return options.repeat(parser, args, argv)
    usual = {name: parser.get_default(name) for name in ONLY_WITH}
    if bool(args.sample) + args.evaluate + (args.score is not None) != bool(args.load):
        parser.error("--load RUN goes with one of --sample K, --score PATH and --evaluate")
    if args.finetune and args.load:
        parser.error("--finetune RUN trains: leave out --load")
    if args.path and not args.sample:
        parser.error("--path goes with --sample K")
    if args.load:
        args = options.parse_finished(args.load, parser, argv, TRAINING)
        usual |= {"probes": parser.get_default("probes")}  # those of the run are not typed
        options.refuse(parser, args, MODEL_OPTIONS, "is not that of the model in --load RUN")
    elif options.goes_on(args):
        args = options.parse_as_in(args.out, parser, argv)
    elif args.finetune:
        names = (*MODEL_OPTIONS, *options.DATA, "category", "points", "seed")
        names += ("coupling", "finest", "spare") if args.objective == "matching" else ()
        args = options.parse_as_in(args.finetune, parser, argv, names)
        options.refuse(parser, args, ("heads",), "is not that of the model in --finetune RUN")
    options.check_data(parser, args, data.NAMES)
    for name, (other, *values) in ONLY_WITH.items():
        if args.load and name in TRAINING:  # of the run, whose training is over
            continue
        if getattr(args, name) != usual[name] and getattr(args, other) not in values:
            values = " or ".join(value for value in values if value)
            parser.error(f"argument --{name}: only with --{other} {values}")
    if (args.label is None, args.context is None) != (True, True) and not args.sample:
        parser.error("--label and --context go with --sample K")
    if args.label is not None and args.condition != "label":
        parser.error("--label: the flow in --load RUN is not conditioned on labels")
    if (args.context is not None) != bool(args.sample and args.condition == "context"):
        parser.error("--context C,C goes with --sample K of a flow conditioned on it, always")
    if args.sample:
        names = ("data", "category", "batch_size", "test_sets", "columns", "skip_bad", "noise")
        options.refuse(parser, args, names, "is for sets of data, which --sample does not read")
        options.refuse(parser, args, ("trace", "probes"), "is for densities, not for --sample")
        if args.objective == "matching":  # flows.sampler
            options.refuse(parser, args, ("tolerance",), "is for densities, not for --sample")
    only_tested = args.load or args.objective == "matching"  # training reads no trace
    if only_tested and args.field != "transformer" and not args.trace:
        options.refuse(parser, args, ("probes",), "would not be read: the test's trace is exact")
    if args.field != "deepsets" and args.hidden[-1] % args.heads:
        parser.error(f"argument --heads: {args.heads} does not divide {args.hidden[-1]}")
    if args.fine and args.blocks > 1:
        parser.error("argument --fine: only with --blocks 1, where t is the noise level")
    check_sampled(parser, args)
    if args.field == "transformer" and len(set(args.hidden)) > 1:
        parser.error("argument --hidden: a transformer requires one width, once for every layer")
    return args


def check_sampled(parser, args):
    """An error unless --trace sampled belongs to training by likelihood and an adaptive solver."""
    if args.trace != "sampled" or (args.load and parser.get_default("trace") == "sampled"):
        return
    if args.field == "transformer":
        parser.error("argument --trace: sampled requires a cheap exact trace, of another --field")
    if args.load or args.objective == "matching":
        parser.error("argument --trace: sampled is for training with --objective likelihood")
    if args.method != "dopri5":
        parser.error("argument --trace: sampled requires --method dopri5, which controls its error")


def load_sets(args):
    how = {"category": args.category, "points": args.points}
    how["spare"] = 0 if args.load else args.spare  # only training reads them
    return data.load(args.data, args.root, seed=args.seed, **how, **options.own_data(args))


def condition_size(args, split):
    """The numbers per set that the flow is conditioned on."""
    if args.condition == "context" and split.context is None:
        raise training.UsageError(f"--condition context: the sets of {args.data} have none")
    if args.condition == "label" and len(split.classes) < 2:
        fault = f"the sets of {args.data} have no labels, or one only"
        raise training.UsageError(f"--condition label: {fault}")
    if args.condition == "context":
        return split.context.shape[1]
    return len(split.classes) if args.condition else 0


def build(args, split):
    try:
        return models.build(vars(args), split.dim, context=condition_size(args, split))
    except ValueError as e:  # a width that is too small for its heads
        raise training.UsageError(f"--hidden: {e}") from None


# -------------------------------------------------------------------------------- evaluation
def mean_and_error(values):
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"ppll": values.mean().item(), "standard_error": float(error), "sets": len(values)}


def measure_likelihood(args, model, split, world, solver):
    """PPLL over all sets of a split, its standard error, its quantiles, and what solving took."""
    stats = Stats()
    values = log_probs(args, model, split, world, solver, stats)
    found = mean_and_error(values)
    found["bits_per_dim"] = -found["ppll"] / (split.dim * math.log(2))
    found["evaluations"] = stats.nfe / data.steps(split, args.batch_size, training=False)
    found["quantiles"] = np.quantile(values, np.linspace(0, 1, 101)).round(4).tolist()
    if args.condition:
        wrong = log_probs(args, model, split, world, solver, wrong=True)
        found["wrong_" + args.condition] = mean_and_error(wrong)
    if (twins := split.twins).any():
        found["without_twins"] = mean_and_error(values[~twins])
    return found


@torch.no_grad()
def tolerance_error(args, model, split, world):
    """The largest change of a few sets' log p per point at a hundredth of the tolerance."""
    x, mask, _, _, _ = batch = split.batch(CHECKED_SETS, world.device)
    given, found = condition(args, model, batch), []
    for tolerance in (args.tolerance, args.tolerance / 100):
        same = torch.Generator(world.device).manual_seed(0)  # the same noise for both
        how = {"solver": dopri5(tolerance), "generator": same, **test_trace(args)}
        try:
            found.append(model.log_prob(x, mask, given, **how) / count(x, mask))
        except SolverError:
            return None  # unknown: at so small a tolerance there is no solution in this precision
    return (found[0] - found[1]).abs().max().item()


def solver_error(args, model, split, world):
    """By how much training's solver is off on a few held-out sets, in nats per point.

    Training can exploit the error of few fixed steps; what is reported is always by dopri5.
    """
    if args.method == "dopri5" and args.tolerance <= 1e-5:
        return 0.0
    few, solvers = split.some(CHECKED_SETS), (model.blocks[0].solver, dopri5(1e-5))
    found = [log_probs(args, model, few, world, solver) for solver in solvers]
    error = np.abs(found[0] - found[1]).mean().item()
    if error > 1e-3:
        way = "a smaller --tolerance" if args.method == "dopri5" else "--method dopri5"
        training.say(f"training's solver is off by {error:.2g} nats per point: {way} is honest")
    return error


def measure_samples(args, model, split, sets=SCORE_SETS):
    """Scores of generated sets against as many test sets, and the seconds each took."""
    split, begun = split.some(sets), time.monotonic()
    real, mask, samples = draw_like(args, model, split)
    samples.sum().item()  # a GPU has done its work only now
    seconds = (time.monotonic() - begun) / len(split)
    scores = metrics.sample_scores(samples, real, mask, partial(training.watch, "scores"))
    return {**scores, "sets": len(split), "seconds_per_sample": seconds}


def test_metrics(args, model, test, world):
    """All that is measured on test sets."""
    test = test.some(args.test_sets)
    results = measure_likelihood(args, model, test, world, dopri5(args.tolerance))
    results |= {"trace": test_trace(args)["trace"], "log_unit": test.log_unit}
    results["tolerance"] = args.tolerance
    results["tolerance_error"] = tolerance_error(args, model, test, world)
    if (noise := test.noise()) is not None:
        results["noise"] = noise
    return results | {"samples": measure_samples(args, model, test)}


# ---------------------------------------------------------------------------------- training
def train(args, world):
    """One run: train, select, test, draw; the contents of its results.json."""
    splits = load_sets(args)
    sets, points = args.batch_size // world.size, data.span(splits.train.points)[1]
    check_memory(args, world, points, sets, training_too=True)
    if world.rank == 0:
        training.write_sets(args.out, splits.train)
    valid = splits.valid.some(-(-VALID_POINTS // points))

    def loss(model, batch):
        x, mask, given = batch.x, batch.mask, condition(args, model, batch)
        if args.objective == "likelihood":
            if args.trace == "sampled":
                with world.autocast():
                    log_p = sampled_log_prob(model, x, mask, given)
            else:
                log_p = model.log_prob(x, mask, given)
            return -(log_p / count(x, mask)).mean()
        how = {"coupling": args.coupling, "finest": args.finest}
        if args.spare:
            x, mask, how["spare"] = x[:, :points], None, x[:, points:]
        return matching_loss(model, x, mask, given, **how)

    def evaluate(model):
        values = log_probs(args, model, valid, world, dopri5(max(args.tolerance, 1e-3)))
        found = {"valid_ppll": values.mean().item()}
        if args.objective == "likelihood":
            found["solver_error"] = solver_error(args, model, valid, world)
        return found

    make = partial(build, args, splits.train)
    begin = partial(start, args, train=splits.train)
    steps = data.steps(splits.train, args.batch_size)
    ours = args.objective == "matching" or args.optimizer == "muon"
    groups = in_proportion if ours and args.blocks > 1 else None
    run = training.begin(args, world, make, begin, steps, INTERVALS, groups)
    batches = data.epochs(splits.train, args.batch_size, args.seed, **world.share)
    advice = "" if args.cuda or args.objective == "matching" else ADVICE
    run.fit(loss, batches, evaluate, best="valid_ppll", advice=advice)
    return finish(args, run, splits.test)


def start(args, model, train):
    """Weights of --finetune, or data in units of their own, for matching and for own sets."""
    if args.finetune:
        before = training.read_config(args.finetune)
        new = [] if before.get("fine") else ["blocks.0.field.fine."]  # starts without effect
        training.load_best(model, args.finetune, new + deepen(model, len(before["hidden"])))
    elif args.objective == "matching" or args.data not in data.NAMES:
        try:
            model.standardise(*train.batch(UNIT_SETS)[:2])
        except ValueError as e:
            raise training.UsageError(f"--data {args.data}: {e}") from None
        if args.objective == "matching" and args.blocks > 1:
            start_at_scale(model, args.finest)


def finish(args, run, test):
    """Pictures, then the test, which takes longer, and results.json, which marks the end."""
    if run.world.rank == 0:
        draw_run(args, run.model, test)
    found = test_metrics(args, run.model, test, run.world)
    show(args, found)
    training.say(f"pictures: samples.png, path.png and path-moving.png in {args.out}")
    if run.world.rank == 0:
        draw_page(Path(args.out) / "view.html", args, run.model, test, found)
    return run.finish(found)


def show(args, test):
    """The numbers of a test, on stderr."""
    unit = f"{test['ppll']:.4f} ± {test['standard_error']:.4f}"
    training.say(f"test PPLL {unit} nats per point, {test['bits_per_dim']:.4f} bits per dimension")
    if args.data not in data.NAMES:
        training.say(f"densities are in the units of {args.data}")
    if args.condition:
        wrong = test[f"wrong_{args.condition}"]
        value = f"{wrong['ppll']:.4f} ± {wrong['standard_error']:.4f}"
        training.say(f"{value} nats per point if conditioned on a wrong {args.condition}")
    if (off := test["tolerance_error"]) is not None:
        at = f"at tolerance {test['tolerance']:g}"
        training.say(f"{at}, sets are off by up to {off:.2g} nats per point")
    scores = test["samples"]
    text = ", ".join(f"{name} {scores[name]:.4g}" for name in ("1-NNA", "MMD", "COV"))
    training.say(f"{scores['sets']} samples: {text}")


def evaluate_only(args):
    world, model = training.connect(args), read_run(args)
    test = load_sets(args).test
    if test.dim != model.dim:
        raise training.UsageError(f"--load {args.load}: a model of {model.dim}-D, not {test.dim}-D")
    test = with_conditions(args, model, test, f"--data {args.data}")
    sets = args.batch_size // world.size
    check_memory(args, world, data.span(test.points)[1], sets, pairs=True)
    found = test_metrics(args, model.to(world.device), test, world)
    show(args, found)
    results = training.write_evaluation(found, args, world)
    if world.rank == 0:
        draw_beside(Path(args.out) / "evaluation.png", args, model, test)
        draw_page(Path(args.out) / "evaluation.html", args, model, test, found)
    return results


def main(argv=None):
    """The results, also printed: of a run, of --sample or of --evaluate."""
    args = parse(argv)
    if args.recipe:
        return [main(words) for words in args.recipe][-1]
    if args.sample:
        return sample(args)
    if args.score is not None:
        return score(args)
    if args.evaluate:
        return evaluate_only(args)
    return training.in_directory(args, train, "ppll")


if __name__ == "__main__":
    sys.exit(training.command(main, usage=(data.DataError,)))
