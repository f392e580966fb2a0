"""The models of run directories: built, saved, loaded; and files that are none."""

import copy
import os
import pickle

import pytest
import torch
from test_exnode import T, seeded
from test_sets import F64, close

import exnode
from beyond.matching import Moments
from support import models

FLOW = {"blocks": 2, "hidden": [8, 8], "heads": 2, "field": "attention", "time": True, "steps": 3}
FLOW |= {"gradient": "adjoint", "method": "rk4", "probes": 2, "trace": None, "tolerance": 1e-4}
VIEWS = {"field": "transformer", "hidden": [8, 8, 8], "blocks": 1, "fine": True}
SERIES = {"latent": 3, "decoder": "attention", "hidden": [8, 8], "gradient": "backprop"}
CONFIGS = {
    "flow": (FLOW, 3, None),
    "views": (FLOW | VIEWS | {"method": "dopri5", "trace": "exact"}, 2, None),
    "series": (SERIES | {"trace": "exact"}, 2, None),
    **{name: ({"model": name}, 3, 7) for name in models.CLASSIFIERS},
}


def save_run(folder, given, trained, **changed):
    state = {"format": "exnode checkpoint 1", "model": trained.state_dict(), "config": given}
    torch.save(state | changed, folder / "best.pt")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_is_loaded_in_one_line_as_the_model_that_was_trained(name, tmp_path):
    config, dim, classes = CONFIGS[name]
    model = models.build(config, dim, classes).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    if name == "series":
        model.moments = Moments(3, 4)  # is a part of training only
    save_run(tmp_path, config, model)
    loaded = exnode.load(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    x = torch.randn(2, 3, 4, dim) if name == "series" else torch.randn(2, 4, dim)
    if name in models.CLASSIFIERS:
        return close(loaded(x), model(x), 0)
    if name == "series":
        return close(loaded.elbo(x, T, None, seeded()), model.elbo(x, T, None, seeded()), 0)
    solver = {"method": "dopri5", "rtol": 1e-4, "atol": 1e-4, "options": None}
    if name == "flow":
        solver |= {"method": "rk4", "options": {"step_size": 0.5 / 3}}
    assert loaded.blocks[0].solver == solver
    assert (loaded.blocks[0].t1, loaded.blocks[0].gradient) == (0.5, "adjoint")
    assert (loaded.probes, loaded.trace) == (2, "exact" if name == "views" else "hutchinson")
    how = {"solver": {"method": "euler"}}
    close(*(m.log_prob(x, generator=seeded(), **how) for m in (loaded, model)), 0)


def test_what_is_no_run_is_a_value_error_that_names_the_file(tmp_path):
    config, dim, _ = CONFIGS["flow"]
    flow = models.build(config, dim)
    weights = flow.state_dict()
    wrong = [
        {"config": []}, {"config": {}}, {"config": None}, {"config": {"model": "foo"}},
        {"config": {"model": []}}, {"config": config | {"heads": 0}}, {"model": []},
        {"model": None}, {"config": config | {"hidden": [10**13]}},
        {"config": config | {"blocks": 1}},
        {"config": {**config, "steps": 0}}, {"model": weights | {"mean": None}}, {"format": 3},
        {"model": {"mean": 1}}, {"format": "exnode checkpoint 2"}, {"config": {"decoder": "x"}},
    ]  # fmt: skip
    for changed in wrong:
        save_run(tmp_path, config, flow, **changed)
        says = r"best\.pt: (damaged, or not of this program|of another model \()"
        with pytest.raises(ValueError, match=says):
            exnode.load(tmp_path)
    save_run(tmp_path, config, flow, model=weights | {"mean": weights["mean"] / 0})
    with pytest.raises(ValueError, match=r"best\.pt: its weights are not finite \(mean\)"):
        exnode.load(tmp_path)
    save_run(tmp_path, config, flow)
    whole = (tmp_path / "best.pt").read_bytes()
    for content in (b"", b"no", whole[:1000], pickle.dumps(os.getcwd)):
        (tmp_path / "best.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"best\.pt: damaged, or not of this program"):
            exnode.load(tmp_path)
    torch.save([1], tmp_path / "best.pt")
    with pytest.raises(ValueError, match="not of this program"):
        exnode.load(tmp_path)
    with pytest.raises(ValueError, match="no such checkpoint"):
        exnode.load(tmp_path / "nowhere")
    os.remove(tmp_path / "best.pt")
    os.mkfifo(tmp_path / "best.pt")  # nobody writes there: it must not be waited for
    with pytest.raises(ValueError, match="no such checkpoint"):
        exnode.load(tmp_path)


@pytest.mark.parametrize("masked", [False, True])
def test_a_first_layer_in_units_of_the_data_begins_as_one_of_standardised_points(masked):
    x = torch.randn(3, 5, 3, dtype=F64) * torch.tensor([1e-3, 1.0, 1e4]) + torch.tensor(
        [5, 0, -1e5]
    )
    x[..., 1] = 7.0  # an axis without spread
    mask = torch.arange(5) < torch.tensor([5, 2, 4])[:, None] if masked else None
    layer = torch.nn.Linear(3, 4, dtype=F64)
    before = copy.deepcopy(layer)
    models.start_in_units(layer, x, mask)
    points = x[mask] if masked else x.flatten(0, 1)
    std = points.std(0, correction=0)
    std[1] = 1.0
    close(layer(x), before((x - points.mean(0)) / std), 1e-6)
