"""The options of an experiment: typed by a person, kept in config.json, read from another run.

What says where to write is typed, or is a default; it is never read from a file (`PLACES`).
Paths within the folder that holds the project are kept relative to the project.
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch

from beyond.muon import Muon
from support.progress import say

PROJECT = Path(__file__).resolve().parent.parent
OPTIMIZERS = {"adam": torch.optim.Adam, "muon": Muon}
SCHEDULES = ("halve", "one-cycle")
GROUPS = ("data", "the model of the paper", "training", "ours", "from a finished run")
PLACES = (  # where, and what is done beside training: not kept, and may change when a run goes on
    "out", "root", "resume", "cuda", "load", "evaluate", "last", "sample", "path",
    "reconstruct", "fit_prior", "at", "score", "label", "context", "recipe",
)  # fmt: skip
DATA = ("data", "columns", "skip_bad", "noise")  # which sets, and how they are read
TESTED = ("test_sets", "test_series")  # how much a test reads: that of a run is not the next one's
DELETED = ("mix", "random_times")  # options that a run from before may have in its config.json


class UsageError(ValueError):
    """Something the user can put right: one line, exit code 2."""


# ------------------------------------------------------------------------------------- the parser
class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults, where there are any."""

    def _get_help_string(self, action):
        none = action.default is None or isinstance(action.default, bool)
        return action.help if none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose options stand in GROUPS, and whose errors are one line."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=Help, allow_abbrev=False)
        self.sections = {title: self.add_argument_group(title) for title in GROUPS}
        self.reading = ""  # the file that the options are read from

    def group(self, title):
        """add_argument of the group with that title."""
        return self.sections[title].add_argument

    def error(self, message):
        if self.reading:
            raise UsageError(f"{self.reading}: {message}")
        say(f"{self.prog}: {message}; --help lists the options")
        raise SystemExit(2)


def number(kind, low, below=math.inf):
    """An argparse type: an int or float that is at least `low` and below a finite limit."""

    def parse(text):
        value = kind(text)
        if not low <= value < below:
            limit = "infinite" if below == math.inf else f"not below {below:g}"
            raise argparse.ArgumentTypeError(f"{text} is less than {low} or {limit}")
        return value

    parse.__name__ = kind.__name__  # for argparse's own message
    return parse


def widths(text):
    """An argparse type: "128,128" is [128, 128]."""
    return [number(int, 1, below=2**16)(part) for part in text.split(",")]


def numbers(text):
    """An argparse type: "0.3,1.2" is [0.3, 1.2]."""
    return [number(float, -1e30, below=1e30)(part) for part in text.split(",")]


def path(text):
    """An argparse type: a path that the file system can have, whether or not it is there."""
    try:
        os.lstat(text)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: {reason}") from None
    return text


