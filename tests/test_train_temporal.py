"""train_temporal.py as people use it: the command line, on a few of the built-in digits."""

import json
import math
import os
import shutil
import signal
import struct
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scripts import TWO_PROCESSES, call, check_help, lines, start

import data
import exnode
import train_cls
import train_temporal
from beyond import prior
from exnode import TemporalSetVAE
from support import models, own_sets, series, series_scores, training
from support.metrics import chamfer
from support.pictures import COLOURS

FEW = ["--test-series", "16"]
TINY = ["--points", "6", "--times", "0,0.5,1", "--category", "1", "--hidden", "32,32"]
TINY += ["--latent", "2", "--lr", "1e-2", "--valid-series", "16", *FEW]
MATCHING = [*TINY, "--objective", "matching", "--match-times", "2", "--ema", "0.8"]
MATCHING += ["--batch-size", "16", "--epochs", "12", "--kl", "0.4", "--lr", "3e-3", "--every", "48"]
ELBO = [*TINY, "--trace", "exact", "--gradient", "checkpoint", "--batch-size", "16"]
ELBO += ["--epochs", "3", "--every", "12"]
LOAD_SERIES = train_temporal.load_series
run_here = partial(call, train_temporal)


def few_series(args):
    splits = LOAD_SERIES(args)
    few = {"train": 64, "valid": 32, "test": 48}
    return splits._replace(**{k: getattr(splits, k).some(few[k]) for k in few})


@pytest.fixture(scope="module", autouse=True)
def _few():
    """Epochs of four steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_temporal, "load_series", few_series)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For each objective, a run that nothing interrupts, and its results."""
    out = tmp_path_factory.mktemp("temporal")
    found = {}
    for name, options in (("matching", MATCHING), ("elbo", ELBO)):
        found[name] = out / name, train_temporal.main([*options, "--out", str(out / name)])
    return found


@pytest.fixture(scope="module")
def run(runs):
    return runs["matching"][0]


def read_png(path):
    """Pixels (h, w, 3) of the first frame and the number of frames, all checksums verified."""
    content, at, found = path.read_bytes(), 8, {}
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(content):
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        body, crc = content[at + 8 : at + 8 + size], content[at + 8 + size : at + 12 + size]
        assert struct.unpack(">I", crc) == (zlib.crc32(kind + body),)
        found.setdefault(kind, []).append(body)
        at += 12 + size
    assert found[b"IEND"] == [b""]
    w, h = struct.unpack(">II", found[b"IHDR"][0][:8])
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"][0]), np.uint8).reshape(h, 1 + 3 * w)
    return rows[:, 1:].reshape(h, w, 3), 1 + len(found.get(b"fdAT", []))


def has(pixels, colour):
    return (pixels == COLOURS[colour]).all(-1).sum() > 100


def some_args(*options):
    return train_temporal.parse([*TINY, "--batch-size", "16", *options])


WORLD = training.World(torch.device("cpu"))


# ------------------------------------------------------------------------------- a whole run
@pytest.mark.parametrize("objective", ["matching", "elbo"])
def test_each_objective_improves_the_elbo_and_leaves_all_files(runs, objective):
    out, results = runs[objective]
    names = {"config.json", "sets.json", "metrics.jsonl", "last.pt", "best.pt", "results.json"}
    names |= {
        "samples.png",
        "moving.png",
        "reconstructions.png",
        "latent.png",
        "curves.png",
        "view.html",
    }
    assert {p.name for p in out.iterdir()} == names
    first, last = lines(out)[0], lines(out)[-1]
    assert last["valid_elbo"] > first["valid_elbo"] + 0.02
    assert results["best"] == last["valid_elbo"]
    assert results == json.loads((out / "results.json").read_text())


def test_the_results_hold_the_elbo_in_parts_and_distances_at_every_kind_of_time(runs):
    test = runs["matching"][1]["test"]
    points = 3 * 6
    assert test["elbo"] == pytest.approx(test["log_likelihood"] - test["kl"] / points)
    assert test["kl"] > 0
    assert 0 < test["standard_error"] < 1
    assert [row["t"] for row in test["at_times"]] == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]
    kinds = ["reconstruction", "interpolation", "extrapolation to 1.25", "extrapolation to 1.5"]
    assert list(test["chamfer"]) == kinds
    between = [row["copy"] for row in test["at_times"] if row["kind"] == "interpolation"]
    assert test["chamfer"]["interpolation"]["copy"] == pytest.approx(sum(between) / 2)


def test_pictures_are_whole_and_boxed_by_kind_of_time(run):
    for name in ("samples", "reconstructions", "latent", "curves"):
        pixels, frames = read_png(run / f"{name}.png")
        assert frames == 1
        assert min(pixels.shape[:2]) > 200
        assert has(pixels, "blue")
        assert has(pixels, "red") == has(pixels, "green") == (name != "curves")
        assert has(pixels, "grey") == (name in ("reconstructions", "latent"))
    pixels, frames = read_png(run / "moving.png")
    assert frames == 31
    assert not has(pixels, "red")  # the first frame is of a trained time


def test_a_run_stopped_by_a_signal_resumes_to_the_same_numbers(runs, tmp_path, capsys, monkeypatch):
    reference, results = runs["matching"]
    make, calls = train_temporal.make_loss, []

    def stopping(args, split):
        loss = make(args, split)

        def counted(model, batch):
            calls.append(1)
            if len(calls) == 6:  # within the second epoch
                os.kill(os.getpid(), signal.SIGTERM)
            return loss(model, batch)

        return counted

    monkeypatch.setattr(train_temporal, "make_loss", stopping)
    code, err = run_here(capsys, *MATCHING, "--out", tmp_path / "run")
    assert code == 130, err
    assert training.read_checkpoint(tmp_path / "run" / "last.pt")["step"] == 6
    again = train_temporal.main([*MATCHING, "--out", str(tmp_path / "run"), "--resume"])
    assert again["test"] == results["test"]
    assert lines(tmp_path / "run") == lines(reference)
    ends = [training.read_checkpoint(out / "last.pt") for out in (tmp_path / "run", reference)]
    assert all(torch.equal(ends[0]["model"][name], v) for name, v in ends[1]["model"].items())


def test_a_loss_that_explodes_exits_with_1_and_names_the_checkpoint(tmp_path, capsys):
    code, err = run_here(capsys, *MATCHING, "--lr", "1e30", "--out", tmp_path / "run")
    assert code == 1
    assert err.rstrip().endswith(f"is {tmp_path / 'run' / 'last.pt'}")


# ------------------------------------------------------------------------------- the measures
def small_model(**settings):
    """A model in float64 with one latent number that matters."""
    model = TemporalSetVAE(2, 1, hidden=(6, 6), trace="exact", **settings).double().eval()
    with torch.no_grad():
        for p in (*model.decoder.parameters(), *model.dynamics.parameters()):
            p.mul_(2)
        model.mean[-1].bias.fill_(-0.8)  # near the posterior of the test below, and wider,
        model.log_std[-1].bias.fill_(-0.7)  # so that few samples weigh alike
    return model


