"""Fields against full Jacobians, permutations and padding; the pools, norms and baselines, too."""

import copy
import io
import math
import shutil
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from beyond.fast import FastAttentionField, FastDeepSetsField
from beyond.transformer import TransformerField
from sets import (
    ISAB,
    MAB,
    PMA,
    AttentionField,
    ConcatSquashField,
    DeepSets,
    DeepSetsField,
    Field,
    PointNorm,
    SetTransformer,
    keep,
    pool_mean,
)

F32, F64 = torch.float32, torch.float64


def looking(field):
    """With what a transformer starts without: conditions of its layers, and views."""
    with torch.no_grad():
        for name, p in field.named_parameters():
            if any(part in name for part in (".condition.", "fine.")):
                p.normal_(std=0.3)
    return field


class ForwardMode(AttentionField):
    """Attention with the tangents and the trace of any field that defines only `forward`."""

    value_and_jvp, value_and_trace = Field.value_and_jvp, Field.value_and_trace


SEEDS = st.integers(0, 2**16)
GARBAGE = st.sampled_from([1.0, -1e3, 1e30, -1e300])  # whatever may lie in a padded point
FIELDS = {
    "max": lambda d, time, c: DeepSetsField(d, (8, 6), time, c),
    "attention": lambda d, time, c: AttentionField(d, (8, 7, 6), 2, time, c),
    "concatsquash": lambda d, time, c: ConcatSquashField(d, (8, 6), c),
    "forward mode": lambda d, time, c: ForwardMode(d, (8, 6), 2, time, c),
    "fast max": lambda d, time, c: FastDeepSetsField(d, (8, 6), time, c),
    "fast attention": lambda d, time, c: FastAttentionField(d, (8, 7, 6), 2, time, c),
    "transformer": lambda d, time, c: looking(TransformerField(d, 8, 2, 2, c)),
    "fine": lambda d, time, c: looking(TransformerField(d, 8, 1, 2, c, end=0.5, fine=True)),
}
all_fields = pytest.mark.parametrize("name", FIELDS)


class Case(NamedTuple):
    """A field and what it is called with."""

    field: nn.Module
    t: Any
    x: Tensor
    mask: Tensor | None
    context: Tensor | None

    def __call__(self, method="__call__", *more, **changed):
        t, x, mask, context = self._replace(**changed)[1:]
        return getattr(self.field, method)(t, x, *more, mask=mask, context=context)

    def by_hand(self):
        """The full Jacobian `(numel, numel)` of the whole batch, by reverse mode."""
        numel = self.x.numel()
        return torch.autograd.functional.jacobian(lambda x: self(x=x), self.x).view(numel, numel)


def build(name, seed=0, dim=2, time=True, context=0, scale=2.0):
    """A field in float64 whose weights are large enough for every nonlinearity to matter."""
    torch.manual_seed(seed)
    field = FIELDS[name](dim, time, context).double()
    with torch.no_grad():
        for p in field.parameters():
            p.mul_(scale)
    return field


def draw_mask(shape):
    """At least one point in every set."""
    mask = torch.rand(shape) < 0.6
    return mask.scatter(-1, torch.randint(shape[-1], (*shape[:-1], 1)), True)


@st.composite
def cases(draw, names=tuple(FIELDS), most=5, batches=((), (1,), (3,), (2, 3)), **given):
    n, dim, batch = (
        draw(st.integers(1, most)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(batches)),
    )
    time, context = draw(st.booleans()), draw(st.sampled_from([0, 2]))
    field = build(draw(st.sampled_from(names)), draw(SEEDS), dim, time, context, **given)
    t = draw(st.sampled_from([0.3, torch.tensor(0.3, dtype=F64), torch.rand(batch, dtype=F64)]))
    mask = draw_mask((*batch, n)) if draw(st.booleans()) else None
    z = torch.randn(*batch, context, dtype=F64) if context else None
    return Case(field, t, torch.randn(*batch, n, dim, dtype=F64), mask, z)


