"""train_flow.py as people use it: the command line, on the built-in digits."""

import csv
import json
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import TWO_PROCESSES, call, check_help, lines, start

import data
import exnode
import train_flow
from beyond.matching import matching_loss
from solvers import Stats
from support import flow_pictures, flows, training

TINY = ["--points", "5", "--blocks", "2", "--hidden", "16,16", "--heads", "2"]
TINY += ["--time", "--batch-size", "270", "--epochs", "2", "--lr", "2e-2", "--test-sets", "20"]
TINY += ["--schedule", "one-cycle", "--every", "20"]  # an epoch
MATCHING = [*TINY, "--objective", "matching", "--ema", "0.8", "--tolerance", "1e-4"]
MATCHING += ["--epochs", "5", "--finest", "0.15"]
LIKELIHOOD = [*TINY, "--gradient", "checkpoint", "--optimizer", "muon", "--method", "rk4"]
SPARE = ["--coupling", "none", "--spare", "9"]
script, run_here = partial(start, "train_flow.py"), partial(call, train_flow)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of each objective, and its results."""
    base = tmp_path_factory.mktemp("flow")
    options = {"matching": MATCHING, "likelihood": LIKELIHOOD}
    return {
        k: (base / k, train_flow.main([*v, "--out", str(base / k)])) for k, v in options.items()
    }


@pytest.mark.parametrize("objective", ["matching", "likelihood"])
def test_a_run_raises_the_likelihood_and_leaves_all_its_files(runs, objective):
    out, results = runs[objective]
    names = {
        "config.json",
        "metrics.jsonl",
        "last.pt",
        "best.pt",
        "results.json",
        "curves.png",
        "sets.json",
    }
    names |= {"samples.png", "path.png", "path-moving.png", "view.html"}
    assert {p.name for p in out.iterdir()} == names
    for name in names:
        if name.endswith("png"):
            assert (out / name).read_bytes().startswith(b"\x89PNG")
    table = lines(out)
    assert [line["epoch"] for line in table] == [*range(6 if objective == "matching" else 3)]
    assert table[-1]["loss"] < table[1]["loss"]
    assert table[-1]["valid_ppll"] > table[0]["valid_ppll"] + 0.05
    assert results == json.loads((out / "results.json").read_text())
    test = results["test"]
    assert (test["sets"], test["trace"]) == (20, "exact")
    assert test["evaluations"] > 20  # of dopri5, also where training has one step of rk4
    assert test["bits_per_dim"] == pytest.approx(-test["ppll"] / (2 * np.log(2)))
    assert 0 <= test["samples"]["1-NNA"] <= 1


def test_the_reported_likelihood_is_the_model_s_own(runs):
    """Of both objectives, by the one path: log_prob of the best weights, set by set."""
    for out, results in runs.values():
        args = train_flow.parse(["--load", str(out), "--evaluate"])
        model, solver = exnode.load(out), flows.dopri5(args.tolerance)
        test = data.load(points=5, seed=0).test.some(20)
        x = torch.from_numpy(test.draw(np.arange(20))[0])
        with torch.no_grad():
            log_p = model.log_prob(x, trace="exact", solver=solver)
            ppll = log_p.double() / 5 + test.log_unit
        assert results["test"]["ppll"] == pytest.approx(ppll.mean().item(), abs=1e-5)
        wanted = ppll.std().item() / 20**0.5
        assert results["test"]["standard_error"] == pytest.approx(wanted, rel=1e-3)


def test_matching_standardises_the_data_and_likelihood_leaves_them_as_in_the_paper(runs):
    mean, std = (
        {
            k: training.read_checkpoint(out / "best.pt")["model"][name]
            for k, (out, _) in runs.items()
        }
        for name in ("mean", "std")
    )
    assert mean["likelihood"].eq(0).all()
    assert std["likelihood"].eq(1).all()
    x = torch.from_numpy(data.load(points=5).train.some(2000).draw(np.arange(2000))[0]).flatten(
        0, 1
    )
    torch.testing.assert_close(mean["matching"], x.mean(0))
    torch.testing.assert_close(std["matching"], x.std(0, correction=0))


def test_a_run_stopped_by_sigterm_resumes_to_the_same_numbers(runs, tmp_path, capsys, monkeypatch):
    (whole, results), out, calls = runs["matching"], tmp_path / "run", []

    def stopping(*args, **how):
        calls.append(1)
        if len(calls) == 33:  # within the second epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return matching_loss(*args, **how)

    monkeypatch.setattr(train_flow, "matching_loss", stopping)
    code, err = run_here(capsys, *MATCHING, "--out", out)
    assert code == 130, err
    assert training.read_checkpoint(out / "last.pt")["step"] == 33
    again = train_flow.main([*MATCHING, "--out", str(out), "--resume"])
    assert again["test"]["ppll"] == results["test"]["ppll"]
    assert lines(out) == lines(whole)


@pytest.mark.parametrize("tolerance", [1e-4, 1e-2])
def test_beside_the_likelihood_stands_by_how_much_a_set_is_off(runs, tolerance):
    model, test = exnode.load(runs["matching"][0]), data.load(points=5, seed=0).test
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # so that it bends
    solver = {"method": "dopri5", "rtol": tolerance, "atol": tolerance}
    world = training.World(torch.device("cpu"))
    args = train_flow.parse(["--tolerance", str(tolerance)])
    found = train_flow.tolerance_error(args, model, test, world)
    x = torch.from_numpy(test.some(train_flow.CHECKED_SETS).draw(np.arange(8))[0])
    with torch.no_grad():
        here = model.log_prob(x, trace="exact", solver=solver)
        tight = {**solver, "rtol": 1e-8, "atol": 1e-8}
        exact = model.double().log_prob(x, trace="exact", solver=tight)
    wanted = (here.double() - exact).abs().max().item() / 5
    assert wanted > 1e-4
    assert found == pytest.approx(wanted, rel=0.2)


def test_the_results_say_the_tolerance_and_its_error(runs):
    for _, results in runs.values():
        test = results["test"]
        assert test["tolerance"] == results["config"]["tolerance"]
        assert 0 < test["tolerance_error"] < 0.005


@pytest.mark.parametrize("objective", ["likelihood", "matching"])
def test_finetuning_starts_from_a_matching_run_and_goes_on_by_either(objective, runs, tmp_path):
    base, before = runs["matching"]
    options, solver = ["--finetune", str(base), "--objective", objective], ["--method", "rk5"]
    options += [*solver, "--gradient", "checkpoint"] if objective == "likelihood" else []
    options += ["--epochs", "1", "--test-sets", "20", "--batch-size", "270"]
    config = train_flow.main([*options, "--out", str(tmp_path / "fine")])["config"]
    table = lines(tmp_path / "fine")
    assert config["hidden"] == [16, 16]
    assert table[0]["valid_ppll"] == pytest.approx(before["best"], abs=2e-3)
    if objective == "likelihood":
        assert table[1]["valid_ppll"] > table[0]["valid_ppll"]
    else:
        assert config["finest"] == 0.15
        assert table[1]["loss"] < lines(base)[2]["loss"]


def test_samples_of_a_run_depend_on_the_seed_only_and_may_have_more_points(runs, capsys):
    out, _ = runs["matching"]
    options = ["--load", out, "--sample", "3", "--points", "40"]
    code, err = run_here(capsys, *options)
    assert (code, err.count("\n")) == (0, 2)
    first = np.load(out / "samples-3x40-seed0.npy")
    assert first.shape == (3, 40, 2)
    assert (out / "samples-3x40-seed0.png").read_bytes().startswith(b"\x89PNG")
    run_here(capsys, *options)
    np.testing.assert_array_equal(np.load(out / "samples-3x40-seed0.npy"), first)
    run_here(capsys, *options, "--seed", "1", "--path")
    for name in ("path", "path-moving"):
        assert (out / f"samples-3x40-seed1-{name}.png").read_bytes().startswith(b"\x89PNG")
    assert np.abs(np.load(out / "samples-3x40-seed1.npy") - first).max() > 0.01
    for path in out.glob("samples-*"):
        path.unlink()


def test_samples_are_by_dopri5_or_for_matching_by_rk4_with_the_steps_shared_by_the_blocks(runs):
    """And both are solved well: as by dopri5 at a tolerance of 1e-6."""
    for name, (out, _) in runs.items():
        args, model = train_flow.parse(["--load", str(out), "--sample", "2"]), exnode.load(out)
        z = torch.randn(2, 9, 2, generator=torch.Generator().manual_seed(0))
        made, stats = flows.draw_sets(args, model, 2, 9), Stats()
        solver = flows.sampler(args)
        torch.testing.assert_close(made, model.decode(z, solver=solver, stats=stats))
        tight = {"method": "dopri5", "rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(made, model.decode(z, solver=tight), atol=1e-2, rtol=0)
        if name == "matching":
            assert stats.nfe == 4 * 2 * 2  # of rk4: two steps in each of two blocks
        else:
            assert solver == flows.dopri5(args.tolerance)


def test_samples_of_matching_in_one_block_take_four_steps_of_rk4(runs):
    args = train_flow.parse(["--load", str(runs["matching"][0]), "--sample", "2"])
    for blocks, step_size in ((1, 0.125), (2, 0.25), (3, 0.25), (4, 0.5), (12, 0.5)):
        args.blocks = blocks
        assert flows.sampler(args)["options"] == {"step_size": step_size}


def test_two_processes_measure_what_one_does(runs):
    out, results = runs["matching"]
    options = ("--load", out, "--evaluate", "--test-sets", "20", "--batch-size", "16")
    process = script(*options, launcher=TWO_PROCESSES)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"test PPLL {results['test']['ppll']:.4f}" in err


def test_two_processes_train_as_one_by_likelihood_and_its_adjoint(tmp_path):
    options = ["--points", "3", "--blocks", "1", "--hidden", "8", "--heads", "2", "--trace"]
    options += ["exact", "--batch-size", "2700", "--epochs", "1", "--test-sets", "10"]
    train_flow.main([*options, "--out", str(tmp_path / "one")])
    process = script(*options, "--out", tmp_path / "two", launcher=TWO_PROCESSES)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    one, two = (lines(tmp_path / name)[-1] for name in ("one", "two"))
    assert one["step"] == two["step"] == 2
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    assert one["valid_ppll"] == pytest.approx(two["valid_ppll"], abs=1e-3)


def test_a_transformer_trains_by_muon_with_clipping_and_several_probes(tmp_path):
    options = ["--objective", "matching", "--field", "transformer", "--blocks", "1", "--hidden"]
    options += ["64", "--coupling", "none", "--optimizer", "muon", "--clip", "1", "--probes", "2"]
    options += ["--points", "5", "--batch-size", "270", "--epochs", "2", "--test-sets", "10"]
    options += ["--lr", "5e-3", "--schedule", "one-cycle", "--tolerance", "1e-3", "--every", "20"]
    results = train_flow.main([*options, "--out", str(tmp_path / "run")])
    table = lines(tmp_path / "run")
    assert table[2]["loss"] < 0.97 * table[1]["loss"]
    assert results["test"]["trace"] == "hutchinson"
    json.loads((tmp_path / "run" / "results.json").read_text(), parse_constant=pytest.fail)
    fine = ["--finetune", str(tmp_path / "run"), "--fine", "--hidden", "64,64", *options[:2]]
    fine += [*options[10:], "--epochs", "1"]
    config = train_flow.main([*fine, "--out", str(tmp_path / "fine")])["config"]
    table = lines(tmp_path / "fine")
    assert config["fine"]
    assert table[0]["valid_ppll"] == pytest.approx(results["best"], abs=2e-3)
    state = training.read_checkpoint(tmp_path / "fine" / "last.pt")["model"]
    assert state["blocks.0.field.fine.out.weight"].any()
    assert state["blocks.0.field.layers.1.merge.weight"].any()
    sets = train_flow.main(["--load", str(tmp_path / "fine"), "--sample", "2"])["samples"]
    assert sets.isfinite().all()


def test_spare_points_of_shapes_leave_less_to_explain(tmp_path):
    options = ["--objective", "matching", "--coupling", "none", "--category", "shapes", "--hidden"]
    options += ["8", "--heads", "2", "--blocks", "1", "--points", "20", "--batch-size", "540"]
    options += ["--epochs", "1", "--test-sets", "2", "--tolerance", "1e-2"]
    losses = []
    for spare in ("0", "60"):
        out = tmp_path / spare
        results = train_flow.main([*options, "--spare", spare, "--out", str(out)])
        losses.append(lines(out)[1]["loss"])
        assert results["test"]["sets"] == 2
    assert losses[1] < 0.8 * losses[0]
    splits = train_flow.load_sets(train_flow.parse(["--load", str(out), "--evaluate"]))
    assert splits.train.draw(np.arange(2))[0].shape == (2, 20, 3)  # an evaluation spares none


def test_a_flow_that_explodes_is_one_line_and_exit_code_1(runs, tmp_path, capsys):
    out, _ = runs["matching"]
    (tmp_path / "config.json").write_bytes((out / "config.json").read_bytes())
    state = training.read_checkpoint(out / "best.pt")
    state["model"] = {k: v * (1e30 if "out.weight" in k else 1) for k, v in state["model"].items()}
    torch.save(state, tmp_path / "best.pt")
    for task in (["--evaluate"], ["--sample", "2"]):
        code, err = run_here(capsys, "--load", tmp_path, *task)
        assert (code, err.count("\n")) == (1, 1), err


def test_paths_lead_from_the_noise_to_the_samples(runs):
    out, _ = runs["matching"]
    model = exnode.load(out)
    z = torch.randn(2, 9, 2)
    path = flow_pictures.paths(model, z, 5)
    torch.testing.assert_close(path[0], model.from_units(z))
    torch.testing.assert_close(path[-1], model.decode(z), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        path[2], model.from_units(model.blocks[1].inverse(z)), atol=1e-3, rtol=1e-3
    )


def copy_of(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_wrong_usage_is_one_line_and_exit_code_2(runs, tmp_path, capsys):
    out, _ = runs["matching"]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((out / "config.json").read_bytes())
    (broken / "best.pt").write_bytes((out / "best.pt").read_bytes()[:1000])
    config = json.loads((out / "config.json").read_text())
    spare = copy_of(tmp_path / "spare", config | {"spare": 9, "coupling": "none"})
    damaged = {"heads": 0, "hidden": None, "tolerance": -1.0, "blocks": [], "seed": "x"}
    damaged = {k: copy_of(tmp_path / k, config | {k: v}) for k, v in damaged.items()}
    cases = {
        **{("--load", path, "--sample", "3"): name for name, path in damaged.items()},
        **({} if torch.cuda.is_available() else {("--cuda", "--out", tmp_path / "c"): "no GPU"}),
        ("--sample", "3"): "--load RUN",
        ("--load", out): "--load RUN goes with",
        ("--load", out, "--sample", "3", "--evaluate"): "goes with one of",
        ("--load", tmp_path / "nowhere", "--sample", "3"): "nowhere",
        ("--load", broken, "--sample", "3"): "damaged",
        ("--load", out, "--sample", "3", "--blocks", "3"): "--blocks is not that of the model",
        ("--load", out, "--sample", "3", "--heads", "4"): "--heads is not that of the model",
        ("--load", out, "--evaluate", "--path"): "--path goes with --sample",
        ("--finetune", out, "--heads", "4"): "--heads is not that of the model",
        ("--finetune", spare, "--objective", "matching", "--coupling", "swaps"): "only with --coup",
        ("--seed", 2**64): "--seed",
        ("--load", out, "--sample", "1", "--points", 10**9): "GiB",
        ("--load", out, "--sample", 10**9, "--points", "5"): "GiB",
        ("--load", out, "--evaluate", "--category", "shapes"): "2-D",
        ("--load", out, "--evaluate", "--lr", "1"): "--lr is for training",
        ("--load", out, "--evaluate", "--objective", "likelihood"): "--objective is for training",
        ("--load", out, "--evaluate", "--resume"): "--resume is for training",
        ("--load", out, "--evaluate", "--decay", "1"): "--decay is for training",
        ("--decay", "1", "--out", tmp_path / "d"): "only with --optimizer muon",
        ("--load", out, "--evaluate", "--method", "rk4"): "--method is for training",
        ("--load", out, "--evaluate", "--probes", "2"): "--probes would not be read",
        ("--load", out, "--sample", "3", "--trace", "exact"): "--trace is for densities",
        ("--load", out, "--sample", "3", "--tolerance", "1e-6"): "--tolerance is for densities",
        ("--points", 10**7, "--out", tmp_path / "w"): "GiB",
        ("--finetune", out, "--load", out, "--evaluate"): "--finetune RUN",
        ("--finetune", out, "--hidden", "6,6", "--out", tmp_path / "x"): "another model",
        ("--heads", "3"): "--heads",
        ("--steps", "2"): "--steps: only with --method rk4 or rk5",
        ("--load", out, "--sample", "3", "--category", "7"): "--category is for sets of data",
        ("--load", out, "--sample", "3", "--out", "/proc/x"): "--out",
        ("--probes", "2", "--objective", "matching"): "--probes would not be read",
        ("--clip", "0"): "--clip",
        (
            "--category",
            "shapes",
            "--points",
            "1",
            "--objective",
            "matching",
            "--out",
            tmp_path / "y",
        ): "vary along every axis",
        ("--gradient", "backprop", "--objective", "matching"): "only with --objective likelihood",
        ("--method", "rk4", "--objective", "matching"): "only with --objective likelihood",
        ("--finest", "0.2"): "only with --objective matching",
        ("--finest", "1e30", "--objective", "matching"): "--finest",
        ("--blocks", 10**8, "--out", tmp_path / "b"): "below 1000",
        ("--probes", 10**8, "--out", tmp_path / "p"): "below 10000",
        ("--spare", "9"): "only with --coupling none",
        ("--data", "mnist", *MATCHING, *SPARE, "--out", tmp_path / "s"): "3-D shapes",
        ("--coupling", "none"): "only with --objective matching",
        ("--hidden", "12,"): "--hidden",
        ("--field", "transformer", "--hidden", "16,32"): "--hidden",
        ("--field", "transformer", "--hidden", "8,8", "--out", tmp_path / "t"): "--hidden",
        ("--fine",): "only with --field transformer",
        ("--fine", "--field", "transformer"): "only with --blocks 1",
        ("--field", "transformer", "--time"): "only with --field attention or deepsets",
        ("--field", "deepsets", "--heads", "2"): "only with --field attention or transformer",
        ("--trace", "exact", "--probes", "2"): "only with --trace hutchinson",
        ("--trace", "sampled", "--probes", "2"): "only with --trace hutchinson",
        ("--trace", "sampled", "--field", "transformer"): "exact trace",
        ("--trace", "sampled", "--objective", "matching"): "training with --objective likelihood",
        ("--trace", "sampled", "--method", "rk4"): "requires --method dopri5",
        ("--load", out, "--evaluate", "--trace", "sampled"): "training with --objective likelihood",
        ("--amp",): "only with --trace sampled",
        ("--amp", "--objective", "matching"): "only with --trace sampled",
        ("--gradient", "backprop", "--points", "5000", "--out", tmp_path / "u"): "GiB",
        ("--ema", "1"): "--ema",
        ("--data", "modelnet", "--root", tmp_path, "--out", tmp_path / "y"): "modelnet",
        ("--category", "unicorn", "--out", tmp_path / "z"): "unicorn",
        ("--out", out): "--resume",
    }
    for options, words in cases.items():
        code, err = run_here(capsys, *options)
        assert (code, err.count("\n")) == (2, 1), (options, err)
        assert words.lower() in err.lower()


# ------------------------------------------------------------------------------- own sets
def write_own(path, dim=3, context=False, sets=60):
    """Ragged sets: "few" have 3 to 5 points about −2, "many" have 7 to 9 about 2."""
    rng = np.random.default_rng(0)
    many = np.arange(sets) % 2
    size = rng.integers(3, 6, sets) + 4 * many
    x = rng.normal(4.0 * many[:, None, None] - 2, 0.5, (sets, 9, dim))
    x[np.arange(9) >= size[:, None]] = np.nan
    more = {"context": many * 2.0 - 1} if context else {"label": np.array(["few", "many"])[many]}
    np.savez(path, x=x, **more)
    return x, size, many


OWN = ["--objective", "matching", "--blocks", "1", "--hidden", "16,16", "--heads", "2", "--time"]
OWN += ["--epochs", "100", "--batch-size", "12", "--lr", "2e-2", "--schedule", "one-cycle"]
OWN += ["--tolerance", "1e-3", "--every", "200"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A flow of a person's own ragged sets in 3-D, conditioned on their labels."""
    base = tmp_path_factory.mktemp("own")
    write_own(base / "own.npz")
    options = ["--data", str(base / "own.npz"), "--condition", "label", "--out", str(base / "run")]
    return base, train_flow.main([*OWN, *options])


