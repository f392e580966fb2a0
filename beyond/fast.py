"""The fields of `sets.py`, faster: the same parameters and `state_dict` keys, the same values.

    FastAttentionField    tangents and exact trace in pieces, with a hand-written gradient; in
                          bfloat16 on a CPU its value a few sets at a time
    FastDeepSetsField     the maximum with a gradient that costs half

Shapes are those of `sets.py`. A gradient of x is called gx. A gradient that is to be differentiated
again (`create_graph=True`, torch.autograd.functional.jvp) comes from the plain formula.
"""

import math

import torch
from torch.nn import functional as F

from sets import (
    AttentionField,
    DeepSetsField,
    PointNetwork,
    attend,
    attend_with_tangents,
    keep,
    pool_max,
)

CACHED = 2**20  # attention weights in bfloat16 that stay in a core's cache


def differentiable_gradient(f, xs, gys):
    """gx for every x that requires it, y = f(*xs), by autograd: it can be differentiated again."""
    wanted = [x for x in xs if x.requires_grad]
    grads = iter(torch.autograd.grad(f(*xs), wanted, gys, create_graph=True))
    return [next(grads) if x.requires_grad else None for x in xs]


# -------------------------------------------------------------------------------- point networks


class TanhTangents(torch.autograd.Function):
    """y = tanh h and δy = s ⊙ δh,  s = 1 − y², keeping y and δy: two thirds of the memory.

    Backwards gδh = s ⊙ gδy and gh = s ⊙ gy − 2y ⊙ Σ δy ⊙ gδy, summed over the tangents.
    """

    @staticmethod
    def forward(ctx, h, dh):
        y = torch.tanh(h)
        dy = dh * slope_at(y)
        ctx.save_for_backward(y, dy)
        return y, dy

    @staticmethod
    def backward(ctx, gy, gdy):  # of steps that autograd can differentiate again
        y, dy = ctx.saved_tensors
        slope = slope_at(y)
        return torch.addcmul(slope * gy, y, (dy * gdy).sum(0), value=-2), slope * gdy


def slope_at(y):
    """1 − y² in one pass."""
    return torch.addcmul(torch.ones((), dtype=y.dtype, device=y.device), y, y, value=-1)


class FastPointNetwork(PointNetwork):
    tanh_with_tangents = staticmethod(TanhTangents.apply)


# --------------------------------------------------------------------------------------- attention


def fast_attend(q, k, v, mask=None):
    """`sets.attend`, in parts where that does not call torch's fused kernel."""
    in_parts = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    return (attend_in_parts if in_parts else attend)(q, k, v, mask)