def close(actual, expected, tol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def shuffled(order, x, axis=-2):
    """x with the points of every set in their own order `(..., n)`; a mask has axis −1."""
    if x is None:
        return None
    order = order if axis == -1 else order[..., None]
    return x.gather(axis, order.expand_as(x))


def draw_order(x):
    return torch.rand(x.shape[:-1]).argsort(-1)


def filled(x, mask, value):
    """x with other content in its padded points."""
    return torch.where(mask[..., None], x, value * torch.randn_like(x))


def widened(x, mask):
    """Two more padded points in every set."""
    more = torch.cat([x, torch.randn_like(x[..., :1, :]).expand(*x.shape[:-2], 2, x.shape[-1])], -2)
    return more, nn.functional.pad(mask, (0, 2))


def one_by_one(mask):
    """The index of every set in the batch, and which of its points exist."""
    for index in torch.cartesian_prod(*map(torch.arange, mask.shape[:-1])).view(-1, mask.dim() - 1):
        yield tuple(index.tolist()), mask[tuple(index.tolist())]


# ------------------------------------------------------- formulas, written again from the weights


def affine(layer, x):
    return x @ layer.weight.T + layer.bias


def network(net, x, extra=None):
    first, *rest = net.layers
    h = affine(first, x) + (0 if extra is None else extra @ net.extra.weight.T)
    for layer in rest:
        h = affine(layer, torch.tanh(h))
    return h


def attention(q, k, v, heads):
    """softmax(q kᵀ / √h) v, head by head."""
    return torch.cat(
        [
            torch.softmax(a @ b.mT / math.sqrt(a.shape[-1]), -1) @ c
            for a, b, c in zip(*(x.chunk(heads, -1) for x in (q, k, v)))
        ],
        -1,
    )


def with_large_weights(module):
    """In float64, without dropout, with weights for which every nonlinearity matters."""
    with torch.no_grad():
        for p in module.double().eval().parameters():
            p.normal_(std=0.7)
    return module


def conditions(time, context):
    """t, a context or None, and what the first layers read of them."""
    t, z = torch.rand((), dtype=F64), torch.randn(context, dtype=F64)
    extra = torch.cat([t.view(1)] * time + [z])
    return t, z if context else None, extra if len(extra) else None


@given(SEEDS, st.integers(1, 5), st.booleans(), st.sampled_from([0, 2]))
def test_deep_sets_field_is_its_formula(seed, n, time, context):
    torch.manual_seed(seed)
    x, mask = torch.randn(n, 2, dtype=F64), draw_mask((n,))
    t, z, extra = conditions(time, context)
    for hidden in ((5,), (8, 7, 6), (8, 6)):
        field = with_large_weights(DeepSetsField(2, hidden, time, context))
        h = network(field.network, x[mask], extra)
        expected = affine(field.out, h - h.amax(0))
        close(field(t, x[mask], context=z), expected)
        close(field(t, x, mask, z)[mask], expected)


@given(SEEDS, st.integers(1, 5), st.booleans(), st.sampled_from([0, 2]))
def test_attention_field_is_its_formula(seed, n, time, context):
    torch.manual_seed(seed)
    x, mask = torch.randn(n, 2, dtype=F64), draw_mask((n,))
    t, z, extra = conditions(time, context)
    for heads, hidden in ((1, (1,)), (2, (6,)), (3, (8, 7, 6))):
        field = with_large_weights(AttentionField(2, hidden, heads, time, context))
        q, k, v = (network(net, x[mask], extra) for net in (field.q, field.k, field.v))
        expected = affine(field.out, torch.tanh(q + attention(q, k, v, heads)))
        close(field(t, x[mask], context=z), expected)
        close(field(t, x, mask, z)[mask], expected)


@given(SEEDS, st.sampled_from([0, 3]))
def test_concat_squash_field_has_a_bias_in_its_gates_and_none_in_its_shifts(seed, context):
    torch.manual_seed(seed)
    field = with_large_weights(ConcatSquashField(2, (8, 7), context))
    x, (t, z, extra) = torch.randn(5, 2, dtype=F64), conditions(True, context)
    h = x
    for i, layer in enumerate(field.layers):
        assert layer.shift.bias is None
        gate = 1 / (1 + torch.exp(-affine(layer.gate, extra)))
        h = affine(layer.linear, h.tanh() if i else h) * gate + layer.shift.weight @ extra
    close(field(t, x, context=z), h)


def mab(block, x, y, heads):
    q = affine(block.q, x)
    h = q + attention(q, affine(block.k, y), affine(block.v, y), heads)
    return h + affine(block.out, h).clamp(min=0)


def isab(block, x, heads):
    return mab(block.spread, x, mab(block.gather, block.points, x, heads), heads)


def pma(block, x, heads):
    return mab(block.block, block.seed, x, heads)[0]


def deep_sets(model, x):
    for layer in model.layers:
        x = torch.tanh(affine(layer, x - x.amax(0)))
    hidden, last = (layer for layer in model.head if isinstance(layer, nn.Linear))
    return affine(last, torch.tanh(affine(hidden, x.amax(0))))


def set_transformer(model, x, heads):
    for block in model.blocks:
        x = isab(block, x, heads)
    return affine(model.head, pma(model.pool, x, heads))


@given(SEEDS, st.integers(1, 5), st.booleans(), GARBAGE)
def test_baselines_and_their_blocks_are_their_formulas_for_each_set(seed, n, masked, value):
    torch.manual_seed(seed)
    x, y = torch.randn(2, 3, 4, dtype=F64), torch.randn(2, n, 4, dtype=F64)
    mask = draw_mask((2, n)) if masked else torch.ones(2, n, dtype=torch.bool)
    given = (filled(y, mask, value), mask) if masked else (y,)
    block = with_large_weights(MAB(4, 4, 6, 3))
    expected = torch.stack([mab(block, a, b[m], 3) for a, b, m in zip(x, y, mask)])
    close(block(x, keep(*given) if masked else y, *given[1:]), expected)
    for make, formula in (
        (lambda: ISAB(4, 6, 2, 3), lambda model, x: isab(model, x, 2)),
        (lambda: PMA(4, 2), lambda model, x: pma(model, x, 2)),
        (lambda: DeepSets(4, 3, 8), deep_sets),
        (lambda: SetTransformer(4, 3, 8, 4, inducing=5), lambda m, x: set_transformer(m, x, 4)),
    ):
        model = with_large_weights(make())
        whole = isinstance(model, DeepSets | SetTransformer)  # these drop the padding themselves
        args = given if whole or not masked else (keep(*given), mask)
        out = model(*args)
        close(model(*(torch.stack([a] * 3, 1) for a in args)), torch.stack([out] * 3, 1))
        for i, here in enumerate(mask):
            found = out[i][here] if isinstance(model, ISAB) else out[i]
            close(found, formula(model, y[i, here]), 1e-8)


@pytest.mark.parametrize("make", [DeepSets, SetTransformer])
def test_nan_in_a_padded_point_reaches_no_gradient_of_a_baseline(make):
    model, x, mask = make(2, 3, 8).double(), torch.randn(2, 4, 2, dtype=F64), draw_mask((2, 4))
    loss = model(torch.where(mask[..., None], x, math.nan), mask).square().sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [*model.parameters()]))