def shared(description, name, epochs, batch_size, every=None):
    """A parser with the options that all experiments share."""
    parser = Parser(description)
    add = parser.group("data")
    help = "Which sets to read: synthetic, which is built in, mnist, modelnet, modelnet10, or the"
    help += " path of a file or folder with your own."
    add("--data", type=path, default="synthetic", metavar="NAME|PATH", help=help)
    add("--root", type=path, default="data", help="Folder with the downloaded data.")
    help = "Names of the columns of your own table, such as set=event,x=px,y=py,label=kind."
    add("--columns", metavar="A=B,C=D", help=help)
    help = "Leave out files of your own that cannot be read, and say how many."
    add("--skip-bad", action="store_true", help=help)
    help = "Standard deviation of Gaussian noise added to your own points: without it, rounded or"
    help += " repeated coordinates have no density."
    add("--noise", type=number(float, 0, below=1e30), default=0.0, help=help)
    add = parser.group("training")
    add("--cuda", action="store_true", help="Train on a GPU.")
    add("--out", type=path, default=f"runs/{name}", help="Folder of the run.")
    help = "Go on with the run in --out, with its own options, or start it."
    add("--resume", action="store_true", help=help)
    help = (
        "Repeat the run of a results.json, with all its stages; whatever else is typed counts for"
    )
    help += " each of them. Earlier stages have folders of their own in --out."
    add("--as", type=path, dest="recipe", metavar="RESULTS", help=help)
    help = "Seed of the weights, the order of the sets, the points drawn and the held-out sets."
    add("--seed", type=number(int, 0, below=2**63), default=0, help=help)
    help = "Train K times, with the seeds seed, seed + 1 and so on, each in its own folder in"
    help += " --out, and report mean and standard deviation."
    add("--runs", type=number(int, 1, below=1000), default=1, metavar="K", help=help)
    help = "Number of passes over the training sets."
    add("--epochs", type=number(int, 1, below=10**9), default=epochs, help=help)
    help = "Train for this long in place of --epochs; the schedule fits itself to it."
    add("--minutes", type=number(float, 0.01, below=10**7), help=help)
    help = "Number of sets or series in a step, over all processes."
    add("--batch-size", type=number(int, 2, below=10**9), default=batch_size, help=help)
    help = "Largest learning rate."
    add("--lr", type=number(float, 0, below=1e38), default=1e-3, help=help)
    help = "Number of steps from one evaluation on held-out sets to the next"
    help += "." if every else "; if not given, an epoch."
    add("--every", type=number(int, 1), default=every, help=help)
    add = parser.group("ours")
    help = "Optimiser; muon takes fewer steps, each slower."
    add("--optimizer", choices=OPTIMIZERS, default="adam", help=help)
    help = "Share of each matrix by which muon shrinks it at a step, times the learning rate; 0 for"
    help += " none. 1 keeps attention soft in long runs."
    add("--decay", type=number(float, 0, below=100), default=0.0, help=help)
    help = "How the learning rate falls: halved in steps, as in the paper, or in one cycle."
    add("--schedule", choices=SCHEDULES, default="halve", help=help)
    help = "Decay of an average of the weights, which is then evaluated and kept; 0 for none."
    add("--ema", type=number(float, 0, below=1), default=0.0, help=help)
    help = "A finished run to work with; its options are the defaults, but for the size of a test."
    parser.group("from a finished run")("--load", type=path, metavar="RUN", help=help)
    return parser


def refuse(parser, args, names, why):
    """An error if one of these options is not at its default."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} {why}")


def check_data(parser, args, names):
    """An error if options for a person's own sets go with one of the names of known data."""
    if args.data in names and getattr(args, "score", None) is None:
        why = f"is for your own sets, not for --data {args.data}"
        refuse(parser, args, ("columns", "skip_bad", "noise"), why)


def own_data(args):
    """What data.load reads of the options for a person's own sets."""
    return {"columns": args.columns, "skip_bad": args.skip_bad, "noise": args.noise}


# ------------------------------------------------------------------------ the options of a run
def configuration(args):
    """The options that a run's numbers depend on."""
    kept = {k: v for k, v in sorted(vars(args).items()) if k not in PLACES}
    if kept.get("runs") == 1:
        del kept["runs"]
    return {k: relative(v) if isinstance(v, str) else v for k, v in kept.items()}


def relative(text):
    """A path in or beside the project's folder, as seen from there; any other text as it is."""
    option, equals, where = text.rpartition("=") if text.startswith("--") else ("", "", text)
    if os.path.isabs(where) and Path(where).is_relative_to(PROJECT.parent):
        where = Path(os.path.relpath(where, PROJECT)).as_posix()
    return option + equals + where


