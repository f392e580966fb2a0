"""The options of the three scripts: typed, kept, and read from another run."""

import json

import pytest
from scripts import call

import train_cls
import train_flow
import train_temporal
from support import options, progress
from support.options import UsageError

SCRIPTS = {"cls": train_cls, "flow": train_flow, "temporal": train_temporal}


def keep(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_resume_by_itself_has_the_options_of_the_run(script, tmp_path):
    args = script.parse(["--lr", "0.25", "--seed", "7", "--points", "9", "--runs", "3"])
    run = keep(tmp_path / "run", **options.configuration(args))
    again = script.parse(["--resume", "--out", run])
    assert options.configuration(again) == options.configuration(args)
    assert (again.resume, again.out) == (True, run)
    typed = script.parse(["--resume", "--out", run, "--lr", "0.5"])  # which `look` then refuses
    assert (typed.lr, typed.points) == (0.5, 9)
    assert script.parse(["--resume", "--out", str(tmp_path / "new")]).lr == 0.001


def test_resuming_does_not_read_the_run_that_was_fine_tuned(tmp_path):
    run = keep(tmp_path / "run", finetune=str(tmp_path / "gone"), lr=0.25, model="deepsets")
    args = train_cls.parse(["--resume", "--out", run])
    assert (args.lr, args.model, args.finetune) == (0.25, "deepsets", str(tmp_path / "gone"))


@pytest.mark.parametrize("name", options.PLACES)
def test_what_says_where_to_write_is_not_read_from_a_file(name, tmp_path):
    run = keep(tmp_path / "run", model="deepsets", **{name: str(tmp_path / "elsewhere")})
    args = train_cls.parse(["--load", run, "--evaluate"])
    assert args.model == "deepsets"
    assert args.out == run
    assert "elsewhere" not in str(vars(args))


@pytest.mark.parametrize(("script", "name", "usual"), [
    (train_flow, "test_sets", None), (train_temporal, "test_series", 1000),
])  # fmt: skip
def test_how_much_a_test_reads_is_not_that_of_the_run(script, name, usual, tmp_path):
    args = script.parse([f"--{name.replace('_', '-')}", "2", "--points", "9"])
    run = keep(tmp_path / "run", **options.configuration(args))
    again = script.parse(["--load", run, "--evaluate"])
    assert (getattr(again, name), again.points) == (usual, 9)
    assert getattr(script.parse(["--resume", "--out", run]), name) == 2


CRAFTED = [{"model": "foo"}, {"model": ["foo"]}, {"lr": "fast"}, {"lr": True}, {"lr": None}]
CRAFTED += [{"points": -1}, {"points": {}}, {"points": 10**30}, {"category": {"a": 1}}]
CRAFTED += [{"augment": 5}, {"seed": 1.5}, {"unknown": 1}, {"batch_size": []}, {"lr": float("nan")}]


@pytest.mark.parametrize("config", CRAFTED, ids=str)
def test_a_crafted_config_is_one_line(config, tmp_path, capsys):
    run = keep(tmp_path / "run", **config)
    code, err = call(train_cls, capsys, "--load", run, "--evaluate")
    assert (code, err.count("\n")) == (2, 1), err
    assert "run" in err
    assert next(iter(config)).replace("_", "-") in err.replace("_", "-")


TOO_MUCH = {
    "cls": ["--points 1000000000", "--points 1000000", "--lr 1e38", "--batch-size 1000000000"],
    "flow": [
        "--finest 1e30 --objective matching", "--lr 1e38", "--probes 100000000",
        "--blocks 100000000", "--hidden 60000,60000", "--probes 9999", "--steps 100000000",
    ],
    "temporal": ["--times 1e300,2e300", "--times 0,1e9", "--latent 1000000000", "--latent 1000000"],
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_option_that_asks_too_much_is_one_line_and_exit_code_2(script, tmp_path, capsys):
    root = ["--root", "a" * 300]
    for words in [*(text.split() for text in TOO_MUCH[script]), root]:
        code, err = call(SCRIPTS[script], capsys, *words, "--out", tmp_path / "run")
        assert (code, err.count("\n")) == (2, 1), (words, err)


def test_paths_beside_the_project_are_kept_relative_to_it():
    project = options.PROJECT
    assert options.relative(str(project / "runs" / "x")) == "runs/x"
    assert options.relative(str(project.parent / "data")) == "../data"
    assert options.relative(f"--out={project}/runs/x") == "--out=runs/x"
    for text in ("runs/x", "--lr", "chair", "/elsewhere/x", ""):
        assert options.relative(text) == text
    args = train_cls.parse([])
    args.finetune = str(project / "pretrained" / "shapes")
    assert options.configuration(args)["finetune"] == "pretrained/shapes"


def test_options_that_are_gone_do_not_make_a_run_foreign(tmp_path):
    run = keep(tmp_path / "run", model="deepsets", mix=0.5, other=None)
    assert train_cls.parse(["--load", run, "--evaluate"]).model == "deepsets"
    with pytest.raises(UsageError, match="a run of another script; this one has no blocks"):
        train_cls.parse(["--load", keep(tmp_path / "flow", blocks=12), "--evaluate"])


# ---------------------------------------------------------------------------------------- progress
def test_whatever_takes_long_is_told_every_half_minute(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Now, "said", 0.0)
    assert progress.overdue(1e9) is None  # nothing has a name
    with progress.doing("the first solve"):
        assert progress.overdue(129.9) is None
        assert progress.overdue(131.0) == "the first solve; 31 s so far"
        now[0] = 131.0
        progress.say("a line")
        assert progress.overdue(160.9) is None
        assert progress.overdue(161.1) == "the first solve; 61 s so far"
        found = []
        for _ in progress.watch("sampling", range(4)):
            found.append(progress.overdue(now[0] + 40))
            now[0] += 40
        assert found[0] == "sampling, 0 of 4 done; 40 s so far"
        assert found[3] == "sampling, 3 of 4 done, 40 s left; 3 min so far"
        assert progress.overdue(now[0] + 1) == "the first solve; 3 min so far"


def test_the_pulse_says_it_from_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    said = progress.threading.Event()
    monkeypatch.setattr(
        progress, "say", lambda line: (said.line, said.set()) if False else said.set()
    )
    with progress.pulse(), progress.doing("a long solve"):
        assert said.wait(60)


# ------------------------------------------------------------------------- a results.json again
def results(path, **content):
    path.write_text(json.dumps(content))
    return str(path)


def commands(script, *words):
    return script.parse(["--as", *map(str, words)]).recipe


def test_results_are_the_recipe_of_all_their_stages(tmp_path):
    first = vars(train_flow.parse(["--objective", "matching", "--hidden", "8,8", "--time"]))
    second = vars(train_flow.parse(["--objective", "matching", "--lr", "0.5", "--points", "7"]))
    config = options.configuration
    first, second = (config(options.argparse.Namespace(**c)) for c in (first, second))
    second["finetune"] = "runs/gone"
    path = results(tmp_path / "results.json", config=second, before=[first])
    out = str(tmp_path / "again")
    one, two = commands(train_flow, path, "--out", out, "--seed", 3, "--root", "there")
    args = train_flow.parse(one)
    assert (args.out, args.seed, args.root, args.finetune) == (f"{out}/stage1", 3, "there", None)
    assert config(args) == first | {"seed": 3}
    keep(tmp_path / "again", **{})
    keep(tmp_path / "again" / "stage1", **config(args))
    args = train_flow.parse(two)
    assert (args.out, args.seed, args.finetune) == (out, 3, f"{out}/stage1")
    assert (args.lr, args.points, args.hidden) == (0.5, 7, [128, 128, 128])
    (typed,) = commands(train_flow, path, "--out", out, "--finetune", tmp_path / "again" / "stage1")
    assert train_flow.parse(typed).finetune == str(tmp_path / "again" / "stage1")


def test_what_is_typed_counts_for_a_recipe_also_where_it_is_the_default(tmp_path):
    config = {"model": "deepsets", "seed": 2, "amp": True, "keep": "last", "epochs": 3}
    path = results(tmp_path / "results.json", config=config)
    typed = ["--seed", 0, "--no-amp", "--keep", "best", "--epochs", 120]
    for words, wanted in ((typed, (0, False, "best", 120)), ([], (2, True, "last", 3))):
        args = train_cls.parse(commands(train_cls, path, *words)[0])
        assert (args.seed, args.amp, args.keep, args.epochs) == wanted
        assert args.model == "deepsets"


def test_results_of_several_seeds_are_repeated_as_several(tmp_path):
    config = options.configuration(train_cls.parse(["--model", "deepsets", "--no-augment"]))
    path = results(tmp_path / "results.json", mean=0.5, runs=[{"config": config}] * 3)
    (words,) = commands(train_cls, path)
    args = train_cls.parse(words)
    assert (args.runs, args.model, args.augment) == (3, "deepsets", False)


def test_a_stage_without_a_recipe_is_used_as_it_is_or_named_as_missing(tmp_path, capsys):
    gone, here = str(tmp_path / "gone"), tmp_path / "here"
    path = results(tmp_path / "results.json", config={"model": "deepsets", "finetune": gone})
    with pytest.raises(UsageError, match=r"began with .*gone, which is not here: --finetune RUN"):
        commands(train_cls, path)
    here.mkdir()
    (here / "best.pt").touch()
    path = results(tmp_path / "results.json", config={"lr": 0.5}, before=[str(here), {"lr": 0.25}])
    one, two = commands(train_cls, path, "--out", "runs/x")
    assert one[1:] == [f"--finetune={here}", "--out=runs/x/stage1"]
    assert two[1:] == ["--finetune=runs/x/stage1", "--out=runs/x"]
    assert "begins with" in capsys.readouterr().err


STRANGE = [[], {}, {"config": 3}, {"config": {}, "before": 3}, {"config": {}, "before": [3]}]
STRANGE += [{"config": {"lr": 1}, "before": [{}, "a"]}, {"config": {"blocks": 12}}]
STRANGE += [{"config": {"mix": 0.5}}, {"config": {"lr": {}}}, {"config": {"seed": [{}]}}]


@pytest.mark.parametrize("content", STRANGE, ids=str)
def test_what_is_no_recipe_of_this_script_is_one_line(content, tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    code, err = call(train_cls, capsys, "--as", path, "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1), err


def test_a_recipe_does_not_say_where_to_write_and_goes_without_load(tmp_path, capsys):
    config = {"model": "deepsets", "out": "elsewhere", "root": "elsewhere", "load": "elsewhere"}
    path = results(tmp_path / "results.json", config=config, before=[{"out": "elsewhere"}])
    assert "elsewhere" not in str(commands(train_cls, path, "--out", "runs/x"))
    code, err = call(train_cls, capsys, "--as", "", "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1), err
    code, err = call(train_cls, capsys, "--as", path, "--load", tmp_path, "--evaluate")
    assert (code, "leave out --load" in err) == (2, True)


def test_a_run_and_its_second_stage_are_repeated_to_the_same_numbers(tmp_path):
    tiny = ["--objective", "matching", "--category", "1", "--points", "5", "--blocks", "1"]
    tiny += ["--hidden", "8", "--heads", "2", "--epochs", "1", "--batch-size", "600"]
    tiny += ["--test-sets", "6", "--every", "2"]
    train_flow.main([*tiny, "--out", str(tmp_path / "one")])
    more = ["--finetune", str(tmp_path / "one"), "--lr", "0.01", *tiny[:2], *tiny[-8:]]
    wanted = train_flow.main([*more, "--out", str(tmp_path / "two")])
    assert len(wanted["before"]) == 1
    (tmp_path / "one" / "results.json").unlink()  # a results.json is enough by itself
    path, out = str(tmp_path / "two" / "results.json"), str(tmp_path / "again")
    found = train_flow.main(["--as", path, "--out", out])
    assert found["config"] | {"finetune": 0} == wanted["config"] | {"finetune": 0}
    assert found["before"] == wanted["before"]
    drop = {"seconds_per_sample": 0}
    scores = [r["test"]["samples"] | drop for r in (found, wanted)]
    assert scores[0] == scores[1]
    assert found["test"] | {"samples": 0} == wanted["test"] | {"samples": 0}


def test_each_result_of_the_repository_is_a_recipe_or_says_what_is_gone():
    found = {}
    for path in sorted((options.PROJECT / "results").glob("*.json")):
        script = SCRIPTS[path.name.partition("-")[0]]
        try:
            found[path.stem] = len(commands(script, path))
        except UsageError as e:
            found[path.stem] = str(e).rpartition(", ")[2]
    assert found["flow-chair-long"] == 3
    assert found["cls-exnode-deepsets-seed1"] == 2
    gone = "which is not here: --finetune RUN names another to begin with"
    assert {value for value in found.values() if isinstance(value, str)} <= {gone}
