"""train_cls.py as people use it: the command line, on the built-in shapes."""

import csv
import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import TWO_PROCESSES, call, check_help, lines, start, stop_early

import data
import exnode
import train_cls
from support import models, training

SMALL = ["--model", "deepsets", "--points", "6", "--batch-size", "450", "--epochs", "2"]


script, run_here = partial(start, "train_cls.py"), partial(call, train_cls)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts, and its results."""
    out = tmp_path_factory.mktemp("cls") / "whole"
    return out, train_cls.main([*SMALL, "--out", str(out)])


def test_a_run_learns_and_leaves_all_its_files(whole):
    out, results = whole
    names = {"config.json", "metrics.jsonl", "last.pt", "best.pt", "results.json"}
    names |= {"sets.json", "curves.png", "confusion.png", "view.html"}
    assert {p.name for p in out.iterdir()} == names
    table = lines(out)
    assert [line["epoch"] for line in table] == [0, 1, 2]
    assert table[2]["loss"] < table[1]["loss"] < table[0]["valid_loss"]
    test = results["test"]
    assert test["accuracy"] > 0.5  # chance is 1/6
    assert results == json.loads((out / "results.json").read_text())
    counts = torch.tensor(test["confusion"])
    assert counts.sum() == 1000
    assert test["accuracy"] == counts.trace().item() / 1000
    assert test["per_class"]["chair"] == counts[2, 2].item() / counts[2].sum().item()


def test_the_paper_s_model_learns(tmp_path):
    options = ["--points", "4", "--batch-size", "128", "--epochs", "1", "--category", "chair,vase"]
    results = train_cls.main([*options, "--out", str(tmp_path / "run")])
    assert results["test"]["accuracy"] > 0.7  # chance is 1/2


def test_training_sets_are_augmented_if_asked_or_many_and_as_many_held_out_as_asked():
    for options, augmented in (("", False), ("--points 1000", True), ("--augment", True),
                               ("--points 1000 --no-augment", False)):  # fmt: skip
        args = train_cls.parse([*options.split(), "--valid", "0.01"])
        splits = train_cls.load_sets(args)
        assert [split.source.augment for split in splits] == [augmented, False, False]
        assert len(splits.valid) == round(0.01 * (len(splits.train) + len(splits.valid)))


@pytest.mark.parametrize("model", models.CLASSIFIERS)
def test_models_have_the_sizes_of_table_1(model):
    sizes = {"exnode-deepsets": 581_416, "exnode-attention": 516_392}
    sizes |= {"deepsets": 208_680, "settransformer": 1_148_456}
    assert sum(p.numel() for p in models.CLASSIFIERS[model](3, 40).parameters()) == sizes[model]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model", models.CLASSIFIERS)
def test_at_the_start_the_units_of_the_data_do_not_matter(model, masked):
    found = []
    for scale, shift in ((1.0, 0.0), (100.0, 300.0), (0.01, -0.02)):
        torch.manual_seed(0)
        classifier = models.CLASSIFIERS[model](3, 5).double().eval()
        x, mask = scale * torch.randn(20, 9, 3).double() + shift, torch.rand(20, 9) < 0.7
        mask[:, 0] = True
        given = x, (mask if masked else None)
        train_cls.start_in_units(classifier, *given)
        found.append(classifier(*given))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_a_run_stopped_by_sigterm_within_an_epoch_resumes_to_the_same_numbers(whole, tmp_path):
    reference, results = whole
    out = tmp_path / "run"
    process = script(*SMALL, "--out", out)
    err = stop_early(process, out, 0.3)
    assert "--resume goes on" in err
    step = training.read_checkpoint(out / "last.pt")["step"]
    assert step < 24
    again = train_cls.main([*SMALL, "--out", str(out), "--resume"])
    assert again["test"] == results["test"]
    assert lines(out) == lines(reference)
    a, b = (training.read_checkpoint(path / "last.pt")["model"] for path in (out, reference))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_processes_by_torchrun_equal_one(tmp_path):
    options = ["--points", "2", "--batch-size", "2700", "--epochs", "1"]
    train_cls.main([*options, "--out", str(tmp_path / "one")])
    process = script(*options, "--out", tmp_path / "two", launcher=TWO_PROCESSES)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    for a, b in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert a["step"] == b["step"]
        assert a["valid_loss"] == pytest.approx(b["valid_loss"], rel=1e-3)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    assert results["processes"] == 2
    assert sum(map(sum, results["test"]["confusion"])) == 1000


def test_several_runs_give_mean_and_deviation_and_go_on_as_a_whole(tmp_path, capsys):
    options = [*SMALL[:-1], "1", "--out", str(tmp_path), "--seed", "4"]
    train_cls.main([*options[:-4], "--out", str(tmp_path / "seed4"), "--seed", "4"])
    results = train_cls.main([*options, "--runs", "2", "--resume"])
    assert f"{tmp_path / 'seed4'} is complete" in capsys.readouterr().err
    a, b = results["accuracy"]
    assert a != b
    assert results["mean"] == pytest.approx((a + b) / 2)
    assert results["std"] == pytest.approx(abs(a - b) / 2**0.5)
    assert [run["seed"] for run in results["runs"]] == [4, 5]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    capsys.readouterr()
    assert train_cls.main(["--resume", "--out", str(tmp_path)]) == results
    code, err = run_here(capsys, *options, "--runs", "3", "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert "runs 2 → 3" in err


def test_a_finished_run_can_be_evaluated_again_also_with_other_points(whole, capsys):
    out, results = whole
    assert train_cls.main(["--load", str(out), "--evaluate"])["test"] == results["test"]
    more = train_cls.main(["--load", str(out), "--evaluate", "--points", "32"])
    assert more["test"]["accuracy"] != results["test"]["accuracy"]
    assert json.loads((out / "evaluation.json").read_text()) == more
    assert (more["config"]["points"], results["config"]["points"]) == (32, 6)
    trained = {name: results[name] for name in ("parameters", "steps", "seconds", "command")}
    assert trained.items() <= more["trained"].items()
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    wrong = {"--model settransformer": "of another model", "--lr 1": "--lr is for training"}
    wrong |= {"--runs 2": "--runs is for training", "--resume": "--resume is for training"}
    for options, words in wrong.items():
        code, err = run_here(capsys, "--load", out, "--evaluate", *options.split())
        assert (code, err.count("\n")) == (2, 1)
        assert words in err


def test_the_last_weights_of_a_run_can_be_evaluated_too(tmp_path):
    out = tmp_path / "run"
    options = ["--model", "deepsets", "--points", "6", "--batch-size", "450", "--epochs", "1"]
    best = train_cls.main([*options, "--ema", "0.9", "--out", str(out)])["test"]
    options = ["--load", str(out), "--evaluate"]
    assert train_cls.main([*options, "--last"])["test"] == best  # the end is the best here
    state = training.read_checkpoint(out / "last.pt")
    state["average"] = {name: 0 * value for name, value in state["average"].items()}
    torch.save(state, out / "last.pt")
    assert train_cls.main([*options, "--last"])["test"]["accuracy"] < 0.5 * best["accuracy"]
    assert train_cls.main(options)["test"] == best


def test_the_last_weights_are_kept_if_asked(tmp_path, monkeypatch):
    hits = iter(range(99, 0, -1))  # fewer in every evaluation
    worse = lambda *_: (torch.diag(torch.tensor([next(hits), 1])), 1.0)  # noqa: E731
    monkeypatch.setattr(train_cls, "confusion_matrix", worse)
    how = [*SMALL, "--category", "chair,vase", "--every", "1"]
    best = train_cls.main([*how, "--out", str(tmp_path / "best")])
    last = train_cls.main([*how, "--keep", "last", "--out", str(tmp_path / "last")])
    assert best["best_step"] == 0
    assert last["best_step"] == last["steps"] > 0


def test_finetuning_starts_from_a_run_with_its_data_and_model(whole, tmp_path, capsys):
    out, results = whole
    options = ["--finetune", str(out), "--out", str(tmp_path / "fine"), "--epochs", "1"]
    config = train_cls.main([*options, "--batch-size", "512", "--lr", "1e-4"])["config"]
    for name in train_cls.MODEL_OPTIONS:
        assert config[name] == results["config"][name]
    assert lines(tmp_path / "fine")[0]["valid_accuracy"] == pytest.approx(results["best"])
    for wrong in (["--runs", "2"], ["--load", out, "--evaluate"]):
        code, err = run_here(capsys, *options, *wrong)
        assert (code, err.count("\n")) == (2, 1)
        assert "--finetune RUN trains one run" in err


# ------------------------------------------------------------------------------------ in stages
STAGES = ["--model", "deepsets", "--batch-size", "450", "--stages", "4:2,6:1:5e-4", "--lr", "2e-3"]


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Two runs in two stages each, their results, and how often the test was read."""
    out, read = tmp_path_factory.mktemp("cls") / "staged", []
    with pytest.MonkeyPatch.context() as patch:
        test = train_cls.test_metrics
        patch.setattr(train_cls, "test_metrics", lambda *given: read.append(0) or test(*given))
        results = train_cls.main([*STAGES, "--runs", "2", "--out", str(out)])
    return out, results, len(read)


