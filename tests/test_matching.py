"""Matching against perfect fields, brute force and the formulas of its docstrings."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exnode import By, by_hand, make_flow, make_vae, seeded, series
from test_sets import F64, GARBAGE, SEEDS, close, draw_mask, filled, one_by_one

from beyond import matching
from beyond.matching import (
    Moments,
    assign,
    exchange,
    in_proportion,
    matching_loss,
    noise_level,
    round_robin,
    start_at_scale,
    temporal_matching_loss,
)
from exnode import DECODERS, SetFlow
from sets import keep


def perfect(i, blocks, t1, dim):
    """Data at one place c: x_s = (1 − s) c + s z, so dx/ds = z − c = (x_s − c)/s."""

    first, last = noise_level(i / blocks, 0.1), noise_level((i + 1) / blocks, 0.1)

    def f(t, x, context):
        s = first + t / t1 * (last - first)
        return (x - context[..., None, :]) / s[..., None, None] * (last - first) / t1

    return By(dim, f, context=dim)


@pytest.mark.parametrize("coupling", ["swaps", "none"])
@pytest.mark.parametrize(("blocks", "sets"), [(1, 4), (3, 2), (3, 7)])
def test_matching_loss_is_zero_for_the_perfect_field(coupling, blocks, sets):
    t1, c, mask = 0.3, torch.randn(sets, 2, dtype=F64), draw_mask((sets, 4))
    x = filled(c[:, None].expand(sets, 4, 2), mask, 9.0)
    flow = by_hand(*(perfect(i, blocks, t1, 2) for i in range(blocks)), dim=2, t1=t1)
    assert matching_loss(flow, x, mask, c, coupling).abs() < 1e-18


@pytest.mark.parametrize("blocks", [1, 3])
def test_with_the_rest_of_a_shape_a_field_that_knows_it_has_nothing_left_to_explain(blocks):
    shape = torch.randn(5, 2, dtype=F64) * 0.3 + 1

    def knows(i):
        first, last = noise_level(i / blocks, 0.1), noise_level((i + 1) / blocks, 0.1)

        def f(t, x, context):  # (x_s − E[x | x_s]) / s
            s = (first + t / 0.5 * (last - first))[:, None, None]
            away = torch.cdist(x, (1 - s) * (shape - 1) / 0.3)
            mean = torch.softmax(-(away**2) / (2 * s * s), -1) @ ((shape - 1) / 0.3)
            return (x - mean) / s * (last - first) / 0.5

        return By(2, f)

    flow = by_hand(*map(knows, range(blocks)), dim=2)
    flow.mean.fill_(1.0), flow.std.fill_(0.3)
    x, spare = shape[:, None], torch.stack([shape[torch.arange(5) != i] for i in range(5)])
    assert matching_loss(flow, x, coupling="none", spare=spare) < 1e-12
    assert matching_loss(flow, x, coupling="none") > 0.1


@given(st.integers(3, 6), st.integers(1, 3), st.floats(0.02, 0.9), SEEDS)
def test_exchanged_targets_have_the_mean_of_plain_ones_given_the_noisy_set(size, dim, s, seed):
    rng = torch.Generator().manual_seed(seed)
    shape, y = (torch.randn(n, dim, dtype=F64, generator=rng) for n in (size, 2))
    pairs = torch.cartesian_prod(*[torch.arange(size)] * 2)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]  # all sets of two points of the shape
    x = shape[pairs]
    p = torch.softmax(-(y - (1 - s) * x).square().sum((1, 2)) / (2 * s * s), 0)
    rest = [[k for k in range(size) if k not in pair] for pair in pairs.tolist()]
    change = exchange(x, shape[torch.tensor(rest)], y.expand_as(x), x.new_full((len(x),), s))
    torch.testing.assert_close(torch.einsum("p,pnd->nd", p, change), torch.zeros_like(y))
    wanted = x - torch.einsum("p,pnd->nd", p, x)
    left = wanted + s * change
    assert (p @ left.square().sum((1, 2)) <= p @ wanted.square().sum((1, 2)) + 1e-9).all()


@pytest.mark.parametrize("blocks", [1, 3])
def test_matching_loss_is_a_mean_over_points_that_exist_weighted_as_the_likelihood_is(blocks):
    mask = draw_mask((600, 4))
    still = by_hand(*(By(2, lambda t, x, z: 0 * x) for _ in range(blocks)), dim=2)
    loss = matching_loss(still, 1e4 + filled(torch.zeros(600, 4, 2, dtype=F64), mask, 1e6), mask)
    u = torch.linspace(0, 1, 10_001, dtype=F64)
    weight = (1 - noise_level(u, 0.1)).mean().item()  # ∫ (1 − s) du
    assert loss.item() == pytest.approx(weight * 1e8, rel=1e-2)  # |z − x|² ≈ 1e8


def test_the_path_from_data_to_noise_spends_equal_time_at_equal_ratios_of_noise():
    s = noise_level(torch.linspace(0, 1, 1001, dtype=F64), 0.01)
    close(s[[0, -1]], torch.tensor([0.0, 1.0], dtype=F64), 1e-12)
    ratio = (s[1:] + 0.01) / (s[:-1] + 0.01)
    close(ratio, ratio[:1].expand_as(ratio), 1e-9)


@pytest.mark.parametrize("coupling", ["swaps", "none"])
def test_matching_raises_the_likelihood_and_reaches_every_block(coupling):
    flow = make_flow(blocks=3, time=True, scale=1.0, trace="exact", method="rk4", options=None)
    x = 2 + 0.5 * torch.randn(64, 3, 2, dtype=F64)
    matching_loss(flow, x[:1], coupling=coupling).backward()
    assert all(
        p.grad.any() for b in flow.blocks for k, p in b.field.named_parameters() if "out" in k
    )
    before, adam = flow.log_prob(x).mean(), torch.optim.Adam(flow.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        adam.zero_grad()
        losses.append(matching_loss(flow, x, coupling=coupling))
        losses[-1].backward()
        adam.step()
    assert sum(losses[-10:]) < 0.5 * sum(losses[:3]) / 3 * 10
    assert flow.log_prob(x).mean() > before + 3


@pytest.mark.parametrize("field", ["attention", "deepsets"])
@torch.no_grad()
def test_a_chain_starts_at_the_speed_and_the_scale_of_the_noise_of_each_block(field):
    torch.manual_seed(0)
    flow = SetFlow(2, 4, (256, 256, 256), 4, field, time=True).double()
    before = copy.deepcopy(flow)
    start_at_scale(flow, 0.01)
    name = "q" if field == "attention" else "network"
    for i, (new, old) in enumerate(zip(flow.blocks, before.blocks)):
        first, middle, last = (noise_level((i + k) / 4, 0.01) for k in (0, 0.5, 1))
        for p, q in zip(new.field.out.parameters(), old.field.out.parameters()):
            close(p, (last - first) / new.t1 * q, 1e-12)
        layers, others = (getattr(block.field, name).layers for block in (new, old))
        w, b = layers[0].parameters()
        assert ((w != 0).sum(1) == 1).all()  # along one axis
        axes = w.abs().argmax(1).view(4, 64)  # of each head
        mixed = torch.arange(64) % 2
        heads = [0 * mixed, 1 + 0 * mixed, mixed, mixed] if field == "attention" else [mixed] * 4
        assert torch.equal(axes, torch.stack(heads))
        ratio = w.norm(dim=1) / others[0].weight.norm(dim=1)
        finest = min(max(0.5 / middle, 1), 30)
        assert ratio.min() >= 1 - 1e-12
        assert ratio.max() <= finest + 1e-9
        assert ratio.log().mean().item() == pytest.approx(math.log(finest) / 2, abs=0.25)
        places = b / w.sum(1)  # where tanh is steepest: drawn from N(0, I)
        assert places.mean().item() == pytest.approx(0, abs=0.2)
        assert places.std().item() == pytest.approx(1, abs=0.25)
        eye = torch.eye(256, dtype=F64)
        close(layers[1].weight, 0.3 * others[1].weight + 0.5 * eye, 1e-12)
        close(layers[2].weight, 0.3 * others[2].weight + eye, 1e-12)


def test_output_layers_learn_in_proportion_to_their_sizes_and_no_parameter_is_left_out():
    flow = SetFlow(2, 3, (8, 8), 2, time=True)
    with torch.no_grad():
        for block, size in zip(flow.blocks, (1e-2, 0.5, 1e2)):
            block.field.out.weight.fill_(size / math.sqrt(3 * 8))  # of 8 inputs
    rest, *outs = in_proportion(flow, 0.1)
    assert "lr" not in rest
    assert [group["lr"] for group in outs] == pytest.approx([1e-3, 0.05, 0.1])
    for block, group in zip(flow.blocks, outs):
        assert [*map(id, group["params"])] == [*map(id, block.field.out.parameters())]
    every = [id(p) for group in (rest, *outs) for p in group["params"]]
    assert sorted(every) == sorted(map(id, flow.parameters()))
    fresh = torch.nn.Linear(4096, 64)  # 1 is the size of PyTorch's initial weights
    assert (3 * fresh.weight.square().sum(1).mean()).sqrt().item() == pytest.approx(1, abs=0.02)


@settings(max_examples=12)
@given(SEEDS, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_assignment_reorders_noise_within_each_set_and_is_nearly_the_best(seed, n, dim, masked):
    torch.manual_seed(seed)
    x, z = torch.randn(2, 40, n, dim, dtype=F64)
    mask, costs = draw_mask((40, n)) if masked else torch.ones(40, n).bool(), []
    found = assign(x, z, mask if masked else None)
    for i, here in one_by_one(mask):
        for part in (here, ~here):
            close(found[i][part].sort(0).values, z[i][part].sort(0).values, 0)
        pairs = (x[i][here][:, None] - z[i][here]).square().sum(-1)  # every xᵢ with every zⱼ
        orders = torch.tensor([*itertools.permutations(range(len(pairs)))])
        every = pairs.gather(1, orders.T).sum(0)
        costs.append((every.min(), (x[i] - found[i])[here].square().sum(), every[0]))
    best, ours, identity = torch.tensor(costs, dtype=F64).T
    assert (ours >= best - 1e-9).all()
    assert ours.sum() <= min(1.05 * best.sum(), identity.sum())
    if dim == 1:
        close(ours, best)


@given(st.integers(1, 12))
def test_rounds_of_disjoint_pairs_meet_every_pair_once(n):
    rounds, every = round_robin(n), torch.arange(n)
    assert all((row[row] == every).all() for row in rounds)
    pairs = [(i, j) for row in rounds.tolist() for i, j in enumerate(row) if i < j]
    assert sorted(pairs) == [*itertools.combinations(range(n), 2)]


# -------------------------------------------------------------------------------- sets over time


@pytest.mark.parametrize("decoder", DECODERS)
def test_half_of_a_matching_loss_with_pieces_is_that_of_each_piece_by_itself(decoder):
    vae, (x, t), g = make_vae(decoder=decoder), series(n=5), seeded()
    z = vae.latents(vae.encode(x, t).sample(g), t)
    whole = matching_loss(vae.decoder, x, None, z, "none", g)
    order = torch.rand(x.shape[:-1], dtype=x.dtype, generator=g).argsort(-1)[..., None]
    shuffled, given = x.take_along_dim(order, -2), torch.stack([z, z], 2)
    parts = torch.stack([shuffled[:, :, :2], shuffled[:, :, 2:4]], 2)
    parts = matching_loss(vae.decoder, parts, None, given, "none", g)
    loss = temporal_matching_loss(vae, x, t, coupling="none", generator=seeded(), pieces=2)[0]
    close(loss, (whole + parts) / 2)
    for wrong in ({"pieces": 6}, {"pieces": 2, "mask": torch.ones(x.shape[:-1], dtype=bool)}):
        with pytest.raises(ValueError, match="pieces="):
            temporal_matching_loss(vae, x, t, **wrong)


@given(seed=st.integers(0, 99), ragged=st.booleans(), weight=st.sampled_from([0.5, 20.0]))
def test_moments_add_what_z_cannot_tell_of_each_set_in_the_units_of_the_flow(seed, ragged, weight):
    torch.manual_seed(seed)
    vae, (x, t) = make_vae(), series(n=4)
    vae.moments = Moments(3, 7).double()
    vae.decoder.mean.fill_(0.2), vae.decoder.std.fill_(0.7)
    mask = torch.rand(x.shape[:-1]) < 0.6
    mask[..., 0] = True
    mask = mask if ragged else None
    z = vae.latents(vae.encode(x, t, mask).sample(seeded()), t)
    error = 0
    for i, j in itertools.product(range(x.shape[0]), range(x.shape[1])):
        points = x[i, j] if mask is None else x[i, j][mask[i, j]]
        waves = torch.exp(
            1j * ((points - 0.2) / 0.7) @ vae.moments.frequencies.T.to(torch.complex128)
        )
        told = vae.moments.linear(z[i, j])
        error += (told - torch.cat([waves.mean(0).real, waves.mean(0).imag])).square().mean()
    error = error / (x.shape[0] * x.shape[1])
    without, kl = temporal_matching_loss(vae, x, t, mask, generator=seeded())
    with_moments = temporal_matching_loss(vae, x, t, mask, generator=seeded(), moments=weight)
    close(with_moments[0], without + weight * error)
    close(with_moments[1], kl)


def test_a_matching_loss_at_some_times_is_that_of_the_sets_there(monkeypatch):
    vae, (x, t), seen = make_vae(), series(), []
    mask = torch.ones(x.shape[:-1], dtype=bool)
    mask[:, 1, 0] = False

    def loss(flow, *given):
        seen.append([part.unflatten(0, (2, 2)) for part in given[:3]])  # two series at two times
        return x.sum()

    monkeypatch.setattr(matching, "matching_loss", loss)
    for seed in range(20):
        temporal_matching_loss(vae, x, t, mask, generator=seeded(seed), times=2)
        z = vae.latents(vae.encode(x, t, mask).sample(seeded(seed)), t)
        *_, (some, there, given) = seen
        pick = [int((x == some[:, k : k + 1]).flatten(2).all(-1)[0].nonzero()) for k in range(2)]
        assert len(set(pick)) == 2
        close((x[:, pick], z[:, pick]), (some, given))
        assert torch.equal(mask[:, pick], there)
    assert len({some[0, 0, 0, 0].item() for some, *_ in seen}) == len(t)  # each has its turn


def test_a_loss_at_some_times_is_at_those_where_a_series_was_observed(monkeypatch):
    """Three series, each observed at one time only."""
    vae, (x, t), seen = make_vae(), series(3, 4), []
    mask = torch.eye(3, x.shape[1], dtype=torch.bool)[..., None].repeat(1, 1, x.shape[2])

    def loss(flow, x, *_):
        seen.append(x)
        return x.sum()

    monkeypatch.setattr(matching, "matching_loss", loss)
    for seed in range(6):
        temporal_matching_loss(vae, x, t, mask, generator=seeded(seed), times=1)
        close(seen[-1], x[mask.any(-1)])


def test_a_set_that_was_not_observed_counts_neither_in_matching_nor_in_moments():
    vae, (x, t) = make_vae(), series(2, 4)
    vae.moments = Moments(3, 7).double()
    mask = draw_mask(x.shape[:-1])
    mask[0, 1] = mask[1, 2] = False
    found = []
    for value in (1.0, 1e30):
        content = filled(x, mask, value).requires_grad_()
        loss, kl = temporal_matching_loss(vae, content, t, mask, generator=seeded(), moments=2.0)
        grads = torch.autograd.grad(loss + kl.sum(), [content, *vae.moments.parameters()])
        assert not grads[0][~mask].any()
        found.append((loss, kl, grads[1:]))
    close(*found)
    seen = mask.any(-1)
    z = vae.latents(vae.encode(x, t, mask).sample(g := seeded()), t)
    wanted = matching_loss(vae.decoder, x[seen], mask[seen], z[seen], generator=g)
    close(found[0][0], wanted + 2 * vae.moments(x[seen], z[seen], mask[seen]))


@settings(max_examples=4)
@given(SEEDS, GARBAGE)
def test_padding_changes_neither_the_matching_loss_nor_its_gradients(seed, value):
    flow, found = make_flow(seed, scale=1.0), []
    x, mask = torch.randn(3, 4, 2, dtype=F64), draw_mask((3, 4))
    for content in (x, filled(x, mask, value)):
        content.requires_grad_()
        loss = matching_loss(flow, content, mask, generator=seeded())
        grads = torch.autograd.grad(loss, [content, *flow.parameters()])
        assert not grads[0][~mask].any()
        found.append((loss, grads))
    close(found[1], found[0], 1e-12)


def test_matching_in_units_of_the_data_is_that_of_scaled_data():
    mask, flow = draw_mask((6, 4)), make_flow()
    x = filled(torch.randn(6, 4, 2, dtype=F64) * torch.tensor([0.1, 3.0]) + 5, mask, 9.0)
    plain = copy.deepcopy(flow)
    flow.standardise(x, mask)
    y = keep(flow.to_units(x, mask), mask)
    loss = matching_loss(flow, x, mask, generator=seeded())
    close(loss, matching_loss(plain, y, mask, generator=seeded()), 1e-9)


X = torch.ones(2, 3, 2)
BAD = [
    (lambda: matching_loss(make_flow(), X[:, :0]), "at least one point"),
    (lambda: matching_loss(make_flow(), X * math.nan), "x must be finite"),
    (lambda: matching_loss(make_flow(), X, X[..., 0] < 0), "at least one point"),
    (lambda: matching_loss(make_flow(), X, coupling="optimal"), "coupling must .*'optimal'"),
    (lambda: matching_loss(make_flow(), X, finest=0), "finest must be positive, not 0"),
    (lambda: matching_loss(make_flow(), X, spare=X), "spare: for coupling='none'.*'swaps'"),
    (lambda: matching_loss(make_flow(), X, coupling="none", spare=X[:1]), r"spare: .*\(1, "),
    (lambda: matching_loss(make_flow(context=5), X, None, X[:1, 0]), "context must .*5 .*2"),
    (lambda: temporal_matching_loss(make_vae(), *series(), moments=1.0), "attach a head first"),
    (lambda: temporal_matching_loss(make_vae(), X[0], torch.tensor([0.0])), "x must be "),
]


@pytest.mark.parametrize(("call", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_input_is_a_value_error_that_names_it(call, says):
    with pytest.raises(ValueError, match=says):
        call()