def test_default_widths_are_those_of_the_papers_table():
    for field, widths in (
        (DeepSetsField(256), [512, 512, 256]),
        (AttentionField(2), [128, 128] * 3 + [2]),
        (ConcatSquashField(2), [512] * 9 + [2] * 3),  # linear, gate and shift of each layer
    ):
        layers = [part for part in field.modules() if isinstance(part, nn.Linear)]
        assert [layer.out_features for layer in layers] == widths
        assert field(0.5, torch.ones(3, field.dim)).shape == (3, field.dim)  # without a context
    assert AttentionField(2).heads == 4


@pytest.mark.parametrize(("make", "size"), [(DeepSets, 208_680), (SetTransformer, 1_148_456)])
def test_baselines_have_the_papers_number_of_parameters_and_dropout_in_training_only(make, size):
    model, x = make(3, 40), torch.randn(2, 5, 3)
    assert sum(p.numel() for p in model.parameters()) == size  # 0.21 M, 1.15 M
    assert not torch.equal(model(x), model(x))
    assert {part.p for part in model.modules() if isinstance(part, nn.Dropout)} == {0.5}
    assert torch.equal(model.eval()(x), model(x))


@all_fields
def test_time_context_and_the_other_points_count(name):
    field, x, z = build(name, time=True, context=2), *torch.randn(2, 4, 2, dtype=F64)
    moved = torch.cat([x[:1] + 3, x[1:]])
    for change in ({"t": 0.9}, {"context": z[1]}, *[{"x": moved}] * (name != "concatsquash")):
        base = Case(field, 0.3, x, None, z[0])
        assert (base(**change) - base())[1:].abs().min() > 1e-4
    close(
        field(torch.tensor([0.3, 0.9], dtype=F64), torch.stack([x, x]), context=z[:2])[1],
        base(t=0.9, context=z[1]),
    )
    if name == "concatsquash":
        close(base(x=moved)[1:], base()[1:], 0)