def test_stages_go_on_from_the_best_weights_and_only_the_last_is_tested(staged):
    out, results, read = staged
    assert read == 2  # once for each seed
    run = results["runs"][1]
    first = json.loads((out / "seed1" / "stage1" / "results.json").read_text())
    assert "test" not in first
    assert run["earlier"] == [{k: first[k] for k in ("best", "epochs", "seconds")}]
    last = training.read_checkpoint(out / "seed1" / "best.pt")
    found = [[part["config"][k] for k in ("points", "epochs", "lr")] for part in (first, last)]
    assert found == [[4, 2, 2e-3], [6, 1, 5e-4]]
    weights = training.read_checkpoint(out / "seed1" / "stage1" / "best.pt")["model"]
    args = train_cls.parse(["--load", str(out / "seed1"), "--evaluate"])
    splits = train_cls.load_sets(args)
    model = train_cls.make_model(args, splits.train)
    model.load_state_dict(weights)
    world = training.World(torch.device("cpu"))
    counts, _ = train_cls.confusion_matrix(model.eval(), splits.valid, 450, world)
    start = lines(out / "seed1")[0]["valid_accuracy"]
    assert start == pytest.approx(counts.trace().item() / len(splits.valid))
    assert results["mean"] == pytest.approx(sum(results["accuracy"]) / 2)