@pytest.fixture(scope="module")
def contextual(tmp_path_factory):
    """A flow of ragged sets in 1-D, conditioned on a number that comes with each."""
    base = tmp_path_factory.mktemp("context")
    write_own(base / "own.npz", dim=1, context=True)
    options = ["--data", str(base / "own.npz"), "--condition", "context"]
    return base, train_flow.main([*OWN, *options, "--out", str(base / "run")])


def table_of(path):
    return list(csv.DictReader(path.open()))


def test_the_right_condition_explains_sets_better_than_a_wrong_one(labelled, contextual):
    for kind, (_, results) in (("label", labelled), ("context", contextual)):
        test = results["test"]
        assert test[f"wrong_{kind}"]["ppll"] < test["ppll"] - 1
        assert test[f"wrong_{kind}"]["sets"] == test["sets"] == 6


def test_a_run_keeps_the_sizes_of_its_training_sets_by_label(labelled):
    base, _ = labelled
    train = data.load(str(base / "own.npz")).train
    size, label = train.sizes, train.labels[train.index]
    kept = training.read_sets(base / "run")
    assert kept["dim"] == 3
    for k, name in enumerate(("few", "many")):
        pairs = [[n, int((size[label == k] == n).sum())] for n in np.unique(size[label == k])]
        assert kept["sizes"][name] == pairs