@torch.no_grad()
def test_the_elbo_is_below_log_p_which_many_samples_and_a_grid_agree_on():
    model = small_model(rtol=1e-5, atol=1e-5)
    x, t = torch.randn(1, 2, 3, 2, dtype=torch.float64), torch.tensor([0.0, 0.6])

    def log_p_given(z0):  # (K, 1) → (K,)
        here = x.expand(len(z0), -1, -1, -1)
        return model.decoder.log_prob(here, context=model.latents(z0, t)).sum(-1)

    grid = torch.linspace(-7, 7, 701, dtype=torch.float64)[:, None]
    prior, q = torch.distributions.Normal(0.0, 1.0), model.encode(x, t)
    joint = log_p_given(grid) + prior.log_prob(grid[:, 0])
    log_p = (joint.logsumexp(0) + math.log(0.02)).item()

    z0 = q.mean + q.std * torch.randn(1500, 1, dtype=torch.float64)
    proposal = torch.distributions.Normal(q.mean[0, 0], q.std[0, 0])
    weights = log_p_given(z0) + (prior.log_prob(z0) - proposal.log_prob(z0))[:, 0]
    estimate = (weights.logsumexp(0) - math.log(1500)).item()
    error = (weights - estimate).exp().std().item() / 1500**0.5
    assert error < 0.05
    assert estimate == pytest.approx(log_p, abs=4 * error)

    density = proposal.log_prob(grid[:, 0]).exp() * 0.02  # the ELBO by the same grid
    elbo = (density * (joint - proposal.log_prob(grid[:, 0]))).sum().item()
    assert elbo < log_p - 0.01
    parts = model.elbo_terms(x.expand(1500, -1, -1, -1), t)
    draws = parts[0] - parts[1]
    assert draws.mean().item() == pytest.approx(elbo, abs=4 * draws.std().item() / 1500**0.5)
    assert draws.mean().item() < log_p


def test_the_measured_elbo_has_no_noise_of_the_trace_whatever_training_has():
    model = small_model()
    x, t = torch.randn(3, 2, 4, 2, dtype=torch.float64), torch.tensor([0.0, 0.5])

    def measure(seed):
        torch.manual_seed(seed)  # of the trace's noise, if there were any
        return model.elbo_terms(x, t, generator=torch.Generator().manual_seed(0), trace="exact")

    exact = measure(1)
    model.decoder.trace = "hutchinson"
    assert all(map(torch.equal, exact, measure(2)))
    assert model.decoder.trace == "hutchinson"


def test_the_elbo_is_per_point_in_pixels():
    """A decoder that moves nothing has N(0, I) in units of 14 pixels, and a KL of 0."""
    args = some_args()
    model, split = train_temporal.build(args, 2).eval(), few_series(args).valid
    with torch.no_grad():
        for p in (*model.decoder.parameters(), *model.mean.parameters()):
            p.zero_()
        for p in model.log_std.parameters():
            p.zero_()
    found = train_temporal.measure_elbo(model, split, args, WORLD)
    x = split.draw(np.arange(len(split)))[0].astype(np.float64)
    expected = -math.log(2 * math.pi) - (x**2).sum(-1).mean() / 2 - 2 * math.log(14)
    assert found["elbo"] == pytest.approx(expected, abs=1e-5)
    assert found["log_likelihood"] == pytest.approx(expected, abs=1e-5)
    assert found["kl"] == pytest.approx(0, abs=1e-6)


def test_true_sets_at_other_times_are_the_same_digits_turned_and_drawn_anew():
    split = few_series(some_args("--points", "64")).test
    x = series.at_times(split, [0, 0, 0.3]).draw(np.arange(20))[0]
    first, second, turned = (torch.from_numpy(x[:, k]) for k in range(3))
    back = torch.from_numpy(data.rotate_clockwise(x[:, 2:], np.array([-0.3 * np.pi]))[:, 0])
    assert not torch.equal(first, second)
    floor = chamfer(first, second).mean()
    assert chamfer(first, back).mean() < 1.3 * floor
    assert chamfer(first, turned).mean() > 3 * floor
    assert chamfer(first, back.roll(1, 0)).mean() > 3 * floor


def test_a_model_that_copies_scores_as_the_copy_and_near_the_floor_only_where_trained(monkeypatch):
    args = some_args("--points", "32")
    model, split = train_temporal.build(args, 2).eval(), few_series(args).test
    at, shown = series.tested_times(args.times), []
    assert at == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]

    def copies(x, t, t_out, **how):
        assert (t, t_out) == (args.times, at)
        start = len(x) * len(shown)
        x = series.at_times(split, args.times).draw(np.arange(start, start + len(x)))[0]
        shown.append(1)
        return torch.from_numpy(x[:, [0, 0, 1, 1, 2, 2, 2]])

    monkeypatch.setattr(model, "reconstruct", copies)
    for row in series_scores.distances_at_times(model, split, args, WORLD):
        assert row["model"] == pytest.approx(row["copy"], rel=0.05)  # but for 0.1 pixels of noise
        assert (row["copy"] < 1.3 * row["floor"]) == (row["kind"] == "reconstruction")


# ------------------------------------------------------------------------------- finished runs
def test_a_finished_run_can_be_evaluated_again(runs):
    out, results = runs["matching"]
    assert train_temporal.main(["--load", str(out), "--evaluate", *FEW])["test"] == results["test"]
    other = ["--load", str(out), "--evaluate", *FEW, "--times", "0,0.3"]
    other = train_temporal.main(other)["test"]
    assert [row["t"] for row in other["at_times"]] == [0, 0.15, 0.3, 0.55, 0.8]


# ------------------------------------------------------------------------------- a learned prior
@pytest.fixture
def fitted(run, tmp_path, monkeypatch):
    """A run with a prior that --fit-prior fitted in few steps."""
    monkeypatch.setattr(prior, "STEPS", 30)
    shutil.copytree(run, tmp_path / "run")
    train_temporal.main(["--fit-prior", str(tmp_path / "run"), "--width", "1.5"])
    return tmp_path / "run"


def test_a_prior_is_used_where_it_is_asked_for_and_nowhere_else(run, fitted, runs):
    names = {p.name for p in fitted.iterdir()} - {p.name for p in run.iterdir()}
    assert names == {"prior.pt"}
    load = ["--load", str(fitted), "--evaluate", *FEW]
    plain = train_temporal.main(load)
    assert plain["test"] == runs["matching"][1]["test"]
    learned = train_temporal.main([*load, "--prior", "flow"])["test"]
    assert (plain["test"]["prior"], learned["prior"]) == ("normal", "flow")
    assert learned["samples"]["prior"] == "flow"
    assert learned["chamfer"] == plain["test"]["chamfer"]  # of posterior means
    assert learned["kl"] != plain["test"]["kl"]
    points = 3 * 6
    assert learned["elbo"] == pytest.approx(learned["log_likelihood"] - learned["kl"] / points)
    sets = []
    for more in ([], ["--prior", "normal"], ["--prior", "flow"]):
        sets.append(train_temporal.main(["--load", str(fitted), "--sample", "3", *more])["sets"])
    assert np.array_equal(sets[0], sets[1])
    assert not np.allclose(sets[1], sets[2], atol=1e-2)