def test_results_of_stages_are_their_own_recipe(staged, tmp_path):
    recipe = train_cls.parse(["--as", str(staged[0] / "results.json"), "--out", str(tmp_path)])
    (words,) = recipe.recipe
    again, before = train_cls.parse(words), train_cls.parse([*STAGES, "--runs", "2"])
    assert (again.stages, again.finetune, again.lr) == (before.stages, None, before.lr)
    assert train_cls.each_stage(again)[0].epochs == 2


def test_a_run_in_stages_resumes_to_the_same_numbers_and_can_be_evaluated(staged, tmp_path, capsys):
    out, results, _ = staged
    again = Path(shutil.copytree(out, tmp_path / "again"))
    (again / "results.json").unlink()
    for path in (again / "seed1").iterdir():  # as if stopped between the stages
        if path.is_file() and path.name != "config.json":
            path.unlink()
    code, err = run_here(capsys, "--resume", "--out", again)
    assert code == 0, err
    assert "seed0 is complete: accuracy" in err
    assert "stage1 is complete: best" in err
    found = json.loads((again / "results.json").read_text())
    assert found["accuracy"] == results["accuracy"]
    tested = train_cls.main(["--load", str(out / "seed0"), "--evaluate"])
    assert tested["test"]["accuracy"] == results["accuracy"][0]
    code, err = run_here(capsys, "--load", out / "seed0", "--evaluate", "--stages", "5:1")
    assert (code, err.count("\n")) == (2, 1)