def read_text(path, size=None):
    """The text of a file, or of its first bytes; a pipe, which would wait for ever, is no file."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a file")
    try:
        return path.read_bytes()[:size].decode()
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: {e}") from None


def read_json(path):
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path}: {e}") from None


def read_config(run):
    """The options of a run directory."""
    config = read_json(Path(run) / "config.json")
    if not isinstance(config, dict):
        raise UsageError(f"{run}/config.json: not the options of a run")
    return {k: v for k, v in config.items() if k not in PLACES}


def parse_as_in(run, parser, argv, names=None, without=()):
    """The options, with those of a run as defaults: `names` of them, or all but `without`."""
    config = read_config(run)
    known = vars(parser.parse_args(argv)).keys()
    unknown = sorted(k for k, v in config.items() if v and k not in known and k not in DELETED)
    if unknown:
        raise UsageError(f"{run}: a run of another script; this one has no {', '.join(unknown)}")
    names = known - set(without) if names is None else names
    config = {k: v for k, v in config.items() if k in names}
    if none := [k for k, v in config.items() if v is None and parser.get_default(k) is not None]:
        raise UsageError(f"{run}/config.json: no value for {', '.join(none)}")
    parser.reading = f"{run}/config.json"
    typed = [word for name, value in config.items() for word in as_typed(parser, name, value)]
    read = parser.parse_args(typed)
    parser.reading = ""
    parser.set_defaults(**{k: getattr(read, k) for k in config})
    return parser.parse_args(argv)


def repeat(parser, args, argv):
    """--as RESULTS: args whose `recipe` has the words of a command for each stage."""
    if args.load:
        parser.error("--as RESULTS trains: leave out --load")
    found, run = read_stages(args.recipe), None
    unset = object()  # where nothing is typed, also where what is typed equals the default
    blank = argparse.Namespace(**dict.fromkeys(vars(args), unset))
    typed = {k: v for k, v in vars(parser.parse_args(argv, blank)).items() if v is not unset}
    if args.finetune:  # which replaces the stages before
        found = found[-1:]
    elif isinstance(found[0], str):
        run = found.pop(0)
        if not (Path(run) / "best.pt").exists():
            way = "--finetune RUN names another to begin with"
            raise UsageError(f"{args.recipe}: began with {run}, which is not here: {way}")
        say(f"{args.recipe}: begins with {run} as it is now, since that left no recipe")
    commands = []
    for k, options in enumerate(found, 1):
        if strange := sorted(k for k, v in options.items() if v and not hasattr(args, k)):
            fault = f"this script has no {', '.join(strange)}"
            raise UsageError(f"{args.recipe}: {fault}; results of another one, or of older code")
        out = args.out if k == len(found) else f"{args.out}/stage{k}"
        options = options | ({"finetune": run} if run else {}) | typed | {"out": out}
        del options["recipe"]
        kept = [(k, v) for k, v in options.items() if hasattr(args, k)]
        commands.append([word for k, v in kept for word in as_typed(parser, k, v)])
        run = out
    return argparse.Namespace(recipe=commands)


def read_stages(path):
    """The options of each stage in a results.json, after the path of a run without a recipe."""
    results = read_json(Path(path))
    runs = results.get("runs") if isinstance(results, dict) else None
    several = {"runs": len(runs)} if isinstance(runs, list) and runs else {}  # of --runs K
    results = runs[0] if several else results
    config = results.get("config") if isinstance(results, dict) else None
    before = results.get("before", []) if isinstance(config, dict) else None
    if not isinstance(before, list):
        raise UsageError(f"{path}: not the results.json of a run")
    if not before and isinstance(config.get("finetune"), str):
        before = [config["finetune"]]
    for k, stage in enumerate(before):
        if not isinstance(stage, dict) and (k or not isinstance(stage, str)):
            raise UsageError(f"{path}: {str(stage)[:40]!r} is no stage of a run")
    return [without_places(stage) for stage in (*before, config | several)]


def without_places(options):
    """The options of a stage, but for those that are never read from a file."""
    if isinstance(options, str):
        return options
    return {k: v for k, v in options.items() if k not in PLACES}


def stages_before(run):
    """What results.json keeps of the --finetune RUN: the options of its stages, or its path."""
    try:
        return read_stages(Path(run) / "results.json")
    except UsageError:
        return [relative(str(run))]


def as_typed(parser, name, value):
    """An option and its value as on the command line."""
    option = f"--{name.replace('_', '-')}"
    flag = isinstance(parser.get_default(name), bool)
    if value is None or (flag and value is False):
        return []
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if flag or not isinstance(value, str | int | float | list):
        parser.error(f"argument {option}: {str(value)[:40]!r} is no value for it")
    return [f"{option}={','.join(map(str, value)) if isinstance(value, list) else value}"]


def goes_on(args):
    """Whether --resume goes on with a run, whose options are then the defaults."""
    return args.resume and (Path(args.out) / "config.json").exists()


def parse_finished(run, parser, argv, more=()):
    """The options of a finished run, but for TESTED and for what argv says; --out is the run."""
    parser.set_defaults(out=run)
    args = parse_as_in(run, parser, argv, without=TESTED)
    names = ("resume", "epochs", "minutes", "optimizer", "lr", "decay", "schedule", "ema", "every")
    refuse(parser, args, (*names, "runs", *more), "is for training, not for --load")
    return args
