"""The models of run directories: built from the options of a run, loaded from its best.pt."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

import sets
from beyond import prior
from beyond.transformer import TransformerField
from exnode import SetClassifier, SetFlow, TemporalSetVAE, one_width
from support.arguments import one_of
from support.checkpoints import load_weights, one_line, read_checkpoint
from support.options import UsageError

CLASSIFIERS = {  # the rows of Table 1
    "exnode-deepsets": partial(SetClassifier, field="deepsets"),
    "exnode-attention": partial(SetClassifier, field="attention"),
    "deepsets": sets.DeepSets,
    "settransformer": sets.SetTransformer,
}


def build(config, dim, classes=None, context=0) -> nn.Module:
    """The model that the options of a run describe, for points in `dim` dimensions.

    classes: of a classifier; context: numbers per set that a flow is conditioned on.
    """
    if "model" in config:
        return CLASSIFIERS[one_of("model", config["model"], CLASSIFIERS)](dim, classes)
    if "decoder" in config:
        names = ("latent", "decoder", "hidden", "gradient", "trace")
        return TemporalSetVAE(dim, **{name: config[name] for name in names})
    names = ("blocks", "field", "hidden", "heads", "time", "gradient", "method", "probes")
    how = {name: config[name] for name in names}
    how["trace"] = "exact" if config["trace"] == "exact" else "hutchinson"
    if how["method"] != "dopri5":
        how["options"] = {"step_size": 0.5 / config["steps"]}
    if how["field"] == "transformer":  # beyond/transformer.py
        shape = dict(zip(("width", "layers"), one_width(how["hidden"])))
        shape |= {"heads": how["heads"], "end": 0.5, "fine": config.get("fine", False)}
        how["field"] = partial(TransformerField, **shape)
    how |= {"rtol": config["tolerance"], "atol": config["tolerance"]}
    return SetFlow(dim, t1=0.5, context=context, **how)


def load(run, learned_prior=None) -> nn.Module:
    """The trained model of a run directory, ready to use.

    learned_prior: whether a TemporalSetVAE has that of the run; None for what its options say.
    """
    path = Path(run) / "best.pt"
    state = read_checkpoint(path)
    with one_line(path):
        config = state["config"]
        model, weights = restore(config, state["model"])
    load_weights(model, weights, path)
    if learned_prior is None:
        learned_prior = config.get("prior") == "flow"
    if learned_prior:
        attach_prior(run, model)
    return model.eval()


def attach_prior(run, model):
    """Give a model the learned prior in a run directory, and the width of posteriors there."""
    path = Path(run) / "prior.pt"
    if not path.exists():
        way = f"train_temporal.py --fit-prior {run} fits one"
        raise UsageError(f"--prior flow: {run} has no learned prior: {way}")
    state = read_checkpoint(path)
    try:
        prior.check(state, model)
    except ValueError as e:
        raise UsageError(f"{path}: {e}: --fit-prior {run} fits another") from None
    flow = prior.make(model.latent)
    load_weights(flow, state.get("prior"), path)
    prior.attach(flow, state["width"], model)


def restore(config, weights):
    """The model of a run and its weights, whose shapes tell the dimensions and classes."""
    if "model" in config:
        first = {"deepsets": "layers.0", "settransformer": "blocks.0.gather.k"}
        dim = weights[first.get(config["model"], "expand.0") + ".weight"].shape[1]
    else:
        dim = len(weights["decoder.mean" if "decoder" in config else "mean"])
    model = build(config, dim, len([*weights.values()][-1]), context_of(config, weights))
    # moments are a part of training only: beyond/matching.py
    return model, {k: v for k, v in weights.items() if not k.startswith("moments.")}


def context_of(config, weights):
    """Numbers per set that a flow is conditioned on: what its first layer reads beside (x, t)."""
    if not config.get("condition"):
        return 0
    layers = {"attention": "q.extra", "deepsets": "network.extra", "transformer": "condition.0"}
    width = weights[f"blocks.0.field.{layers[config['field']]}.weight"].shape[1]
    return width - (9 if config["field"] == "transformer" else config["time"])


@torch.no_grad()
def start_in_units(layer, x, mask=None):
    """Let a first layer begin with W (x − mean) / std + b, in units of the points of these sets."""
    points = x.flatten(0, -2) if mask is None else x[mask]
    std = points.std(0, correction=0)
    layer.weight.div_(torch.where(std > 0, std, 1))
    layer.bias.sub_(layer.weight @ points.mean(0))