def test_samples_of_a_label_have_its_sizes_and_lie_where_its_sets_do(labelled, tmp_path):
    base, _ = labelled
    for name, sizes, centre in (("few", {3, 4, 5}, -2), ("many", {7, 8, 9}, 2)):
        out = tmp_path / name
        options = ["--load", str(base / "run"), "--sample", "8", "--label", name]
        made = train_flow.main([*options, "--out", str(out)])
        assert set(made["mask"].sum(1).tolist()) <= sizes
        assert made["samples"][made["mask"]].mean().item() == pytest.approx(centre, abs=0.5)
        [array], [zipped] = out.glob("*.npy"), out.glob("*.npz")
        x, there = np.load(array), made["mask"].numpy()
        assert (np.isnan(x).any(-1) == ~there).all()
        np.testing.assert_array_equal(x[there], made["samples"].numpy()[there])
        np.testing.assert_array_equal(np.load(zipped)["mask"], there)
        back, mask, _ = data.load_all(zipped.with_suffix(""), "own").draw(np.arange(8))
        assert sorted(mask.sum(1)) == sorted(there.sum(1))  # from the folder of PLY files
        assert back.shape[-1] == 3


def test_samples_without_a_label_have_labels_as_often_as_training_sets(labelled, tmp_path):
    base, _ = labelled
    options = ["--load", str(base / "run"), "--sample", "60", "--out", str(tmp_path)]
    made = train_flow.main(options)
    large = made["mask"].sum(1) > 6
    assert 20 < large.sum() < 40
    middle = [made["samples"][k][made["mask"][k]].mean().item() for k in range(60)]
    assert ((np.array(middle) > 0) == large.numpy()).mean() > 0.9
    made = train_flow.main([*options, "--points", "6"])
    assert made["mask"].all()
    assert made["samples"].shape == (60, 6, 3)