# --------------------------------------------------------------------------------- in bfloat16
def test_amp_trains_and_tests_in_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr("support.processes.has_bfloat16", lambda device: True)  # or emulated
    out = str(tmp_path / "run")
    options = ["--points", "4", "--batch-size", "128", "--epochs", "1", "--category", "chair,vase"]
    results = train_cls.main([*options, "--amp", "--optimizer", "muon", "--out", out])
    assert results["test"]["accuracy"] > 0.7  # chance is 1/2
    assert results["config"]["amp"]
    again = train_cls.main(["--load", out, "--evaluate"])["test"]
    assert again == results["test"]
    precise = train_cls.main(["--load", out, "--evaluate", "--no-amp"])["test"]
    assert precise["loss"] != again["loss"]
    assert precise["loss"] == pytest.approx(again["loss"], rel=0.02)
    kept = training.read_checkpoint(Path(out) / "last.pt")
    assert {v.dtype for v in kept["model"].values()} == {torch.float32, torch.int64}


def test_amp_counts_the_matrices_of_attention_in_memory(monkeypatch):
    args = train_cls.parse(["--model", "exnode-attention", "--batch-size", "2"])
    asked = []
    monkeypatch.setattr(training, "check_memory", lambda need, *_: asked.append(need))
    for amp in (False, True):
        train_cls.check_memory(args, training.World(torch.device("cpu"), amp=amp), 4096)
    kept = []
    torch.manual_seed(0)
    model, x = models.CLASSIFIERS["exnode-attention"](3, 40), torch.randn(2, 512, 3)

    def keep(tensor):
        kept.append(tensor.untyped_storage())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model(x)
    sizes = {part.data_ptr(): part.nbytes() for part in kept}
    matrices = [size for size in sizes.values() if size == 2 * 4 * 512**2]
    assert len(matrices) == 4 * 2  # evaluations, sets
    assert asked[1] - asked[0] == sum(matrices) * (4096 / 512) ** 2


def test_amp_without_bfloat16_is_one_line_and_float32(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    code, err = run_here(capsys, *SMALL, "--amp", "--out", tmp_path / "run")
    assert code == 0, err
    assert err.count("--amp: this cpu has no bfloat16, so all is computed in float32\n") == 1
    assert lines(tmp_path / "run") == lines(whole[0])


def test_a_loss_that_explodes_exits_with_1_and_names_the_checkpoint(tmp_path, capsys):
    code, err = run_here(capsys, *SMALL, "--lr", "1e37", "--out", tmp_path / "run")
    assert code == 1
    last = tmp_path / "run" / "last.pt"
    assert re.search(rf"at step \d+ \(epoch 1\), learning rate 1e\+37; .* is {last}\n$", err)
    assert training.read_checkpoint(last)["step"] == 0


def test_a_learning_rate_out_of_reason_never_ends_in_an_accuracy(tmp_path, capsys):
    for more in ([], ["--resume"]):
        words = [*SMALL, "--lr", "1e37", "--every", "1", "--out", tmp_path / "run", *more]
        code, err = run_here(capsys, *words)
        assert code == 1
        assert "test accuracy" not in err
        assert "Traceback" not in err
        assert re.search(r"the last good checkpoint is .*/(best|last)\.pt", err)
    code, err = run_here(capsys, "--load", tmp_path / "run", "--evaluate")  # that of step 0
    assert code == 0, err


@pytest.mark.parametrize("value", [float("nan"), 1e38])
def test_weights_that_are_not_finite_or_lead_there_are_not_tested(whole, tmp_path, capsys, value):
    out = Path(shutil.copytree(whole[0], tmp_path / "run"))
    state = training.read_checkpoint(out / "best.pt")
    for weight in state["model"].values():
        if weight.is_floating_point():
            weight.fill_(value)
    torch.save(state, out / "best.pt")
    (out / "evaluation.json").unlink(missing_ok=True)  # of another test
    code, err = run_here(capsys, "--load", out, "--evaluate")
    assert code == (1 if value == 1e38 else 2)
    assert err.count("\n") == 1
    assert "finite" in err or "the weights are bad" in err
    assert not (out / "evaluation.json").exists()


def test_evaluations_have_the_batch_statistics_of_the_weights_that_they_judge(whole):
    out, _ = whole
    args = train_cls.parse(["--load", str(out), "--evaluate"])
    args.load = None
    splits = train_cls.load_sets(args)
    model = train_cls.make_model(args, splits.train)
    training.load_best(model, out)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    world = training.World(torch.device("cpu"))
    batches = data.epochs(splits.train, args.batch_size, args.seed)
    train_cls.renew_statistics(model, batches, world)
    for name, buffer in model.named_buffers():
        if "num_batches" not in name:
            torch.testing.assert_close(buffer, kept[name])


def test_resume_by_itself_goes_on_with_the_options_of_the_run(whole, tmp_path, capsys):
    out = tmp_path / "run"
    process = script(*SMALL, "--out", out)
    stop_early(process, out, 0.0)
    code, err = run_here(capsys, "--resume", "--out", out)
    assert code == 0, err
    assert lines(out) == lines(whole[0])
    code, err = run_here(capsys, "--resume", "--out", out, "--epochs", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "epochs 2 → 3" in err


def test_the_config_of_a_run_does_not_say_where_an_evaluation_is_written(whole, tmp_path):
    out = Path(shutil.copytree(whole[0], tmp_path / "run"))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"out": str(tmp_path / "elsewhere")}))
    train_cls.main(["--load", str(out), "--evaluate"])
    assert (out / "evaluation.json").exists()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line_and_exit_code_2(tmp_path):
    process = script("--cuda", "--out", tmp_path / "run")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert "no GPU" in err
    assert not (tmp_path / "run").exists()