def test_a_run_that_is_told_to_fits_its_prior_and_remembers_it(tmp_path, monkeypatch):
    monkeypatch.setattr(prior, "STEPS", 30)
    out = tmp_path / "run"
    options = [*MATCHING, "--epochs", "1", "--prior", "flow", "--out", str(out)]
    results = train_temporal.main(options)
    assert results["test"]["prior"] == "flow"
    assert (out / "prior.pt").exists()
    again = train_temporal.main(["--load", str(out), "--evaluate", *FEW])
    assert again["test"] == results["test"]
    model, plain = exnode.load(out), models.load(out, learned_prior=False)
    assert model.prior is not None
    assert plain.prior is None
    series = plain.sample(2, [0.0, 1.0], 5, torch.Generator().manual_seed(0))
    assert not torch.equal(model.sample(2, [0.0, 1.0], 5, torch.Generator().manual_seed(0)), series)


def test_a_prior_that_is_not_there_or_not_of_this_run_is_one_line_and_exit_code_2(
    run, fitted, tmp_path, capsys
):
    for task in (["--sample", "2"], ["--evaluate"]):
        code, err = run_here(capsys, "--load", run, *task, "--prior", "flow")
        assert (code, err.count("\n")) == (2, 1)
        assert f"--fit-prior {run}" in err
    state = training.read_checkpoint(fitted / "best.pt")
    whole, kept = (fitted / "prior.pt").read_bytes(), training.read_checkpoint(fitted / "prior.pt")
    wrong = [("damaged", b""), ("damaged", whole[:3000])]
    wrong += [("latent numbers", kept | {"latent": 3}), ("width", kept | {"width": math.inf})]
    wrong += [("another model", kept | {"prior": {}}), ("other weights", kept | {"encoder": "no"})]
    name = "blocks.0.field.last.bias"
    for value in (math.nan, math.inf):
        bad = kept["prior"] | {name: torch.full_like(kept["prior"][name], value)}
        wrong += [("not finite", kept | {"prior": bad})]
    for says, content in wrong:
        if isinstance(content, dict):
            torch.save(content, fitted / "prior.pt")
        else:
            (fitted / "prior.pt").write_bytes(content)
        code, err = run_here(capsys, "--load", fitted, "--sample", "2", "--prior", "flow")
        assert (code, err.count("\n")) == (2, 1), err
        assert says in err
        assert "prior.pt" in err
    (fitted / "prior.pt").write_bytes(whole)
    state["model"]["mean.6.bias"] += 1e-3  # the run has changed since
    torch.save(state, fitted / "best.pt")
    code, err = run_here(capsys, "--load", fitted, "--sample", "2", "--prior", "flow")
    assert (code, err.count("\n")) == (2, 1)
    assert "the run has changed" in err


@pytest.mark.parametrize(
    "options",
    [
        ["--fit-prior", "RUN", "--load", "RUN"],
        ["--fit-prior", "RUN", "--sample", "2"],
        ["--fit-prior", "RUN", "--times", "0,1"],
        ["--fit-prior", "RUN", "--seed", "3"],
        ["--fit-prior", "RUN", "--prior", "flow"],
        ["--fit-prior", "RUN", "--lr", "1"],
        ["--fit-prior", "RUN", "--width", "0"],
        ["--fit-prior", "RUN", "--finetune", "RUN"],
        ["--fit-prior", "/nowhere"],
        ["--load", "RUN", "--sample", "2", "--width", "2"],
        ["--load", "RUN", "--reconstruct", "mine.npy", "--prior", "normal"],
        ["--prior", "uniform"],
        ["--width", "2"],
    ],
    ids=" ".join,
)
def test_wrong_options_of_a_prior_are_one_line_and_exit_code_2(run, tmp_path, capsys, options):
    options = [str(run) if word == "RUN" else word for word in options]
    out = [] if str(run) in options else ["--out", tmp_path / "run"]
    code, err = run_here(capsys, *out, *options)
    assert (code, err.count("\n")) == (2, 1), err
    assert not (run / "prior.pt").exists()