def test_samples_follow_the_context_that_is_asked_for(contextual, tmp_path):
    base, _ = contextual
    for context in ("-1", "1"):
        options = ["--load", str(base / "run"), "--sample", "9", "--out", str(tmp_path)]
        made = train_flow.main([*options, f"--context={context}", "--seed", "1"])
        middle = made["samples"][made["mask"]].mean().item()
        assert middle == pytest.approx(2 * float(context), abs=0.6)


def test_scores_are_each_set_s_log_p_the_least_likely_first(labelled, tmp_path, capsys):
    base, results = labelled
    out = tmp_path / "out"
    options = ["--load", base / "run", "--score", base / "own.npz", "--tolerance", "1e-5"]
    code, err = run_here(capsys, *options, "--out", out)
    assert code == 0, err
    rows = table_of(out / "scores-own.csv")
    x, size, many = write_own(tmp_path / "again.npz")
    values = [float(row["nats_per_point"]) for row in rows]
    assert values == sorted(values)
    model, solver = exnode.load(base / "run"), {"method": "dopri5", "rtol": 1e-5, "atol": 1e-5}
    for row in rows[::7]:
        k = int(row["name"])
        assert (int(row["points"]), row["label"]) == (size[k], ("few", "many")[many[k]])
        given = torch.nn.functional.one_hot(torch.tensor([many[k]]), 2).float()
        one = torch.from_numpy(x[k : k + 1, : size[k]]).float()
        log_p = model.log_prob(one, context=given, trace="exact", solver=solver).item()
        assert float(row["log_p"]) == pytest.approx(log_p, abs=1e-2)
        assert float(row["nats_per_point"]) == pytest.approx(log_p / size[k], abs=2e-3)
        share = np.interp(float(row["nats_per_point"]), results["test"]["quantiles"], range(101))
        assert float(row["percentile"]) == pytest.approx(share, abs=0.1)