# ------------------------------------------------------------------------ order, traces, padding


@given(cases())
def test_fields_are_equivariant_and_their_traces_invariant(case):
    order = draw_order(case.x)
    to = {"x": shuffled(order, case.x), "mask": shuffled(order, case.mask, -1)}
    close(case(**to), shuffled(order, case()))
    close(case("value_and_trace", **to)[1], case("value_and_trace")[1])
    e = torch.randn(3, *case.x.shape, dtype=F64)
    rows = order.expand(3, *order.shape)
    close(
        case("value_and_jvp", shuffled(rows, e), **to)[1],
        shuffled(rows, case("value_and_jvp", e)[1]),
    )


@settings(max_examples=60)  # nine kinds of fields share them
@given(cases())
def test_traces_and_tangents_are_those_of_the_full_jacobian(case):
    jacobian = case.by_hand()
    dx, trace = case("value_and_trace")
    close((dx, trace), (case(), jacobian.diagonal().view(*case.x.shape[:-2], -1).sum(-1)))
    e = torch.randn(3, *case.x.shape, dtype=F64)
    dx, je = case("value_and_jvp", e)
    close((dx, je), (case(), (e.view(3, -1) @ jacobian.T).view_as(e)))


@all_fields
@settings(max_examples=4, phases=[Phase.generate])  # to shrink a failure takes minutes
@given(st.data())
def test_traces_and_tangents_have_right_gradients_in_x_context_and_every_parameter(name, data):
    case = data.draw(cases((name,), most=4, batches=((), (2,)), scale=1.0))
    x, params = case.x.requires_grad_(), [*case.field.parameters()]
    inputs = [x, *params] + ([] if case.context is None else [case.context.requires_grad_()])
    e = torch.randn(2, *x.shape, dtype=F64)

    def losses():
        dx, trace = case("value_and_trace")
        je = case("value_and_jvp", e)[1]
        return torch.stack([x.sum() for x in (case() ** 3, dx**2, trace, trace**2, e * je, je**2)])

    @torch.no_grad()
    def losses_after(h):  # all inputs moved along one direction, as gradcheck's fast mode does
        for x, v in zip(inputs, direction):
            x.add_(v, alpha=h)
        return losses()

    direction = [torch.randn_like(x) for x in inputs]
    grads = [torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in losses()]
    slopes = [sum((g * v).sum() for g, v in zip(gs, direction) if g is not None) for gs in grads]
    step = 1e-6  # short: a maximum that changes hands on the way has no slope
    difference = losses_after(step) - losses_after(-2 * step)
    close(torch.stack(slopes), difference / (2 * step), 1e-5)


@given(cases(batches=((1,), (3,), (2, 2))), GARBAGE)
def test_padded_point_changes_nothing_for_the_others_and_stays_where_it_is(case, value):
    mask = draw_mask(case.x.shape[:-1])
    e, found = torch.randn(2, *case.x.shape, dtype=F64), []
    for x in (case.x, filled(case.x, mask, value)):
        x = x.clone().requires_grad_()
        outputs = (
            case(x=x, mask=mask),
            *case("value_and_trace", x=x, mask=mask),
            *case("value_and_jvp", filled(e, mask, value), x=x, mask=mask),
        )
        assert not any(out[..., ~mask, :].any() for out in (*outputs[:2], *outputs[3:]))
        loss = sum(out.square().sum() for out in outputs)
        grads = torch.autograd.grad(loss, [x, *case.field.parameters()], allow_unused=True)
        assert not grads[0][~mask].any()
        found.append((outputs, grads))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@given(cases(batches=((3,), (2, 2))))