WRONG = [
    ["--model", "pointnet"],
    ["--points", "0"],
    ["--points", "many"],
    ["--epochs", "0"],
    ["--epochs", "1.5"],
    ["--minutes", "-1"],
    ["--minutes", "nan"],
    ["--batch-size", "1"],
    ["--lr", "inf"],
    ["--ema", "1"],
    ["--runs", "0"],
    ["--seed", "-1"],
    ["--data", "imagenet"],
    ["--data", "mnist", "--root", "/nowhere"],
    ["--data", "modelnet", "--root", "/nowhere"],
    ["--category", "chairs"],
    ["--category", "digits", "--augment"],
    ["--valid", "0"],
    ["--valid", "1"],
    ["--schedule", "linear"],
    ["--stages", "50"],
    ["--stages", "50:0"],
    ["--stages", "50:2,"],
    ["--stages", "50:2:fast"],
    ["--stages", "50:2:1e-3:1"],
    ["--stages", "5:1", "--points", "6"],
    ["--stages", "5:1", "--epochs", "2"],
    ["--stages", "5:1", "--minutes", "1"],
    ["--evaluate"],
    ["--last"],
    ["--load", "/nowhere"],
    ["--load", "/nowhere", "--evaluate"],
    ["--out", "/proc/run"],
    ["--unknown"],
    ["stray"],
]


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_a_wrong_option_is_one_line_and_exit_code_2(options, tmp_path, capsys):
    out = [] if "--out" in options else ["--out", tmp_path / "run"]
    code, err = run_here(capsys, *out, *options)
    assert code == 2
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_second_run_into_the_same_directory_is_refused(whole, capsys):
    out, _ = whole
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    code, err = run_here(capsys, *SMALL, "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    code, err = run_here(capsys, *SMALL, "--out", out, "--resume", "--lr", "0.5")
    assert (code, err.count("\n")) == (2, 1)
    assert "lr 0.001 → 0.5" in err
    code, err = run_here(capsys, *SMALL, "--out", out, "--resume", "--runs", "2")
    assert (code, err.count("\n")) == (2, 1)
    assert before == {p.name: p.read_bytes() for p in out.iterdir()}


# ------------------------------------------------------------------------------- own sets
def write_own(path, sets=60):
    """Ragged sets in 2-D of three classes, which differ in width; their sizes and labels."""
    rng = np.random.default_rng(0)
    label, size = np.arange(sets) % 3, rng.integers(5, 9, sets)
    x = rng.normal(0, 0.1 * 8.0 ** label[:, None, None], (sets, 8, 2))
    x[np.arange(8) >= size[:, None]] = np.nan
    np.savez(path, x=x, label=np.array(["a", "b", "c"])[label])
    return x, size, label


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A classifier of a person's own ragged sets."""
    base = tmp_path_factory.mktemp("own")
    write_own(base / "own.npz")
    options = ["--model", "deepsets", "--data", str(base / "own.npz"), "--batch-size", "16"]
    options += ["--epochs", "30", "--lr", "3e-3", "--out", str(base / "run")]
    return base, train_cls.main(options)


def test_own_ragged_sets_of_any_classes_are_learned(own):
    base, results = own
    assert results["test"]["accuracy"] == 1
    assert list(results["test"]["per_class"]) == ["a", "b", "c"]
    assert list(training.read_sets(base / "run")["sizes"]) == ["a", "b", "c"]


def test_scores_are_probabilities_of_classes_for_each_set_as_in_the_file(own, tmp_path, capsys):
    base, _ = own
    x, size, label = write_own(tmp_path / "again.npz")
    np.save(tmp_path / "new.npy", x)  # without labels
    for path, known in ((base / "own.npz", True), (tmp_path / "new.npy", False)):
        code, err = run_here(capsys, "--load", base / "run", "--score", path, "--out", tmp_path)
        assert code == 0, err
        table = list(csv.DictReader((tmp_path / f"scores-{path.stem}.csv").open()))
        assert [int(row["name"]) for row in table] == [*range(60)]
        assert [int(row["points"]) for row in table] == size.tolist()
        names = np.array(["a", "b", "c"])[label].tolist()
        assert np.mean([row["predicted"] == name for row, name in zip(table, names)]) > 0.9
        assert [row["label"] for row in table] == (names if known else [""] * 60)
    model = exnode.load(base / "run")
    for k in (0, 7, 20):
        one = torch.from_numpy(x[k : k + 1, : size[k]]).float()
        shares = model(one).softmax(-1)[0].tolist()
        assert [float(table[k][c]) for c in "abc"] == pytest.approx(shares, abs=1e-4)


def test_a_class_without_test_sets_has_no_accuracy(own, tmp_path):
    x, _, label = write_own(tmp_path / "own.npz")
    names, split = np.array(["a", "b", "c"])[label], np.where(label < 2, "test", "train")
    split[:30] = "train"
    np.savez(tmp_path / "own.npz", x=x, label=names, split=split)
    how = ["--load", str(own[0] / "run"), "--evaluate", "--data", str(tmp_path / "own.npz")]
    test = train_cls.main([*how, "--out", str(tmp_path / "out")])["test"]
    assert test["per_class"]["c"] is None
    assert test["class_accuracy"] == (test["per_class"]["a"] + test["per_class"]["b"]) / 2
    assert (tmp_path / "out" / "evaluation.png").exists()


def test_scores_of_a_run_in_bfloat16_are_probabilities(own, tmp_path):
    base, _ = own
    shutil.copytree(base / "run", tmp_path / "run")
    config = json.loads((base / "run" / "config.json").read_text()) | {"amp": True}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    how = ["--load", str(tmp_path / "run"), "--score", str(base / "own.npz")]
    shares = train_cls.main([*how, "--out", str(tmp_path)])["probabilities"]
    torch.testing.assert_close(shares.sum(-1), torch.ones(60))


def test_what_is_wrong_with_own_sets_is_one_line(own, tmp_path, capsys):
    base, _ = own
    x, *_ = write_own(tmp_path / "own.npz")
    np.save(tmp_path / "bare.npy", x)
    np.save(tmp_path / "flat.npy", x[..., :1])
    np.savez(tmp_path / "other.npz", x=x, label=["a", "b", "z"] * 20)
    cases = {
        ("--data", tmp_path / "bare.npy", "--out", tmp_path / "run"): "no labels",
        ("--load", base / "run", "--score", tmp_path / "flat.npy"): "1-D, the model 2-D",
        ("--load", base / "run", "--score", tmp_path / "nowhere.npy"): "nowhere.npy",
        ("--load", base / "run", "--evaluate", "--data", tmp_path / "other.npz"): "are of a, b, z",
        ("--load", base / "run", "--score", tmp_path / "flat.npy", "--evaluate"): "one of",
        ("--score", tmp_path / "flat.npy"): "--load RUN",
    }
    for options, words in cases.items():
        code, err = run_here(capsys, *options)
        assert (code, err.count("\n")) == (2, 1), (options, err)
        assert words in err, (options, err)


def test_help_says_in_sentences_what_every_option_does(capsys):
    check_help(train_cls, capsys)