def test_labels_mean_the_same_in_a_file_that_has_not_all_of_them(labelled, tmp_path):
    base, _ = labelled
    x, _, many = write_own(tmp_path / "own.npz")
    np.savez(tmp_path / "many.npz", x=x[many == 1], label=["many"] * many.sum())
    how = ["--load", str(base / "run"), "--tolerance", "1e-5", "--out", str(tmp_path), "--score"]
    every, some = (train_flow.main([*how, str(tmp_path / f"{k}.npz")]) for k in ("own", "many"))
    every = dict(zip(every["names"], every["nats_per_point"]))
    for name, value in zip(some["names"], some["nats_per_point"]):
        assert value == pytest.approx(every[str(2 * int(name) + 1)], abs=2e-3)


def test_an_evaluation_on_a_file_that_has_not_all_labels_conditions_on_the_right_ones(
    labelled, tmp_path
):
    base, results = labelled
    x, _, many = write_own(tmp_path / "own.npz")
    np.savez(tmp_path / "many.npz", x=x[many == 1], label=["many"] * many.sum())
    how = ["--load", str(base / "run"), "--evaluate", "--data", str(tmp_path / "many.npz")]
    test = train_flow.main([*how, "--noise", "1e-9", "--out", str(tmp_path / "out")])["test"]
    assert test["wrong_label"]["ppll"] < test["ppll"] - 1
    assert test["ppll"] > results["test"]["ppll"] - 1


