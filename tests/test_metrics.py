"""metrics.py against loops over points and sets."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.metrics import chamfer, chamfer_matrix, sample_scores, with_error


def brute_force(x, y):
    """The definition, point by point."""
    there = [min(math.dist(a, b) ** 2 for b in y) for a in x]
    back = [min(math.dist(a, b) ** 2 for a in x) for b in y]
    return sum(there) / len(there) + sum(back) / len(back)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31))
def test_chamfer_is_the_definition_whatever_is_padded(n, m, d, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, d, generator=g, dtype=torch.float64) for k in (n, m))
    wanted = brute_force(x.tolist(), y.tolist())
    assert chamfer(x, y).item() == pytest.approx(wanted)
    assert chamfer(y, x).item() == pytest.approx(wanted)
    junk = torch.randn(2, d, generator=g, dtype=torch.float64)
    mask_x, mask_y = (torch.arange(k + 2) < k for k in (n, m))
    padded = chamfer(torch.cat([x, junk]), torch.cat([y, junk]), mask_x, mask_y)
    assert padded.item() == pytest.approx(wanted)


def test_chamfer_is_zero_for_the_same_points_in_another_order():
    x = torch.randn(5, 7, 2)
    assert chamfer(x, x[:, torch.randperm(7)]).eq(0).all()


@pytest.mark.parametrize("pairs", [1, 100, 2**23])
def test_the_matrix_of_distances_does_not_depend_on_its_pieces(pairs):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 5, 2, generator=g), torch.randn(4, 6, 2, generator=g)
    wanted = torch.tensor([[brute_force(a, b) for b in y.tolist()] for a in x.tolist()])
    torch.testing.assert_close(chamfer_matrix(x, y, pairs=pairs), wanted)


def brute_force_scores(samples, real):
    """One set at a time, as the definitions say: for each score what its mean is of."""
    sets = [(0, s) for s in samples.tolist()] + [(1, s) for s in real.tolist()]
    right = []
    for i, (kind, x) in enumerate(sets):
        others = [(brute_force(x, y), k) for j, (k, y) in enumerate(sets) if j != i]
        right.append(float(min(others)[1] == kind))
    d = [[brute_force(s, r) for r in real.tolist()] for s in samples.tolist()]
    nearest = {row.index(min(row)) for row in d}
    matching = [min(row[j] for row in d) for j in range(len(real))]
    return {"1-NNA": right, "MMD": matching, "COV": [float(j in nearest) for j in range(len(real))]}


@given(st.integers(2, 6), st.floats(0, 2), st.integers(0, 2**31))
def test_scores_and_their_errors_are_their_definitions(sets, shift, seed):
    g = torch.Generator().manual_seed(seed)
    samples = torch.randn(sets, 4, 2, generator=g, dtype=torch.float64) + shift
    real = torch.randn(sets, 4, 2, generator=g, dtype=torch.float64)
    found, wanted = sample_scores(samples, real), brute_force_scores(samples, real)
    errors = found.pop("standard_errors")
    assert found == pytest.approx({k: statistics.mean(v) for k, v in wanted.items()})
    for name, values in wanted.items():
        error = statistics.stdev(values) / len(values) ** 0.5
        assert errors[name] == pytest.approx(error)


def test_an_error_is_how_much_means_of_other_draws_differ():
    draws = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = [with_error(row) for row in draws]
    spread = statistics.stdev(one["mean"] for one in found)
    assert statistics.mean(one["standard_error"] for one in found) == pytest.approx(spread, rel=0.1)


def test_scores_tell_good_samples_from_bad_ones():
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(100, 1, 2, generator=g)  # sets differ by where they are
    real, good = (torch.randn(100, 9, 2, generator=g) * 0.1 + centres for _ in range(2))
    good_scores, far = sample_scores(good, real), sample_scores(good + 9, real)
    one = sample_scores(good[:1] + 0.01 * torch.randn(100, 9, 2, generator=g), real)
    assert good_scores["1-NNA"] < 0.6
    assert far["1-NNA"] == 1.0
    assert good_scores["COV"] > 0.5 > one["COV"]
    assert good_scores["MMD"] < one["MMD"] < far["MMD"]


def test_scores_want_as_many_samples_as_real_sets():
    with pytest.raises(ValueError, match="as many samples"):
        sample_scores(torch.zeros(3, 4, 2), torch.zeros(2, 4, 2))