def test_padded_batch_is_its_sets_one_by_one(case):
    mask, batch = draw_mask(case.x.shape[:-1]), case.x.shape[:-2]
    t, e = (
        torch.as_tensor(case.t, dtype=F64).expand(batch),
        torch.randn(2, *case.x.shape, dtype=F64),
    )
    dx, trace = case("value_and_trace", mask=mask)
    je = case("value_and_jvp", e, mask=mask)[1]
    for i, here in one_by_one(mask):
        context = None if case.context is None else case.context[i]
        alone = Case(case.field, t[i], case.x[i][here], None, context)
        close(case(mask=mask)[i][here], alone())
        close((dx[i][here], trace[i]), alone("value_and_trace"))
        close((dx[i][here], je[:, *i][:, here]), alone("value_and_jvp", e[:, *i][:, here]))


def test_field_of_ones_own_needs_only_forward():
    class Pull(Field):
        """ẋᵢ = mean x − xᵢ, whose trace is d (1 − n)."""

        def forward(self, t, x, mask=None, context=None):
            x, _ = self.inputs(t, x, mask, context)
            return keep(pool_mean(x, mask) - x, mask)

    x, mask = torch.randn(3, 40, 2, dtype=F64), draw_mask((3, 40))  # 80 tangents: more than 64
    close(Pull(2).value_and_trace(0.0, x, mask)[1], 2 * (1 - mask.sum(-1)).to(F64))


@all_fields
def test_set_without_points_is_a_field_of_zeros(name):
    field, x, mask = (
        build(name),
        torch.randn(2, 3, 2, dtype=F64, requires_grad=True),
        torch.ones(2, 3),
    )
    case = Case(field, 0.3, x, mask.bool() & torch.tensor([[True], [False]]), None)
    results = (
        *case("value_and_trace"),
        case("value_and_jvp", torch.ones(1, 2, 3, 2, dtype=F64))[1][0],
    )
    assert not any(result[1].any() for result in (case(), *results))
    sum(result.sum() for result in (case(), *results)).backward()
    assert not x.grad[1].any()
    assert all(torch.isfinite(p.grad).all() for p in (x, *field.parameters()))


@pytest.mark.parametrize("name", ["max", "fast max"])
def test_lone_point_has_no_deviation_from_its_pool(name):
    field = build(name)
    dx, trace = field.value_and_trace(0, torch.randn(4, 1, 2, dtype=F64))
    close(dx, field.out.bias.expand(4, 1, 2))
    close(trace, torch.zeros(4, dtype=F64))


def norms(n, features=3):
    """PointNorms with the same weights, not ones and zeros."""
    ours = PointNorm(features).double()
    nn.init.normal_(ours.weight), nn.init.normal_(ours.bias)
    return [copy.deepcopy(ours) for _ in range(n)]


@given(SEEDS, st.integers(2, 6), GARBAGE)
def test_norm_in_training_is_that_of_the_points_that_exist(seed, n, value):
    torch.manual_seed(seed)
    (ours,), theirs = norms(1), nn.BatchNorm1d(3).double()
    theirs.load_state_dict(ours.state_dict())
    for _ in range(2):
        x, mask = torch.randn(2, 3, n, 3, dtype=F64, requires_grad=True), draw_mask((2, 3, n))
        y, expected = ours(filled(x, mask, value), mask)[mask], theirs(x[mask])
        close(y, expected)
        grads = (torch.autograd.grad(z.pow(3).sum(), (x, *m.parameters()))
                 for z, m in ((y, ours), (expected, theirs)))  # fmt: skip
        close(*grads, 1e-7)
    close(ours.state_dict(), theirs.state_dict())
    close(ours.train()(x), theirs.train()(x.view(-1, 3)).view_as(x))
    close(ours.eval()(x, mask)[mask], theirs.eval()(x[mask]))
    close(ours.state_dict(), theirs.state_dict())


@given(SEEDS, st.integers(1, 4), st.booleans())
def test_norm_whose_total_adds_a_second_process_is_that_of_both_batches(seed, n, masked):
    torch.manual_seed(seed)
    one, both = norms(2)
    x, mask = torch.randn(2, n, 3, dtype=F64), draw_mask((2, n)) if masked else None
    one.total = lambda sums: 2 * sums  # the other process has the same sets
    twice = (torch.cat([x, x]), torch.cat([mask, mask]) if masked else None)
    close(keep(one(x, mask), mask), keep(both(*twice)[:2], mask))
    close(one.state_dict(), both.state_dict())


# ------------------------------------------------------------------ devices, precisions, copies