def test_options_that_a_run_has_are_not_typed_when_it_is_evaluated(runs, tmp_path):
    config = json.loads((runs["matching"][0] / "config.json").read_text())
    run = copy_of(tmp_path / "run", config | {"trace": "hutchinson", "probes": 4})
    args = train_flow.parse(["--load", str(run), "--evaluate", "--trace", "exact"])
    assert (args.trace, args.probes) == ("exact", 4)


def test_sets_that_are_unlike_the_training_sets_have_low_percentiles(labelled, tmp_path, capsys):
    base, _ = labelled
    x, _, many = write_own(tmp_path / "own.npz", sets=20)
    strange = tmp_path / "strange.npz"
    np.savez(strange, x=-x, label=np.array(["few", "many"])[many])  # each where the other one is
    code, err = run_here(capsys, "--load", base / "run", "--score", strange, "--out", tmp_path)
    assert code == 0, err
    assert all(float(r["percentile"]) == 0 for r in table_of(tmp_path / "scores-strange.csv"))
    assert "area under the curve 1.000" in err


def test_finetuning_reads_own_sets_as_its_run_did(tmp_path):
    config = {"data": "own.csv", "noise": 0.5, "columns": "set=s", "skip_bad": True}
    run = copy_of(tmp_path / "run", config)
    args = train_flow.parse(["--finetune", str(run), "--out", str(tmp_path / "fine")])
    assert {name: vars(args)[name] for name in config} == config