def attend_in_parts(q, k, v, mask=None):
    """A few sets at a time, whose weights A stay in a core's cache.

    Split, not sliced as by `pieces`: autograd would add up a gradient of all sets for every slice.
    """
    shape, few = q.shape, max(CACHED // (q.shape[-3] * q.shape[-2] * k.shape[-2]), 1)
    parts = [x.reshape(-1, *x.shape[-3:]).split(few) for x in (q, k, v)]
    masks = [None] * len(parts[0]) if mask is None else mask.reshape(-1, mask.shape[-1]).split(few)
    return torch.cat([attend(*part) for part in zip(*parts, masks)]).view(*shape[:-1], -1)


def fast_attend_with_tangents(q, k, v, dq, dk, dv, mask=None, own=False):
    """`sets.attend_with_tangents` by AttentionTangents, which has one batch axis."""
    sets, root = math.prod(q.shape[:-3]), math.sqrt(q.shape[-1])
    mask = None if mask is None else mask.reshape(sets, -1)
    values = [x.reshape(sets, *x.shape[-3:]) for x in (q / root, k, v)]
    shape = len(dq), *q.shape  # tangents that all points share are of length 1 along their axes
    tangents = [x.expand(shape).reshape(len(x), *values[0].shape) for x in (dq / root, dk, dv)]
    r, dr = AttentionTangents.apply(OwnPairs if own else AllPairs, mask, *values, *tangents)
    return r.view(q.shape), dr.view(shape)


class FastAttentionField(AttentionField):
    """AttentionField, faster; in float32 its value is torch's fused attention anyway."""

    network = FastPointNetwork
    attend = staticmethod(fast_attend)
    attend_with_tangents = staticmethod(fast_attend_with_tangents)


class AllPairs:
    """The tangents of key and value j reach every point i."""

    @staticmethod
    def add_products(s, x, y):  # s + x yᵀ, in place
        return s.add_(x @ y.mT)

    @staticmethod
    def weigh(a, y):  # A y
        return a @ y


class OwnPairs:
    """The tangents of key and value j reach only point i = j."""

    @staticmethod
    def add_products(s, x, y):  # s + diag(x·y), in place
        s.diagonal(dim1=-2, dim2=-1).add_((x * y).sum(-1))
        return s

    @staticmethod
    def weigh(a, y):  # diag(A) y
        return a.diagonal(dim1=-2, dim2=-1)[..., None] * y


def centre(a, x):
    """⟨x⟩ᵢⱼ = xᵢⱼ − Σₗ Aᵢₗ xᵢₗ, in place."""
    return x.sub_((a * x).sum(-1, keepdim=True))


def weights(q, k, mask):
    """A = softmax(q kᵀ), with weight 0 on padded points."""
    s = q @ k.mT
    if mask is not None:
        s.masked_fill_(~mask[:, None, None, :], torch.finfo(s.dtype).min)
    return torch.softmax(s, -1)


class AttentionTangents(torch.autograd.Function):
    """A = softmax(q kᵀ), r = A v and, for every tangent, with ⟨x⟩ᵢⱼ = xᵢⱼ − Σₗ Aᵢₗ xᵢₗ

        δs = δq kᵀ + q δkᵀ,  δA = A ⊙ ⟨δs⟩,  δr = δA v + A δv.

    Backwards, for every tangent, with u = ⟨gδr vᵀ⟩ and gδs = A ⊙ u,

        gδq = gδs k,    gδk = gδsᵀ q,    gδv = Aᵀ gδr,    gA += u ⊙ ⟨δs⟩ + gδr δvᵀ,
        gq += gδs δk,   gk += gδsᵀ δq,   gv += δAᵀ gδr,

    up to what ⟨gA⟩ cancels, and in the end gs = A ⊙ ⟨gA + gr vᵀ⟩ as of any softmax.

    q, k, v are `(sets, heads, n, h)`, their tangents `(p, sets, heads, n, h)`; 1/√h is in q and δq.
    `pairs` says which points δk and δv reach. As many sets and heads go at a time as fit a cache,
    and nothing n × n is kept: to compute it again is cheaper than fresh memory.
    """

    @staticmethod
    def forward(ctx, pairs, mask, *xs):
        ctx.pairs = pairs
        ctx.save_for_backward(mask, *xs)
        r, dr = torch.empty_like(xs[0]), torch.empty_like(xs[3])
        for part, here in pieces(xs[0], mask):
            found = attention_tangents(pairs, here, *(x[part].contiguous() for x in xs))
            r[part], dr[part] = found
        return r, dr

    @staticmethod
    def backward(ctx, gr, gdr):
        mask, *xs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *differentiable_gradient(plainly(ctx.pairs, mask), xs, (gr, gdr))
        grads = [torch.empty_like(x) for x in xs]
        for part, here in pieces(xs[0], mask):
            given = (x[part].contiguous() for x in (*xs, gr, gdr))
            for grad, found in zip(grads, attention_gradients(ctx.pairs, here, *given)):
                grad[part] = found
        return None, None, *grads


def plainly(pairs, mask):
    """The same function of q, k, v, δq, δk, δv by the plain formula."""

    def f(q, k, v, dq, dk, dv):
        root = math.sqrt(q.shape[-1])
        return attend_with_tangents(root * q, k, v, root * dq, dk, dv, mask, pairs is OwnPairs)

    return f


def pieces(q, mask):
    """Indices of some sets and heads whose n × n matrices fit a cache, and the mask of the sets."""
    sets, heads, n, _ = q.shape
    fit = max(1, (2**19 if q.device.type == "cpu" else 2**28) // n**2)  # a cache, a GPU's memory
    for i in range(0, sets, max(1, fit // heads)):
        some = slice(i, i + max(1, fit // heads))
        for j in range(0, heads, fit):
            part = (..., some, slice(j, j + fit), slice(None), slice(None))
            yield part, None if mask is None else mask[some]


def attention_tangents(pairs, mask, q, k, v, dq, dk, dv):
    """r and δr of one piece."""
    a, dr = weights(q, k, mask), []
    for dqa, dka, dva in zip(dq, dk, dv):
        da = centre(a, pairs.add_products(dqa @ k.mT, q, dka)).mul_(a)
        dr.append((da @ v).add_(pairs.weigh(a, dva)))
    return a @ v, torch.stack(dr)


def attention_gradients(pairs, mask, q, k, v, dq, dk, dv, gr, gdr):
    """gq, gk, gv, gδq, gδk, gδv of one piece."""
    a = weights(q, k, mask)
    ga, gq, gk, gv, tangents = gr @ v.mT, 0, 0, a.mT @ gr, []
    for dqa, dka, dva, g in zip(dq, dk, dv, gdr):
        ds = centre(a, pairs.add_products(dqa @ k.mT, q, dka))
        u = centre(a, g @ v.mT)
        ga = pairs.add_products(ga.addcmul_(u, ds), g, dva)
        da, gds = ds.mul_(a), u.mul_(a)
        gq, gk, gv = gq + pairs.weigh(gds, dka), gk + gds.mT @ dqa, gv + da.mT @ g
        tangents.append((gds @ k, pairs.weigh(gds.mT, q), pairs.weigh(a.mT, g)))
    gs = centre(a, ga).mul_(a)
    gdq, gdk, gdv = (torch.stack(parts) for parts in zip(*tangents))
    return gq + gs @ k, gk + gs.mT @ q, gv, gdq, gdk, gdv


# ---------------------------------------------------------------------------------------- deep sets


class FastDeepSetsField(DeepSetsField):
    """DeepSetsField whose last layer, maximum and output are one function, BelowMax."""

    def forward(self, t, x, mask=None, context=None):
        *before, last = self.network.layers
        if not before:
            return super().forward(t, x, mask, context)
        x, extra = self.inputs(t, x, mask, context)
        h = self.network.first(x, extra)
        for layer in before[1:]:
            h = layer(torch.tanh(h))
        y = torch.tanh(h)
        given = (a.to(y.dtype) for a in (last.weight, last.bias, self.out.weight))  # of an autocast
        return keep(BelowMax.apply(mask, y, *given) + self.out.bias, mask)


def below_max(y, inner, outer, mask=None):
    """W (hᵢ − maxⱼ hⱼ),  h = V y, and where the maximum is attained; a bias of h would cancel."""
    h = y @ inner.T
    top, index = pool_max(h, mask)
    return (h - top) @ outer.T, top, index


class BelowMax(torch.autograd.Function):
    """f = W (hᵢ − maxⱼ hⱼ),  h = V y, without ever forming gh: with G = Σᵢ gfᵢ yᵢᵀ

        gy = (W V)ᵀ gf,   gV = Wᵀ G,   gW = G Vᵀ − Σ_sets (Σᵢ gfᵢ) (max h)ᵀ,   gb = 0,

    and the maximum of a feature takes −Wᵀ Σᵢ gfᵢ from the one point that attains it.
    """

    @staticmethod
    def forward(ctx, mask, y, inner, bias, outer):
        f, top, index = below_max(y, inner, outer, mask)
        ctx.save_for_backward(mask, y, inner, outer, top, index)
        return f

    @staticmethod
    def backward(ctx, g):
        mask, *xs, top, index = ctx.saved_tensors
        if torch.is_grad_enabled():
            gy, ginner, gouter = differentiable_gradient(lambda *xs: below_max(*xs, mask)[0], xs, g)
        else:
            gy, ginner, gouter = below_max_gradients(*xs, top, index, g)
        return None, gy, ginner, g.new_zeros(len(xs[1])), gouter


def below_max_gradients(y, inner, outer, top, index, g):
    """gy, gV, gW."""
    n, shape = y.shape[-2], y.shape
    total = g.sum(-2).view(-1, len(outer))  # (sets, d)
    y, g, top, index = (a.flatten(0, -2) for a in (y, g, top, index))  # (sets n, ·), (sets, ·)
    product, back = g.T @ y, -total @ outer
    gy = g @ (outer @ inner) + sum_by_point(inner, index, back, n)
    ginner = outer.T @ product + sum_by_feature(y, index, back, n)
    gouter = product @ inner.T - total.T @ top
    return gy.view(shape), ginner, gouter


def sum_by_feature(y, index, back, n):
    """Σ_sets back · y of the point that attains the maximum: a row for every feature."""
    rows = index + n * torch.arange(len(index), device=index.device)[:, None]  # of all sets' points
    weights = back.T.contiguous()
    return F.embedding_bag(rows.T.contiguous(), y, mode="sum", per_sample_weights=weights)


def sum_by_point(inner, index, back, n):
    """Σ back · V over the features whose maximum a point attains: a row for every point."""
    sets, features = index.shape
    attained, order = index.sort()  # features by the point that attains them, set by set
    points = torch.arange(n, device=index.device).expand(sets, n).contiguous()
    starts = torch.arange(sets, device=index.device)[:, None] * features
    first = torch.searchsorted(attained, points) + starts  # where each point's features begin
    weights = back.gather(-1, order).flatten()
    order, first = order.flatten(), first.flatten()
    return F.embedding_bag(order, inner, first, mode="sum", per_sample_weights=weights)