# ------------------------------------------------------------------------------- scores of samples
def turning(count, times, seed=0, points=40):
    """Series of one arc each, which turn as the data do; points are drawn anew at each time."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2.5, (count, len(times), points))
    x = np.stack([0.5 * np.cos(angle), 0.9 * np.sin(angle)], -1) * rng.uniform(
        0.6, 1, (count, 1, 1, 1)
    )
    return torch.from_numpy(data.rotate_clockwise(np.float32(x), np.pi * np.array(times)))


def test_what_turns_as_the_data_is_near_itself_when_turned_back():
    times = [0.0, 0.5, 1.0]
    x = turning(20, times)
    still = x[:, :1].expand(-1, 3, -1, -1)
    both = [series_scores.distance_turned_back(a, times).mean() for a in (x, still)]
    assert both[0] < both[1] / 5
    first, *later = x.unbind(1)
    by_hand = [torch.stack([a[..., 0] * 0 - a[..., 1], a[..., 0]], -1) for a in later[:1]]
    by_hand += [-later[1]]
    wanted = torch.stack([chamfer(sets, first) for sets in by_hand]).mean(0)
    assert torch.allclose(series_scores.distance_turned_back(x, times), wanted, atol=1e-5)


def test_a_series_has_one_label_if_it_has_it_at_all_times():
    times, labels = [0.0, 1.0], torch.tensor([[3, 3], [3, 4], [7, 7], [0, 1]])
    found = series_scores.one_label(
        lambda x: torch.nn.functional.one_hot(labels, 10), turning(4, times), times
    )
    assert found.tolist() == [True, False, True, False]


def test_samples_are_scored_beside_real_series_at_each_given_time(monkeypatch):
    args = some_args("--points", "32", "--category", "1,7")
    split, model = few_series(args).test, small_model().float()
    real = torch.from_numpy(few_series(args).test.draw(np.arange(len(split)))[0])
    again = torch.from_numpy(
        series.at_times(split, [*args.times, *args.times]).draw(np.arange(len(split)))[0]
    )[:, 3:]

    def upright(x):
        return torch.stack([x[..., 1].mean(-1), -x[..., 1].mean(-1)], -1)

    found = {}
    for name, made in (
        ("perfect", again),
        ("still", again[:, :1].expand_as(real)),
        ("far", real + 3),
    ):
        monkeypatch.setattr(model, "sample", lambda *a, made=made, **how: made)
        found[name] = series_scores.score_samples(model, split, args, WORLD, upright)
    rows = {name: scores["at_times"] for name, scores in found.items()}
    assert [row["t"] for row in rows["perfect"]] == args.times
    assert all(row["1-NNA"] == 1 and row["MMD"] > 1 for row in rows["far"])
    assert all(row["1-NNA"] < 0.6 for row in rows["perfect"])
    assert rows["still"][0]["1-NNA"] < 0.6 < rows["still"][1]["1-NNA"]
    back = {name: scores["turned_back"] for name, scores in found.items()}
    assert back["perfect"]["samples"]["mean"] == pytest.approx(
        back["perfect"]["real"]["mean"], abs=4 * back["perfect"]["real"]["standard_error"]
    )
    assert back["still"]["samples"]["mean"] > 2 * back["still"]["real"]["mean"]
    assert 0 < back["perfect"]["real"]["standard_error"] < back["perfect"]["real"]["mean"]
    assert 0 <= found["perfect"]["one_label"]["real"]["mean"] <= 1


def test_own_series_are_scored_if_they_have_common_times(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 3, 5, 2))
    x[::2, :, 3:] = np.nan
    np.savez(tmp_path / "mine.npz", x=x, time=np.array([0.0, 0.5, 2]))
    args = train_temporal.parse(["--data", str(tmp_path / "mine.npz"), *OWN])
    split, model = LOAD_SERIES(args).train, train_temporal.build(args, 2).eval()
    found = series_scores.score_samples(model, split, args, WORLD)
    assert [row["t"] for row in found["at_times"]] == [0, 0.5, 2]
    assert found.keys() == {"series", "prior", "at_times"}
    args = train_temporal.parse(["--data", write_own(tmp_path / "other.npz"), *OWN])
    assert series_scores.score_samples(model, LOAD_SERIES(args).train, args, WORLD) is None


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A classifier of built-in digits, after few steps."""
    out, load = tmp_path_factory.mktemp("digits"), train_cls.load_sets

    def few(args):
        return data.Splits(*(split.some(64) for split in load(args)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_cls, "load_sets", few)
        options = ["--category", "digits", "--points", "32", "--batch-size", "16", "--epochs", "2"]
        train_cls.main([*options, "--out", str(out / "run")])
    return out / "run"


def test_a_classifier_of_upright_digits_reads_reconstructions(run, digits, capsys):
    options = ["--load", str(run), "--evaluate", *FEW, "--classifier", str(digits)]
    shares = train_temporal.main(options)["test"]["recognised"]
    assert all(0 <= v <= 1 for v in shares.values())
    err = capsys.readouterr().err
    assert f"labelled as the given sets {shares['as_given']:.3f}" in err
    assert "samples at t = 0.5: 1-NNA" in err
    assert "one label: samples" in err


def test_a_model_that_copies_is_recognised_as_what_it_copies(monkeypatch):
    args = some_args("--category", "7", "--points", "32")
    split, seen = train_temporal.load_series(args).test.some(16), []

    def classify(x):  # by the share of points in the upper half: not the same if turned by π
        seen.append(x)
        return -(10 * (x[..., 1] > 0.5).double().mean(-1, keepdim=True) - torch.arange(10)).abs()

    model, truth = small_model().float(), torch.from_numpy(split.draw(np.arange(16))[0])
    monkeypatch.setattr(model, "reconstruct", lambda *a, **how: truth)
    shares = series_scores.recognition(model, classify, split, args, WORLD)
    assert shares["as_given"] == 1
    assert shares["right"] == shares["given_right"] < 1
    first, middle, last = seen[0].unbind(1)  # all upright, about the middle of the unit square
    assert torch.allclose(seen[0].mean((1, 2)), torch.tensor(0.5), atol=0.01)
    assert -0.2 < seen[0].min() < 0.2
    assert 0.8 < seen[0].max() < 1.2
    upright, upside_down = chamfer(first, last).mean(), chamfer(first, 1 - last).mean()
    assert upright < upside_down / 2
    assert chamfer(first, middle).mean() < upside_down / 2
    monkeypatch.setattr(model, "reconstruct", lambda *a, **how: -truth)
    shares = series_scores.recognition(model, classify, split, args, WORLD)
    assert shares["as_given"] < 0.9


def test_series_that_no_test_has_read_can_be_tested(run, tmp_path, capsys):
    how = ["--load", str(run), "--evaluate", "--test-series", "16", "--out", str(tmp_path)]
    first, unread = (train_temporal.main([*how, *more])["test"] for more in ([], ["--after", "16"]))
    assert unread["series"] == first["series"] == 16
    assert unread["elbo"] != first["elbo"]
    code, err = run_here(capsys, *how, "--after", "100000")
    assert (code, err.count("\n"), "test series" in err) == (2, 1, True)


def test_a_wrong_classifier_is_one_line_and_exit_code_2(run, digits, tmp_path, capsys):
    of_shapes = tmp_path / "shapes"
    of_shapes.mkdir()
    model = models.build({"model": "exnode-deepsets"}, 3, 40)
    state = {"model": model.state_dict(), "config": {"model": "exnode-deepsets"}}
    training.write_checkpoint(of_shapes / "best.pt", state)
    for wrong in (tmp_path / "nowhere", run, of_shapes):
        for options in ([*MATCHING, "--out", tmp_path / "new"], ["--load", run, "--evaluate"]):
            code, err = run_here(capsys, *options, "--classifier", wrong)
            assert (code, err.count("\n")) == (2, 1)
            assert str(wrong) in err
    code, err = run_here(capsys, "--load", run, "--sample", "1", "--classifier", digits)
    assert (code, err.count("\n")) == (2, 1)


def test_a_run_with_a_classifier_can_be_sampled(run, digits, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text()) | {"classifier": str(digits)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    made = train_temporal.main(["--load", str(tmp_path / "run"), "--sample", "1"])
    assert made["sets"].shape == (1, 3, 6, 2)


def test_finetuning_starts_from_a_run_and_changes_what_it_is_told(runs, tmp_path, capsys):
    before, results = runs["matching"]
    how = ["--objective", "matching", "--kl", "0.01", "--valid-series", "16", "--test-series", "16"]
    how += ["--epochs", "1", "--batch-size", "16", "--out", str(tmp_path / "fine")]
    config = train_temporal.main(["--finetune", str(before), *how])["config"]
    assert (config["latent"], config["kl"], config["times"]) == (2, 0.01, [0, 0.5, 1])
    first = lines(tmp_path / "fine")[0]  # with batch statistics at --times, not at random ones
    assert first["valid_elbo"] == pytest.approx(results["best"], abs=0.05)
    other = ["--decoder", "transformer", "--hidden", "16", "--pieces", "2", "--coupling", "none"]
    other += ["--match-times", "2", "--moments", "5"]  # these are new as well
    out = tmp_path / "other"
    train_temporal.main(["--finetune", str(before), *how[:-1], str(out), *other])
    best = training.read_checkpoint(before / "best.pt")["metrics"]
    assert lines(out)[0]["valid_kl"] == pytest.approx(best["valid_kl"], rel=0.5)
    assert lines(out)[0]["valid_log_likelihood"] != pytest.approx(best["valid_log_likelihood"])
    best = training.read_checkpoint(out / "best.pt")["metrics"]["valid_elbo"]
    for name, moments, hidden in (("kept", "5", "16,16"), ("dropped", "0", "16")):
        how[-1] = str(tmp_path / name)  # a head of moments, or none; one layer more, or none
        options = ["--finetune", str(out), *how, "--moments", moments, "--hidden", hidden]
        train_temporal.main(options)
        assert lines(tmp_path / name)[0]["valid_elbo"] == pytest.approx(best)
    assert lines(tmp_path / "kept")[1]["loss"] > lines(tmp_path / "dropped")[1]["loss"] + 0.1
    args = train_temporal.parse(["--finetune", str(out), *how, "--moments", "5"])
    model, state = train_temporal.build(args, 2), training.read_checkpoint(out / "best.pt")["model"]
    train_temporal.start(args, model, None)
    assert model.moments.linear.weight.equal(state["moments.linear.weight"])
    code, err = run_here(capsys, "--load", out, "--evaluate", *FEW)
    assert code == 0, err
    for wrong in (["--load", before, "--evaluate"], ["--latent", "3"]):
        how[-1] = str(tmp_path / "wrong")
        code, err = run_here(capsys, "--finetune", before, *how, *wrong)
        assert (code, err.count("\n")) == (2, 1)


def test_another_decoder_has_its_own_widths_unless_they_are_named(run):
    options = ["--finetune", str(run), "--decoder", "transformer", "--objective", "matching"]
    assert train_temporal.parse(options).hidden == [128] * 4
    assert train_temporal.parse([*options, "--hidden", "16"]).hidden == [16]
    assert train_temporal.parse(options[:2]).hidden == [32, 32]


def test_two_processes_train_also_where_a_step_leaves_out_the_latent_ode(tmp_path):
    options = [*TINY, "--times", "0", "--objective", "matching", "--batch-size", "128"]
    out = tmp_path / "run"
    options += ["--epochs", "1", "--out", out]
    process = start("train_temporal.py", *options, launcher=TWO_PROCESSES)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    results = json.loads((out / "results.json").read_text())
    assert results["processes"] == 2
    assert results["steps"] > 1


def test_a_start_that_failed_does_not_block_its_directory(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    code, _ = run_here(capsys, *MATCHING, *out, "--category", "11")
    assert code == 2
    results = train_temporal.main([*MATCHING, "--epochs", "1", *out])
    assert results["config"]["category"] == "1"


def test_samples_of_a_run_depend_on_the_seed_only(run, tmp_path):
    def sample(seed, name):
        options = ["--sample", "3", "--times", "0:1.5:0.25", "--points", "9", "--seed", seed]
        out = tmp_path / name
        found = train_temporal.main(["--load", str(run), *options, "--out", str(out)])
        assert {p.suffix for p in out.iterdir()} == {".npy", ".npz", ".png", ".html"}
        pixels, _ = read_png(out / f"samples-3x9-seed{seed}.png")
        assert has(pixels, "red")
        assert has(pixels, "green")
        _, frames = read_png(out / f"samples-3x9-seed{seed}-moving.png")
        assert frames == 7
        return np.load(found["file"])

    a, b, c = sample("1", "a"), sample("1", "b"), sample("2", "c")
    assert a.shape == (3, 7, 9, 2)
    assert np.array_equal(a, b)
    assert not np.allclose(a, c)


def test_points_move_continuously_in_time():
    model = train_temporal.build(some_args(), 2).eval()
    how = series.moving(some_args(), torch.Generator().manual_seed(0))
    x = model.sample(5, [0.5, 0.501, 1.5], **how).detach()
    step, long = (x[:, k] - x[:, 0] for k in (1, 2))
    assert step.abs().max() < 0.01
    assert long.abs().max() > 0.01  # but they do move


def test_a_person_s_own_series_may_be_ragged_and_irregular(run, tmp_path, capsys):
    x = few_series(some_args()).test.draw(np.arange(2))[0]  # (2, 3, 6, 2)
    shutil.copytree(run, tmp_path / "run")
    state = training.read_checkpoint(run / "best.pt")
    state["model"]["mean.6.weight"] *= 100  # a posterior that has much to say
    torch.save(state, tmp_path / "run" / "best.pt")
    some, other = np.full((2, 2, 3, 9, 2), np.nan, np.float32)
    for i, k in np.ndindex(2, 3):
        size = 6 - i - k  # points in this set: as first ones, or scattered
        some[i, k, :size], other[i, k, 8 : 8 - size : -1] = x[i, k, :size], x[i, k, :size]

    def reconstruct(name, array, *options):
        np.save(tmp_path / f"{name}.npy", array)
        options = ["--reconstruct", tmp_path / f"{name}.npy", "--times", "0,0.5,2", *options]
        code, err = run_here(capsys, "--load", tmp_path / "run", "--out", tmp_path, *options)
        assert code == 0, err
        assert has(read_png(tmp_path / f"{name}-reconstructed.png")[0], "green")
        return np.load(tmp_path / f"{name}-reconstructed.npy")

    whole, ragged = reconstruct("whole", x), reconstruct("ragged", some)
    assert whole.shape == (2, 3, 6, 2)
    assert not np.allclose(ragged, whole, atol=1e-3)
    np.testing.assert_allclose(reconstruct("other", other), ragged, atol=1e-5)
    one = reconstruct("one", x[0], "--points", "7", "--at", "0,0.5,1")
    assert one.shape == (3, 7, 2)
    late = reconstruct("late", x[0], "--points", "7", "--at", "0.2,0.3,1")
    assert not np.array_equal(one, late)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((3, 4, 3)), "shape"),
        (np.zeros((3, 2)), "shape"),
        (np.zeros((0, 4, 2)), "shape"),
        (np.full((3, 4, 2), np.nan), "set [0] has no points"),
        (np.where(np.arange(24).reshape(3, 4, 2) == 9, np.nan, 0), "point [1, 0] is"),
        (np.where(np.arange(24).reshape(3, 4, 2) == 9, np.inf, 0), "point [1, 0] is"),
        (np.full((3, 4, 2), "a"), "not one array of numbers"),
        (np.array([None]), "pickle"),
        (np.zeros((2, 4, 2)), "--at has 3 times for the 2 sets"),
    ],
)
def test_a_wrong_series_is_one_line_and_exit_code_2(run, tmp_path, capsys, given, says):
    np.save(tmp_path / "mine.npy", given, allow_pickle=True)
    options = ["--reconstruct", tmp_path / "mine.npy", "--at", "0,0.5,1", "--out", tmp_path]
    code, err = run_here(capsys, "--load", run, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


def test_a_header_that_lies_is_one_line_and_exit_code_2(run, tmp_path, capsys):
    begin = b"{'descr': '<f4', 'fortran_order': False, 'shape': ("
    for shape in (b"3, 4, 2", b"1" + 30 * b"0" + b", 4, 2), }", b"1" + 12 * b"0" + b", 4, 2), }"):
        header = (begin + shape).ljust(117) + b"\n"
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(96)
        (tmp_path / "mine.npy").write_bytes(content)
        code, err = run_here(capsys, "--load", run, "--reconstruct", tmp_path / "mine.npy")
        assert (code, err.count("\n")) == (2, 1), err
        assert "mine.npy" in err


def test_many_series_are_reconstructed_in_parts_that_fit(run, tmp_path, capsys, monkeypatch):
    sizes = []

    def reconstruct(model, x, t, t_out, **how):
        sizes.append(tuple(x.shape))
        assert how["mask"].all()
        return x[:, :1].expand(-1, len(t_out), -1, -1)

    np.save(tmp_path / "mine.npy", np.random.default_rng(0).random((12, 3, 6, 2)))
    monkeypatch.setattr(exnode, "PIECE", 100)
    monkeypatch.setattr(TemporalSetVAE, "reconstruct", reconstruct)
    options = ["--load", run, "--reconstruct", tmp_path / "mine.npy", "--out", tmp_path]
    code, err = run_here(capsys, *options)
    assert code == 0, err
    assert sizes == [(5, 3, 6, 2), (5, 3, 6, 2), (2, 3, 6, 2)]
    np.save(tmp_path / "mine.npy", np.zeros((10_000, 1, 1, 2)))
    code, err = run_here(capsys, *options, "--points", "1000000", "--times", "0:1:0.01")
    assert (code, err.count("\n")) == (2, 1)
    assert "GiB" in err


def test_beside_the_elbo_stands_by_how_much_a_series_is_off(runs):
    args, model = some_args("--objective", "matching"), exnode.load(runs["matching"][0])
    split = few_series(args).test
    found = runs["matching"][1]["test"]
    assert found["tolerance"] == {"rtol": 1e-3, "atol": 1e-4}
    assert 0 < found["tolerance_error"] < 0.005
    x, t = torch.from_numpy(split.some(8).draw(np.arange(8))[0]), torch.tensor(args.times)
    ends, model.solver = [], model.solver | {"rtol": 1.0, "atol": 1.0}
    wrong = train_temporal.tolerance_error(model, split, args, WORLD)
    for tolerance in (1.0, 1e-2):
        how = {"trace": "exact", "solver": model.solver | {"rtol": tolerance, "atol": tolerance}}
        with torch.no_grad():
            ends.append(model.elbo(x, t, None, series.generator(args, WORLD), **how))
    assert wrong == pytest.approx((ends[0] - ends[1]).abs().max().item() / 18, rel=1e-3)


def test_a_file_that_is_no_array_is_one_line_and_exit_code_2(run, tmp_path, capsys):
    (tmp_path / "text.npy").write_text("0 1 2")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    os.mkfifo(tmp_path / "fifo.npy")
    for name in ("text.npy", "empty.npy", "several.npz", "missing.npy", "fifo.npy", "."):
        code, err = run_here(capsys, "--load", run, "--reconstruct", tmp_path / name)
        assert (code, err.count("\n")) == (2, 1), name
        assert name in err


# ------------------------------------------------------------------------------- own series
def write_own(path, dim=2, count=24, seed=0):
    """Ragged series that drift along the first axis, each with 1 to 5 times of its own."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        times = np.sort(rng.choice(12, 1 + (i + 2) % 5, replace=False)) / 4
        for t in times:
            for _ in range(rng.integers(1, 7)):
                rows.append((i, t, *(10 + 3 * rng.normal(size=dim) + t * np.eye(dim)[0])))
    rows = np.array(rows)
    np.savez(path, points=rows[:, 2:], set=rows[:, 0].astype(int), time=rows[:, 1])
    return str(path)


OWN = ["--hidden", "8,8", "--latent", "2", "--batch-size", "6", "--epochs", "2", "--every", "3"]


@pytest.fixture(scope="module", params=[("elbo", 2), ("matching", 3), ("matching", 1)])
def own_run(request, tmp_path_factory):
    """A run on ragged series with times of their own: folder, results, dimension."""
    out, (objective, dim) = tmp_path_factory.mktemp("own"), request.param
    options = ["--data", write_own(out / "mine.npz", dim), "--out", str(out / "run")]
    more = ["--moments", "1", "--match-times", "2"] if objective == "matching" else []
    how = [*OWN, *options, "--objective", objective, *more]
    return out, train_temporal.main(how), dim


def test_own_series_train_by_either_objective_and_are_tested_beside_a_copy(own_run):
    out, results, dim = own_run
    test = results["test"]
    assert math.isfinite(test["elbo"])
    assert "units of the file" in test["units"]
    assert list(test["chamfer"]) == ["reconstruction", "interpolation"]
    for row in test["chamfer"].values():
        assert list(row) == ["model", "copy"]
        assert min(row.values()) > 0
    for name in ("samples", "moving", "reconstructions", "latent", "curves"):
        pixels = read_png(out / "run" / f"{name}.png")[0].astype(int)
        assert (np.ptp(pixels, -1) > 60).sum() > 50  # blue, in 3-D in several shades
    model = exnode.load(out / "run")
    assert model.dim == dim
    assert model.decoder.mean == pytest.approx(torch.full((dim,), 10.5), abs=1.5)
    again = train_temporal.main(["--load", str(out / "run"), "--evaluate"])
    assert again["test"] == test


def test_samples_of_own_series_have_sizes_and_times_of_the_training_series(own_run):
    out, _, dim = own_run
    made = train_temporal.main(["--load", str(out / "run"), "--sample", "30"])
    known = json.loads((out / "run" / "sets.json").read_text())
    assert made["times"] == pytest.approx(np.linspace(*known["times"], 5))
    size = (~np.isnan(made["sets"]).any(-1)).sum(-1)
    assert (size == size[:, :1]).all()
    every = {n for pairs in known["sizes"].values() for n, _ in pairs}
    assert len(set(size[:, 0])) > 1
    assert set(size[:, 0]) <= every
    options = ["--load", str(out / "run"), "--sample", "2", "--points", "9", "--times", "0,4"]
    assert train_temporal.main(options)["sets"].shape == (2, 2, 9, dim)
    back = data.load_all(made["file"].replace(".npy", ".npz"), "mine.npz")
    assert sorted(back.sizes) == sorted(size[:, 0])


def test_a_damaged_range_of_times_is_one_line_and_exit_code_2(own_run, tmp_path, capsys):
    out, _, _ = own_run
    shutil.copytree(out / "run", tmp_path / "run")
    known = json.loads((out / "run" / "sets.json").read_text())
    for wrong in ([], [0, 1e300], ["now"], [0, math.nan], 3):
        (tmp_path / "run" / "sets.json").write_text(json.dumps(known | {"times": wrong}))
        code, err = run_here(capsys, "--load", tmp_path / "run", "--sample", "1")
        assert (code, err.count("\n")) == (2, 1), err
        assert "sets.json" in err


def test_any_file_of_series_is_reconstructed_in_its_order(own_run, tmp_path):
    out, _, dim = own_run
    path = write_own(tmp_path / "other.npz", dim, count=9, seed=1)
    options = ["--load", str(out / "run"), "--reconstruct", path, "--out", str(tmp_path)]
    made = train_temporal.main([*options, "--times", "0,1"])["sets"]
    split = data.load_all(path, "mine.npz")
    sizes = np.empty(9, int)
    sizes[split.index] = split.sizes
    assert ((~np.isnan(made).any(-1)).sum(-1) == sizes[:, None]).all()
    assert made.shape == (9, 2, sizes.max(), dim)
    model = exnode.load(out / "run")
    batch = next(data.batches(split, 9, training=False))
    z0 = model.encode(batch.x, batch.t, batch.mask).mean.detach()[np.argsort(split.index)]
    near = model.decode(z0, [0.0, 1.0], 400, torch.Generator().manual_seed(0)).detach().numpy()
    assert np.nanmean(made) == pytest.approx(near.mean(), abs=1)


def test_what_stands_where_there_is_no_point_changes_neither_loss_nor_measure(
    tmp_path, monkeypatch
):
    options = ["--data", write_own(tmp_path / "mine.npz"), *OWN]
    found = []
    for garbage in (0.0, 50.0):
        for more in (["--trace", "exact"], ["--objective", "matching", "--moments", "2"]):
            args = train_temporal.parse([*options, *more])
            split = LOAD_SERIES(args).train
            torch.manual_seed(0)
            model = train_temporal.build(args, 2)
            train_temporal.start(args, model, split)
            batch = next(data.batches(split, 12))
            batch = batch._replace(x=batch.x.masked_fill(~batch.mask[..., None], garbage))
            for module in (series, series_scores):
                monkeypatch.setattr(module, "shared_batches", lambda *_, b=batch: [b])
            found += [train_temporal.make_loss(args, split)(model, batch).item()]
            found += [train_temporal.measure_elbo(model.eval(), split, args, WORLD)["elbo"]]
            found += series_scores.own_distances(model, split, args, WORLD).values()
    half = len(found) // 2
    assert found[:half] == found[half:]


def test_the_elbo_of_own_series_is_per_point_that_exists(tmp_path):
    """A decoder that moves nothing has N(mean, std²) of the training points, and a KL of 0."""
    args = train_temporal.parse(["--data", write_own(tmp_path / "mine.npz"), *OWN])
    splits = LOAD_SERIES(args)
    model = train_temporal.build(args, 2).eval()
    train_temporal.start(args, model, splits.train)
    train = splits.train.draw(np.arange(len(splits.train)))
    assert torch.allclose(model.decoder.mean, torch.from_numpy(train[0][train[1]].mean(0)))
    with torch.no_grad():
        for module in (model.decoder, model.mean, model.log_std):
            for p in module.parameters():
                p.zero_()
    x, mask, _ = splits.valid.draw(np.arange(len(splits.valid)))
    flat = torch.distributions.Normal(model.decoder.mean, model.decoder.std)
    log_p = flat.log_prob(torch.from_numpy(x)).sum(-1).numpy() * mask
    expected = (log_p.sum((1, 2)) / mask.sum((1, 2))).mean()
    found = train_temporal.measure_elbo(model, splits.valid, args, WORLD)
    assert found["elbo"] == pytest.approx(expected, abs=1e-4)
    loss = train_temporal.make_loss(args, splits.valid)
    batch = next(data.batches(splits.valid, 99, training=False))
    assert loss(model, batch).item() == pytest.approx(-expected, abs=1e-4)


def test_a_model_that_returns_the_truth_is_nearer_than_a_copy_of_the_nearest_set(monkeypatch):
    """Three sets of one point at 0, 1 and 5, at times 0, 1 and 3; then a set with none."""
    x = torch.tensor([0.0, 1, 5, 9])[None, :, None, None]
    mask = torch.tensor([True, True, True, False])[None, :, None]
    t, kept = torch.tensor([[0.0, 1, 3, 3]]), []
    batch = data.Batch(x, mask, torch.zeros(1), t, None)

    class Perfect:
        def encode(self, x, t, mask):
            kept.append(mask[0, :, 0].tolist())
            return exnode.Posterior(x, x)

        def decode(self, z0, t, points, draws, mask):
            return z0

    monkeypatch.setattr(series_scores, "shared_batches", lambda *_: [batch])
    args = some_args()
    found = series_scores.own_distances(Perfect(), None, args, WORLD)
    assert kept == [[True, True, True, False], [True, False, True, False]]
    assert found["reconstruction"] == {"model": 0, "copy": pytest.approx(2 * (1 + 1 + 16) / 3)}
    assert found["interpolation"] == {"model": 0, "copy": 2}


def test_built_in_digits_written_and_read_back_have_the_same_elbo(tmp_path):
    args = some_args()
    splits = few_series(args)
    own_sets.save(tmp_path / "digits.npz", splits)
    own = train_temporal.parse(["--data", str(tmp_path / "digits.npz"), "--batch-size", "16"])
    back, model = LOAD_SERIES(own), train_temporal.build(args, 2).eval()
    assert back.test.times.tolist() == args.times
    for name in ("valid", "test"):
        one, other = (getattr(s, name) for s in (splits, back))
        found = [train_temporal.measure_elbo(model, s, args, WORLD) for s in (one, other)]
        assert found[0]["elbo"] == found[1]["elbo"] + one.log_unit


@pytest.mark.parametrize(
    ("arrays", "options", "says"),
    [
        ({}, ["--times", "0,1"], "--times is for turning digits"),
        ({}, ["--classifier", "run"], "--classifier is for turning digits"),
        ({"time": np.array([0, 1, 2000.0])}, [], "times from 0 to 2000"),
        ({"time": np.array([0, 1, 1 + 1e-12])}, [], "float32"),
        ({"time": np.array([0, 2, 1.0])}, [], "increase"),
        ({"x": np.zeros((9, 4, 2))}, [], "has no times"),
        ({"x": np.ones((9, 3, 4, 2))}, ["--skip-bad"], "mine.npz"),
        ({}, ["--objective", "matching", "--pieces", "3"], "--pieces 3"),
        ({}, ["--objective", "matching", "--match-times", "4"], "--match-times 4"),
        ({}, ["--category", "cat"], "no category"),
    ],
)
def test_wrong_own_series_are_one_line_and_exit_code_2(tmp_path, capsys, arrays, options, says):
    x = np.random.default_rng(0).normal(size=(12, 3, 4, 2))
    x[:, 1, 2:] = np.nan
    np.savez(tmp_path / "mine.npz", **{"x": x, **arrays})
    options = ["--data", tmp_path / "mine.npz", *OWN, *options, "--out", tmp_path / "run"]
    code, err = run_here(capsys, *options)
    assert code == 2, err
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_wrong_file_to_reconstruct_is_one_line_and_exit_code_2(own_run, tmp_path, capsys):
    out, _, dim = own_run
    other = write_own(tmp_path / "other.npz", dim + 1, count=5)
    np.savez(tmp_path / "sets.npz", x=np.random.default_rng(0).normal(size=(5, 4, dim)))
    wrong = [([other], "-D"), ([tmp_path / "sets.npz"], "without times")]
    wrong += [([other, "--at", "0,1"], "--at"), ([tmp_path / "no.npz"], "no.npz")]
    for options, says in wrong:
        code, err = run_here(capsys, "--load", out / "run", "--reconstruct", *options)
        assert (code, err.count("\n")) == (2, 1), err
        assert says in err


# ------------------------------------------------------------------------------- wrong usage
WRONG = [
    ["--objective", "likelihood"],
    ["--decoder", "mlp"],
    ["--decoder", "attention", "--hidden", "6,6"],
    ["--times", ""],
    ["--times", "0,a"],
    ["--times", "0,0.5,0.5"],
    ["--times", "0.5,0"],
    ["--times", "0,nan"],
    ["--times", "0:1"],
    ["--times", "0:1:0"],
    ["--times", "1:0:0.1"],
    ["--times", "0:1:1e-9"],
    ["--times", "0:inf:1"],
    ["--times", "0,1e-60"],
    ["--times", "1e300,2e300"],
    ["--latent", "1000000000"],
    ["--points", "0"],
    ["--points", "1000000000"],
    ["--latent", "0"],
    ["--hidden", "8,zero"],
    ["--hidden", ""],
    ["--kl", "0.1"],
    ["--coupling", "none"],
    ["--pieces", "2"],
    ["--match-times", "2"],
    ["--objective", "matching", "--match-times", "6"],
    ["--objective", "matching", "--points", "6", "--pieces", "7"],
    ["--trace", "exact", "--objective", "matching"],
    ["--kl", "-1", "--objective", "matching"],
    ["--ema", "1"],
    ["--lr", "nan"],
    ["--gradient", "none"],
    ["--trace", "none"],
    ["--data", "modelnet"],
    ["--data", "mnist", "--root", "/nowhere"],
    ["--category", "11"],
    ["--sample", "3"],
    ["--evaluate"],
    ["--reconstruct", "mine.npy"],
    ["--at", "0,1"],
    ["--load", "/nowhere"],
    ["--load", "/nowhere", "--evaluate"],
    ["--out", "/proc/run"],
    ["--unknown"],
]


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_a_wrong_option_is_one_line_and_exit_code_2(options, tmp_path, capsys):
    out = [] if "--out" in options else ["--out", tmp_path / "run"]
    code, err = run_here(capsys, *out, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--sample", "2", "--evaluate"],
        ["--sample", "0"],
        ["--sample", "2", "--at", "0,1"],
        ["--sample", "2", "--lr", "0.1"],
        ["--sample", "2", "--resume"],
        ["--sample", "2", "--category", "7"],
        ["--sample", "2", "--latent", "3"],
        ["--sample", "2", "--decoder", "attention"],
        ["--sample", "2", "--points", "100000000000"],
        ["--sample", "2", "--out", "/proc/run"],
    ],
    ids=" ".join,
)
def test_what_contradicts_a_finished_run_is_one_line_and_exit_code_2(run, capsys, options):
    code, err = run_here(capsys, "--load", run, *options)
    assert (code, err.count("\n")) == (2, 1)


def test_a_damaged_run_or_one_of_another_script_is_one_line_and_exit_code_2(run, tmp_path, capsys):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    whole = (run / "best.pt").read_bytes()
    for content in (whole[:5000], whole[: len(whole) // 2], b""):
        (tmp_path / "best.pt").write_bytes(content)
        code, err = run_here(capsys, "--load", tmp_path, "--sample", "1")
        assert (code, err.count("\n")) == (2, 1)
        assert "damaged" in err
    for config in ('{"model": "deepsets", "points": 100}', "[]", "{"):
        (tmp_path / "config.json").write_text(config)
        code, err = run_here(capsys, "--load", tmp_path, "--sample", "1")
        assert (code, err.count("\n")) == (2, 1)
        assert str(tmp_path) in err


def test_a_second_run_into_the_same_directory_is_refused(run, capsys):
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    code, err = run_here(capsys, *MATCHING, "--out", run)
    assert (code, err.count("\n")) == (2, 1)
    code, err = run_here(capsys, *MATCHING, "--out", run, "--resume", "--times", "0,0.5")
    assert (code, err.count("\n")) == (2, 1)
    assert "times [0.0, 0.5, 1.0] → [0.0, 0.5]" in err
    assert before == {p.name: p.read_bytes() for p in run.iterdir()}


# ------------------------------------------------------------------------------- options
def test_times_are_a_list_or_a_range_with_its_end():
    assert series.times("0,.25,1.5") == [0, 0.25, 1.5]
    assert series.times("0:1.5:0.5") == [0, 0.5, 1, 1.5]
    fine = series.times("0:1.5:0.05")
    assert (len(fine), fine[3], fine[5], fine[-1]) == (31, 0.15, 0.25, 1.5)
    assert series.times("0:1:0.3") == [0, 0.3, 0.6, 0.9]
    assert series.times("2:2:1") == [2]


def test_the_defaults_are_the_paper_s_recipe():
    args = train_temporal.parse([])
    assert args.times == [0, 0.25, 0.5, 0.75, 1]
    assert (args.points, args.latent, args.batch_size, args.epochs) == (64, 128, 128, 100)
    assert (args.objective, args.decoder, args.lr) == ("elbo", "concatsquash", 1e-3)
    rate = training.schedule(args.schedule, train_temporal.INTERVALS)
    assert [rate(epoch / 100) for epoch in (0, 49, 50, 99)] == [1, 1, 0.5, 0.5]
    model = train_temporal.build(args, 2)
    settings = {"method": "dopri5", "rtol": 1e-3, "atol": 1e-4, "options": None}
    assert model.decoder.blocks[0].solver == model.solver == settings
    assert model.gradient == model.decoder.blocks[0].gradient == "adjoint"
    sizes = [tuple(p.shape) for p in model.decoder.parameters() if p.dim() == 2][::3]
    assert sizes == [(512, 2), (512, 512), (512, 512), (2, 512)]


@pytest.mark.parametrize("decoder", ["attention", "transformer"])
def test_a_decoder_that_attends_can_be_evaluated_and_trained_by_either_objective(decoder):
    for objective in ("elbo", "matching"):
        args = some_args("--decoder", decoder, "--objective", objective)
        split = replace(few_series(args).train, points=3)
        model = train_temporal.build(args, 2)
        batch = next(data.batches(split, 4))
        loss = train_temporal.make_loss(args, split)(model, batch)
        loss.backward()
        moved = [p.grad.abs().sum() > 0 for p in model.decoder.parameters() if p.grad is not None]
        assert any(moved)
        model.eval().elbo_terms(batch.x, batch.t, trace="exact")


def test_help_says_in_sentences_what_every_option_does(capsys):
    check_help(train_temporal, capsys)