def test_percentiles_are_among_test_densities_in_the_units_of_the_model(runs, tmp_path):
    """Those of mnist are given in pixels, and the model's sets are in shares of the canvas."""
    out, results = tmp_path / "run", runs["matching"][1]
    out.mkdir()
    for name, unit in (("model", 0.0), ("pixels", -6.0)):
        test = results["test"] | {"log_unit": unit}
        test["quantiles"] = [v + unit for v in test["quantiles"]]
        (out / "results.json").write_text(json.dumps({"test": test}))
        np.testing.assert_allclose(
            training.test_quantiles(out), results["test"]["quantiles"], err_msg=name
        )


def test_sets_are_scored_with_as_many_points_as_the_run_has(runs, tmp_path):
    out, _ = runs["matching"]
    np.save(tmp_path / "large.npy", np.random.default_rng(0).random((4, 30, 2)))
    found = train_flow.main(["--load", str(out), "--score", str(tmp_path / "large.npy")])
    assert found["points"].tolist() == [5] * 4
    (out / "scores-large.csv").unlink()


def test_what_is_wrong_with_own_sets_is_one_line(labelled, contextual, tmp_path, capsys):
    run, other = (base / "run" for base, _ in (labelled, contextual))
    x, _, many = write_own(tmp_path / "own.npz")
    paths = {name: tmp_path / f"{name}.npz" for name in ("bare", "strange", "flat", "two")}
    np.savez(paths["bare"], x=x)
    np.savez(paths["strange"], x=x, label=np.where(many, "many", "cat"))
    np.savez(paths["flat"], x=x[..., :1])
    np.savez(paths["two"], x=x[..., :1], context=np.zeros((60, 2)))
    damaged = copy_of(tmp_path / "empty", json.loads((run / "config.json").read_text()))
    (damaged / "best.pt").write_bytes((run / "best.pt").read_bytes())
    (damaged / "sets.json").write_text('{"dim": 3, "sizes": {"few": [], "many": [[3, 1]]}}')
    train = [*OWN, "--out", tmp_path / "out"]
    cases = {
        (*train, "--data", paths["bare"], "--condition", "label"): "no labels",
        (*train, "--data", paths["bare"], "--condition", "context"): "have none",
        ("--load", run, "--score", paths["bare"]): "no labels",
        ("--load", run, "--score", paths["strange"]): "no class 'cat'",
        ("--load", run, "--score", paths["flat"]): "1-D, the model 3-D",
        ("--load", run, "--score", tmp_path / "nowhere.npz"): "nowhere.npz",
        ("--load", run, "--sample", "3", "--label", "cat"): "there are few, many",
        ("--load", damaged, "--sample", "3", "--label", "few"): "there are many",
        ("--load", run, "--sample", "3", "--context", "1"): "--context",
        ("--load", run, "--evaluate", "--label", "few"): "go with --sample",
        ("--load", other, "--score", paths["flat"]): "no context",
        ("--load", other, "--score", paths["two"]): "2 numbers",
        ("--load", other, "--evaluate", "--data", paths["two"]): "2 numbers",
        ("--load", other, "--evaluate", "--data", paths["flat"]): "no context",
        ("--load", run, "--evaluate", "--data", paths["bare"]): "no labels",
        ("--load", other, "--sample", "3"): "--context",
        ("--load", other, "--sample", "3", "--context", "1,2"): "2 numbers",
        ("--load", other, "--sample", "3", "--label", "few"): "not conditioned on labels",
    }
    for options, words in cases.items():
        code, err = run_here(capsys, *options)
        assert (code, err.count("\n")) == (2, 1), (options, err)
        assert words in err, (options, err)


def test_a_run_trained_in_bfloat16_can_be_tested_with_any_trace():
    run = str(Path(train_flow.__file__).parent / "pretrained" / "mnist-paper")
    for trace in ("exact", "hutchinson"):
        words = ["--load", run, "--evaluate", "--trace", trace]
        assert train_flow.parse(words).trace == trace


def test_help_says_in_sentences_what_every_option_does(capsys):
    check_help(train_flow, capsys)