class FakeCuda(TorchFunctionMode):
    """Beside FakeTensorMode: what a CPU build of torch refuses on CUDA, done by other means.

    Tensors on the host keep their values, as they do beside a real GPU; to read one of the GPU's
    raises, and so do two devices in one operation.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, on_gpu = kwargs or {}, lambda x: isinstance(x, Tensor) and x.device.type == "cuda"
        if func is Tensor.__setitem__:
            indexed(*args[:2]).add_(args[2])
            return None
        if func is Tensor.copy_:
            return args[0].add_(args[1])
        if func.__name__ == "gru":  # which has no fake kernel
            width = args[2][1].shape[1]
            return args[0].new_empty(*args[0].shape[:2], width), None
        if func is Tensor.new_tensor:
            return args[0].new_empty(len(args[1]))
        if func in (Tensor.__invert__, Tensor.contiguous):
            return args[0].clone()
        if func is Tensor.__getitem__ and on_gpu(args[0]):
            return indexed(*args)
        if func is Tensor.to and "cuda" in map(str, (getattr(a, "type", a) for a in args[1:])):
            dtype = next((a for a in args if isinstance(a, torch.dtype)), args[0].dtype)
            return torch.empty(args[0].shape, dtype=dtype, device="cuda")
        if any(map(on_gpu, tree_leaves((args, kwargs)))) or "cuda" in str(kwargs.get("device")):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def indexed(x, index):
    """x[index] by views and index_select."""
    index, axis = list(index) if isinstance(index, tuple) else [index], 0
    for at in [k for k, i in enumerate(index) if i is Ellipsis]:
        rest = x.dim() - sum(i is not None for i in index) + 1
        index[at : at + 1] = [slice(None)] * rest
    for i in index:
        if i is None:
            x = x.unsqueeze(axis)
        elif isinstance(i, Tensor):
            x = x.index_select(axis, i)
        elif isinstance(i, slice):
            start, stop, _ = i.indices(x.shape[axis])
            x = x.narrow(axis, start, stop - start)
        else:
            x, axis = x.select(axis, i), axis - 1
        axis += 1
    return x


def fake_cuda(module):
    """The module in evaluation, with its tensors on a GPU that is not there."""
    for part in module.eval().modules():
        for tensors in (part._parameters, part._buffers):
            for key, x in tensors.items():
                tensors[key] = (
                    x if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda")
                )
        if isinstance(part, nn.GRU):
            part._flat_weights = [getattr(part, key) for key in part._flat_weights_names]
    return module


def same_after_copies(module, run):
    """Whether copy.deepcopy and torch.save of the state keep what run(module) returns."""
    expected, file = run(module), io.BytesIO()
    close(run(copy.deepcopy(module)), expected, 0)
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert not torch.allclose(run(other)[0], expected[0])
    other.load_state_dict(torch.load(file, weights_only=True))
    close(run(other), expected, 0)


@all_fields
def test_fields_run_on_a_gpu_without_waiting_for_it_and_never_mix_devices(name):
    fields, on_host = [build(name).float() for _ in range(2)], torch.ones(2, 3, 2)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), FakeCuda():
        x, mask = torch.ones(2, 3, 2, device="cuda"), torch.ones(2, 3, device="cuda") > 0
        case = Case(fake_cuda(fields[0]), torch.ones((), device="cuda"), x, mask, None)
        e = torch.ones(4, 2, 3, 2, device="cuda")
        for out in (case(), case(t=0.3), *case("value_and_trace"), *case("value_and_jvp", e)):
            assert (out.device.type, out.dtype) == ("cuda", F32)
        with pytest.raises(RuntimeError, match="device"):
            case(x=on_host, mask=None)


@all_fields
@pytest.mark.parametrize("dtype", [F32, F64])
def test_precision_stays_and_copies_and_saved_states_give_the_same_values(name, dtype):
    exact, e = build(name, context=2), torch.randn(3, 2, 4, 2, dtype=F64)
    x, mask, z = torch.randn(2, 4, 2, dtype=F64), draw_mask((2, 4)), torch.randn(2, 2, dtype=F64)

    def run(field, dtype=dtype):
        case = Case(field, torch.tensor(0.3, dtype=F64), x.to(dtype), mask, z.to(dtype))
        return (case(), *case("value_and_trace"), *case("value_and_jvp", e.to(dtype)))

    field = copy.deepcopy(exact).to(dtype)
    assert {out.dtype for out in run(field)} == {dtype}
    close([out.double() for out in run(field)], [*run(exact, F64)], 2e-4 if dtype == F32 else 1e-12)
    same_after_copies(field, run)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("max", "eager"),
        ("concatsquash", "eager"),
        ("attention", "aot_eager"),
        ("fast max", "eager"),
        ("fast attention", "aot_eager"),
        ("transformer", "aot_eager"),
        ("max", "inductor"),
    ],
)
def test_compiled_field_gives_the_same_values(name, backend):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    field, x, mask = build(name), torch.randn(2, 4, 2, dtype=F64), draw_mask((2, 4))
    torch._dynamo.reset()
    with torch.set_grad_enabled(backend != "inductor"):
        compiled = torch.compile(field, backend=backend)
        close(compiled(torch.tensor(0.3, dtype=F64), x, mask), field(0.3, x, mask), 1e-12)


# -------------------------------------------------------------------------------------- bad input

X, M = torch.ones(2, 3, 2), torch.ones(2, 3, dtype=torch.bool)
BAD = [  # how it is called, and what the message says
    ({"x": torch.ones(2, 3, 4)}, r"x must be .*2\).*\(2, 3, 4\)"),
    ({"x": torch.ones(2)}, r"x must be .*not \(2,\)"),
    ({"x": torch.ones(2, 0, 2)}, r"x must .*at least one point.*\(2, 0, 2\)"),
    ({"mask": M[:, :2]}, r"mask must be .*\(2, 3\).*\(2, 2\)"),
    ({"mask": M[0]}, r"mask must be .*\(2, 3\).*\(3,\)"),
    ({"mask": M.float()}, "mask must be bool.*float32"),
    ({"context": torch.ones(2, 2)}, "context must .* 3 .*not 2"),
    ({"context": None}, "context must .* 3 "),
    ({"context": torch.ones(4, 3)}, r"context must .*\(4, 3\)"),
    ({"t": torch.ones(4)}, r"t must .*\(4,\)"),
]


@all_fields
@pytest.mark.parametrize(("wrong", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_input_is_a_value_error_that_names_it(name, wrong, says):
    good = {"t": torch.ones(2), "x": X, "mask": M, "context": torch.ones(2, 3)}
    field = build(name, time=True, context=3).float()
    e = torch.ones_like(wrong.get("x", X))[None]
    for method, more in {"__call__": (), "value_and_trace": (), "value_and_jvp": (e,)}.items():
        with pytest.raises(ValueError, match=says):
            Case(field, **good)(method, *more, **wrong)
    if "context" not in wrong:
        with pytest.raises(ValueError, match=r"context must .*0 .*3"):
            build(name).float()(0.0, X, context=torch.ones(2, 3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AttentionField(2, (8, 9), 4), "heads must divide the width 9.*4"),
        (lambda: AttentionField(2, 8, 0), "heads must .*0"),
        (lambda: SetTransformer(2, 3, 9, 4), "heads must divide the width 9.*4"),
        *[
            (lambda make=make, hidden=hidden: make(2, hidden), f"hidden must .*{says}")
            for make in (DeepSetsField, AttentionField, ConcatSquashField)
            for hidden, says in [(0, "0"), ((), r"\(\)"), ((8, -1), "-1"), ((8, 1.5), "1.5"),
                                 ("88", "8"), (None, "None"), (1.5, "1.5")]
        ],
        *[
            (lambda make=make, x=x, mask=mask: make(2, 3)(x, mask), says)
            for make in (DeepSets, SetTransformer)
            for x, mask, says in [
                (torch.ones(2, 3, 4), None, r"x must be .*\(2, 3, 4\)"),
                (torch.ones(2, 0, 2), None, "at least one point"),
                (X, M.float(), "mask must be bool"),
                (X * math.nan, None, "x must be finite"),
                (X, M & False, "mask must leave"),
                (torch.stack([X, X]), torch.stack([M, M]) & torch.tensor([[True], [False]]),
                 "mask must leave every set"),
            ]
        ],
    ],
)  # fmt: skip
def test_bad_settings_and_sets_are_value_errors_that_name_them(make, says):
    with pytest.raises(ValueError, match=says):
        make()
