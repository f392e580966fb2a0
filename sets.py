"""Permutation-equivariant vector fields on sets, their exact traces, and discrete baselines.

    paper                                                  here
    ---------------------------------------------------    -----------------------------------
    Sec. 4.1, f(x) = σ(λIx + γ pool(x)); Table 3, FC ...   DeepSetsField
    Sec. 4.1, self-attention; Table 3, K, Q, V             AttentionField
    App. C.3, CCS(x, z, t); Table 3, Concatsquash × 4      ConcatSquashField
    Eq. 5, 9, Tr(∂f/∂z)                                    Field.value_and_trace
    Table 1, DeepSets and Set Transformer                  DeepSets, SetTransformer

x is `(..., n, d)`: a set of n points, leading axes are batch. mask is `(..., n)`, True where a
point exists; a padded point changes nothing for the others and does not move. t is 0-dim, or has
the batch axes. context is `(..., c)`, one vector per set.

Departures from the paper:
  - Traces are exact. For point i only ∂fᵢ/∂xᵢ counts, and it follows from d tangents per point:
    push the d unit vectors through the per-point networks, let the query's tangent act on every
    key, and the key's and value's only on their own (`AttentionField.value_and_trace`).
  - `time=True` feeds t to the first layers; the authors' fields ignore it. `context` likewise.
  - DeepSetsField has λ = 1 and γ = −1 on hidden features and no outer σ, as in the authors' code.
  - ConcatSquash has a bias in its gate and none in its shift, as in the authors' code; the text can
    be read so, Table 3 has it the other way round.
"""

import math
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# ----------------------------------------------------------------------------------- small parts


class Tanh(torch.autograd.Function):
    """y = tanh x and its slope 1 − y².

    On a CPU in float32, tanh x = 2σ(2x) − 1 takes a third of the time of torch.tanh.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        fast = x.dtype == torch.float32 and x.device.type == "cpu"
        y = (2 * x).sigmoid_().mul_(2).sub_(1) if fast else torch.tanh(x)
        return y, slope_at(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, gy, gs):  # dy = s dx and ds = −2y dy
        (y,) = ctx.saved_tensors
        g = gy if gs is None else -2 * y * gs if gy is None else torch.addcmul(gy, y, gs, value=-2)
        return None if g is None else g * slope_at(y)

    @staticmethod
    def jvp(ctx, dx):
        (y,) = ctx.saved_tensors
        dy = dx * slope_at(y)
        return dy, -2 * y * dy


def slope_at(y):
    """1 − y² in one pass."""
    return torch.addcmul(torch.ones((), dtype=y.dtype, device=y.device), y, y, value=-1)


class TanhTangent(torch.autograd.Function):
    """y = tanh h and its tangents δy = s ⊙ δh, s = 1 − y²; δh is `(..., p, w)`. Keeps y and δy."""

    @staticmethod
    def forward(ctx, h, dh):
        y, slope = Tanh.forward(h)
        dy = dh * slope[..., None, :]
        ctx.save_for_backward(y, dy)
        return y, dy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, gd):  # s ⊙ g − 2y ⊙ Σ δy ⊙ gδ and s ⊙ gδ
        y, dy = ctx.saved_tensors
        s = slope_at(y)
        dot = (dy * gd).sum(-2) if gd.shape[-2] > 1 else (dy * gd)[..., 0, :]
        gd = gd * s[..., None, :]
        return s.mul_(g).addcmul_(y, dot, value=-2), gd


def tanh(x):
    return Tanh.apply(x)[0]


def widths(hidden):
    """Hidden widths as a tuple; one number stands for two layers of that width."""
    sizes = (hidden, hidden) if isinstance(hidden, int) else hidden
    right = isinstance(sizes, tuple | list) and sizes
    if not right or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"hidden must be positive widths such as (128, 128), not {hidden!r}")
    return tuple(sizes)


def check_heads(heads, width):
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    if heads < 1 or width % heads:
        raise ValueError(f"heads must divide the width {width}, but is {heads}")


def check_set(x, dim, mask=None):
    """Raise a ValueError unless x is (..., n, dim) with n > 0 and mask, if any, fits it."""
    if x.dim() < 2 or x.shape[-1] != dim:
        raise ValueError(f"x must be (..., points, {dim}), not {tuple(x.shape)}")
    if x.shape[-2] == 0:
        raise ValueError(f"x must hold at least one point per set, but is {tuple(x.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
        raise ValueError(
            f"mask must be bool of shape {tuple(x.shape[:-1])}, True where a point exists, "
            f"not {mask.dtype} of shape {tuple(mask.shape)}"
        )


def check_values(x, mask=None):
    """Raise a ValueError for NaN, infinity or a set without points; a GPU would have to wait."""
    if x.device.type != "cpu":
        return
    if mask is not None and not mask.any(-1).all():
        raise ValueError("mask must leave every set at least one point, but some have none")
    if not torch.isfinite(keep(x, mask)).all():
        raise ValueError("x must be finite, but holds NaN or infinity")


def keep(x, mask, other=0):
    """x where a point exists, `other` elsewhere."""
    return x if mask is None else torch.where(mask[..., None], x, other)


def split_heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)  # (..., heads, n, width / heads)


def merge_heads(x):
    return x.transpose(-2, -3).flatten(-2)


def attend(q, k, v, mask=None):
    """softmax(q kᵀ / √h) v over the points that exist; over all in a set without points."""
    if mask is not None:
        mask = (mask | ~mask.any(-1, keepdim=True))[..., None, None, :]
    return F.scaled_dot_product_attention(q, k, v, mask)


def attention_weights(q, k, mask=None):
    """A = softmax(q kᵀ / √h), with weight 0 on padded points."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask[..., None, None, :], torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1)


def thin(x, weight, bias=None):
    """W x + b for few inputs. W stored by columns makes the gradients five to ten times as fast."""
    return F.linear(x, weight.T.contiguous().T, bias)


class PointNetwork(nn.Module):
    """Linear, tanh, Linear, …: one network for every point. The first layer also sees (t, context).

    `with_tangents` returns J e beside the value, for p tangents e `(..., n, p, d)` per point, or
    for the d unit vectors if e is None.
    """

    def __init__(self, dim, hidden, extra=0):
        super().__init__()
        sizes = (dim, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.extra = nn.Linear(extra, hidden[0], bias=False) if extra else None

    def first(self, x, extra):
        h = thin(x, self.layers[0].weight, self.layers[0].bias)
        return h if extra is None else h + self.extra(extra)

    def forward(self, x, extra=None):
        if len(self.layers) == 1:
            return self.first(x, extra)
        return self.layers[-1](self.before_last(x, extra))

    def before_last(self, x, extra=None):
        """What the last of several layers reads."""
        h = tanh(self.first(x, extra))
        for layer in self.layers[1:-1]:
            h = tanh(layer(h))
        return h

    def with_tangents(self, x, extra=None, e=None):
        first, *rest = self.layers
        h, dh = self.first(x, extra), first.weight.T if e is None else thin(e, first.weight)
        for layer in rest:
            if dh.dim() == 2:  # unit vectors: W (s ⊙ δ) = (W ⊙ δ) s, one product for all points
                y, slope = Tanh.apply(h)
                weight = (layer.weight * dh[:, None]).flatten(0, 1)  # (d w', w)
                dh = F.linear(slope, weight).unflatten(-1, (len(dh), -1))
            else:
                y, dy = TanhTangent.apply(h, dh)
                dh = dy @ layer.weight.T
            h = layer(y)
        return h, dh.expand(*x.shape[:-1], *dh.shape[-2:])


def pool_max(h, mask=None):
    """max over the points that exist and the index that attains it, `(..., 1, w)` each."""
    if mask is not None:
        h = h.masked_fill(~mask[..., None], torch.finfo(h.dtype).min)
    return h.max(-2, keepdim=True)


def pool_mean(h, mask=None):
    if mask is None:
        return h.mean(-2, keepdim=True)
    return keep(h, mask).sum(-2, keepdim=True) / count(h, mask)[..., None, None]


def count(x, mask=None):
    """How many points each set has, at least 1, in x's precision."""
    if mask is None:
        return torch.full(x.shape[:-2], x.shape[-2], dtype=x.dtype, device=x.device)
    return mask.sum(-1).clamp(min=1).to(x.dtype)


class PointNorm(nn.BatchNorm1d):
    """Batch normalisation over all points of all sets, padded ones left out."""

    total = None  # sums statistics over processes, where several train together

    def forward(self, x, mask=None):
        if not self.training or (mask is None and self.total is None):
            return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)
        return normalise(self, x, mask, self.total or (lambda x: x))


def normalise(norm, x, mask=None, total=lambda x: x):
    """Batch normalisation in training, over points that exist; `total` sums over processes."""
    there, axes = keep(torch.ones_like(x[..., :1]), mask), tuple(range(x.dim() - 1))
    n = total(there.sum())
    mean = total((there * x).sum(axes)) / n
    var = total((there * (x - mean) ** 2).sum(axes)) / n
    with torch.no_grad():
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(var * n / (n - 1).clamp(min=1), norm.momentum)
    return (x - mean) * torch.rsqrt(var + norm.eps) * norm.weight + norm.bias


# ---------------------------------------------------------------------------------------- fields


class Field(nn.Module):
    """dx = f(t, x), equivariant in the points of x."""

    def __init__(self, dim, time=False, context=0):
        super().__init__()
        self.dim, self.time, self.context = dim, time, context

    def enter(self, t, x, mask, context):
        """x without its padding, and (t, context) as `(..., 1, time + c)` for the first layers."""
        self.check(t, x, mask, context)
        extra = [] if context is None else [context[..., None, :]]
        if self.time:
            t = torch.as_tensor(t, dtype=x.dtype, device=x.device)
            extra.insert(0, t.expand(x.shape[:-2])[..., None, None])
        return keep(x, mask), torch.cat(extra, -1) if extra else None

    def check(self, t, x, mask, context):
        check_set(x, self.dim, mask)
        batch, given = tuple(x.shape[:-2]), 0 if context is None else context.shape[-1]
        if given != self.context:
            raise ValueError(f"context must have {self.context} numbers per set, not {given}")
        if given and context.shape[:-1] != batch:
            wanted = (*batch, given)
            raise ValueError(f"context must have the shape {wanted}, not {tuple(context.shape)}")
        if isinstance(t, torch.Tensor) and t.dim() and tuple(t.shape) != batch:
            raise ValueError(f"t must be a number or of shape {batch}, not {tuple(t.shape)}")

    def value_and_jvp(self, t, x, e, mask=None, context=None):
        """f and J e for tangents e `(p, ..., n, d)`; by forward-mode differentiation."""
        self.check(t, x, mask, context)

        def push(e):
            return torch.func.jvp(lambda x: self(t, x, mask, context), (x,), (e,))

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward mode
            return torch.func.vmap(push, out_dims=(None, 0))(keep(e, mask))

    def value_and_trace(self, t, x, mask=None, context=None):
        """f and tr ∂f/∂x per set, from n·d tangents, 64 at a time."""
        self.check(t, x, mask, context)
        n, d = x.shape[-2:]
        trace, basis = 0, torch.eye(n * d, dtype=x.dtype, device=x.device).view(n * d, n, d)
        for e in basis.split(64):
            e = e.view(len(e), *[1] * (x.dim() - 2), n, d).expand(len(e), *x.shape)
            dx, je = self.value_and_jvp(t, x, e, mask, context)
            trace = trace + (e * je).sum((0, -2, -1))
        return dx, trace


class DeepSetsField(Field):
    """f(x)ᵢ = W (hᵢ − poolⱼ hⱼ),  h = network(x)."""

    def __init__(self, dim, hidden=512, pool="max", time=False, context=0):
        super().__init__(dim, time, context)
        if pool not in ("max", "mean"):
            raise ValueError(f"pool must be 'max' or 'mean', not {pool!r}")
        hidden, self.pool = widths(hidden), pool
        self.network = PointNetwork(dim, hidden, time + context)
        self.out = nn.Linear(hidden[-1], dim)

    def forward(self, t, x, mask=None, context=None):
        x, extra = self.enter(t, x, mask, context)
        if self.pool == "max" and len(self.network.layers) > 1:
            y, last = self.network.before_last(x, extra), self.network.layers[-1]
            f = BelowMax.apply(y, last.weight, last.bias, self.out.weight, mask) + self.out.bias
        else:
            h = self.network(x, extra)
            f = self.out(h - self.pooled(h, mask)[0])
        return keep(f, mask)

    def pooled(self, h, mask):
        """pool h, and for the maximum where it is attained."""
        return (pool_mean(h, mask), None) if self.pool == "mean" else pool_max(h, mask)

    def value_and_jvp(self, t, x, e, mask=None, context=None):
        """f and W (δhᵢ − pool δh), that of the maximum where it is attained."""
        x, extra = self.enter(t, x, mask, context)
        h, dh = self.network.with_tangents(x, extra, keep(e, mask).movedim(0, -2))
        dh = dh.movedim(-2, 0)
        top, index = self.pooled(h, mask)
        dtop = pool_mean(dh, mask) if index is None else dh.take_along_dim(index[None], -2)
        return keep(self.out(h - top), mask), keep((dh - dtop) @ self.out.weight.T, mask)

    def value_and_trace(self, t, x, mask=None, context=None):
        """δfᵢ = W (δhᵢ − [i attains the maximum] δhᵢ), or W (1 − 1/n) δhᵢ for the mean."""
        x, extra = self.enter(t, x, mask, context)
        h, dh = self.network.with_tangents(x, extra)
        dh = keep((dh * self.out.weight).sum(-2), mask)  # (..., n, w): Σₐ Wₐ δₐh
        trace = dh.sum((-2, -1))
        top, index = self.pooled(h, mask)
        if index is None:
            trace = trace * (1 - 1 / count(x, mask))
        else:
            trace = trace - dh.gather(-2, index).sum((-2, -1))
        return keep(self.out(h - top), mask), trace


class BelowMax(torch.autograd.Function):
    """W (hᵢ − maxⱼ hⱼ),  h = V y + b, with a gradient that costs half: with G = Σᵢ gᵢ yᵢᵀ,

    ∂y = (W V)ᵀ g,  ∂V = Wᵀ G,  ∂W = G Vᵀ + Σ_sets (Σᵢ gᵢ) (b − max h)ᵀ,  ∂b = 0,  and what the
    maximum gives back, −Wᵀ Σᵢ gᵢ, goes to one point per set and feature: rows of y and V, in bags.
    """

    @staticmethod
    def forward(ctx, y, inner, bias, outer, mask=None):
        h = F.linear(y, inner, bias)
        top, index = pool_max(h, mask)
        ctx.save_for_backward(y, inner, bias, outer, top, index)
        return (h - top) @ outer.T

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        y, inner, bias, outer, top, index = ctx.saved_tensors
        shape, n, features = y.shape, y.shape[-2], len(inner)
        y, g, top, index = (a.flatten(0, -2) for a in (y, g, top, index))
        total = g.unflatten(0, (-1, n)).sum(-2)  # (sets, d)
        product, back = g.T @ y, -total @ outer
        gy, ginner = g @ (outer @ inner), outer.T @ product
        gouter = product @ inner.T + total.T @ (bias - top)

        sets = torch.arange(len(index), device=index.device)[:, None]
        bag = partial(F.embedding_bag, mode="sum")
        ginner += bag((index + n * sets).T.contiguous(), y, per_sample_weights=back.T.contiguous())
        index, order = index.sort()  # features by the point that attains them, set by set
        points = torch.arange(n, device=index.device).repeat(len(index), 1)
        first = torch.searchsorted(index, points) + features * sets
        weights = back.gather(-1, order).flatten()
        gy += bag(order.flatten(), inner, first.flatten(), per_sample_weights=weights)
        return gy.view(shape), ginner, torch.zeros_like(bias), gouter, None


class AttentionField(Field):
    """f(x) = W tanh(q + softmax(q kᵀ / √h) v),  q, k, v = three networks of x, in several heads."""

    def __init__(self, dim, hidden=128, heads=4, time=False, context=0):
        super().__init__(dim, time, context)
        hidden, self.heads = widths(hidden), heads
        check_heads(heads, hidden[-1])
        self.q, self.k, self.v = (PointNetwork(dim, hidden, time + context) for _ in range(3))
        self.out = nn.Linear(hidden[-1], dim)

    def forward(self, t, x, mask=None, context=None):
        x, extra = self.enter(t, x, mask, context)
        q, k, v = (split_heads(net(x, extra), self.heads) for net in (self.q, self.k, self.v))
        return keep(self.out(tanh(merge_heads(q + attend(q, k, v, mask)))), mask)

    def value_and_jvp(self, t, x, e, mask=None, context=None):
        """f and W (slope ⊙ (δq + δr)), where r = A v."""
        x, extra = self.enter(t, x, mask, context)
        e = keep(e, mask).movedim(0, -2)
        pairs = [net.with_tangents(x, extra, e) for net in (self.q, self.k, self.v)]
        (q, k, v), (dq, dk, dv) = zip(*pairs)
        r, dr = by_head(AttentionJvp, self.heads, mask, (q, dq), q, k, v, dq, dk, dv)
        y, slope = Tanh.apply(q + r)
        df = ((dq + dr) * slope[..., None, :]) @ self.out.weight.T
        return keep(self.out(y), mask), keep(df.movedim(-2, 0), mask)

    def value_and_trace(self, t, x, mask=None, context=None):
        """f and tr ∂f/∂x from the d unit vectors of each point i: δk and δv are 0 but at j = i."""
        x, extra = self.enter(t, x, mask, context)
        pairs = [net.with_tangents(x, extra) for net in (self.q, self.k, self.v)]
        (q, k, v), (dq, dk, dv) = zip(*pairs)
        weight = self.out.weight.expand(*x.shape[:-2], 1, -1, -1)
        outs = q, q[..., : self.heads]  # of the shapes of y and of a trace for each head
        y, trace = by_head(AttentionTrace, self.heads, mask, outs, q, k, v, dq, dk, dv, weight)
        return keep(self.out(y), mask), keep(trace, mask).sum((-2, -1))


def centred(a, x):
    """xᵢⱼ − Σₗ Aᵢₗ xᵢₗ, in place."""
    return x.sub_((a * x).sum(-1, keepdim=True))


class AttentionJvp:
    """r = A v and δr = δA v + A δv, δA = A (δs − Σ A δs), δs = (δq kᵀ + q δkᵀ)/√h."""

    @staticmethod
    def tangents(*xs):
        """Each tangent's parts of xs `(..., p, h)`, copied once for all products that read them."""
        return zip(*(x.movedim(-2, 0).contiguous() for x in xs))

    @staticmethod
    def value(mask, q, k, v, dq, dk, dv):
        a, scale = attention_weights(q, k, mask), 1 / math.sqrt(q.shape[-1])
        dr = []
        for qi, ki, vi in AttentionJvp.tangents(dq, dk, dv):
            da = centred(a, (qi @ k.mT).add_(q @ ki.mT).mul_(scale)).mul_(a)
            dr.append((da @ v).add_(a @ vi))
        return a @ v, torch.stack(dr, -2)

    @staticmethod
    def gradient(mask, q, k, v, dq, dk, dv, g, gd):
        a, scale = attention_weights(q, k, mask), 1 / math.sqrt(q.shape[-1])
        ga, gq, gk, gv, grads = g @ v.mT, torch.zeros_like(q), torch.zeros_like(k), a.mT @ g, []
        for qi, ki, vi, gi in AttentionJvp.tangents(dq, dk, dv, gd):
            ds = centred(a, (qi @ k.mT).add_(q @ ki.mT).mul_(scale))
            gda = centred(a, gi @ v.mT)
            ga += gi @ vi.mT
            ga.addcmul_(gda, ds)
            da, gds = ds.mul_(a), gda.mul_(a).mul_(scale)
            gq += gds @ ki
            gk += gds.mT @ qi
            gv += da.mT @ gi
            grads.append((gds @ k, gds.mT @ q, a.mT @ gi))
        gs = centred(a, ga).mul_(a).mul_(scale)
        gdq, gdk, gdv = (torch.stack(x, -2) for x in zip(*grads))
        return gq + gs @ k, gk + gs.mT @ q, gv, gdq, gdk, gdv


class AttentionTrace:
    """y = tanh r, r = q + A v, and Σₐ cₐᵢ·δₐrᵢ for every point i, where cₐ = Wₐ ⊙ slope = ∂fₐ/∂r,

    δsᵢⱼ = (δqᵢ·kⱼ + [i=j] qᵢ·δkᵢ)/√h,  δAᵢⱼ = Aᵢⱼ (δsᵢⱼ − Σₗ Aᵢₗ δsᵢₗ),
    δrᵢ = δqᵢ + Σⱼ δAᵢⱼ vⱼ + Aᵢᵢ δvᵢ   for tangent a of point i.
    """

    @staticmethod
    def pairs(a, slope, q, k, v, dq, dk, dv, weight):
        """For each tangent: W, c, its δq, δk, δv, c·vⱼ and the centred δsᵢⱼ."""
        scale = 1 / math.sqrt(q.shape[-1])
        for w, qi, ki, vi in zip(*(x.unbind(-2) for x in (weight, dq, dk, dv))):
            c, ds = w * slope, scale * qi @ k.mT
            ds.diagonal(dim1=-2, dim2=-1).add_((q * ki).sum(-1), alpha=scale)
            yield w, c, qi, ki, vi, c @ v.mT, centred(a, ds)

    @staticmethod
    def value(mask, q, k, v, dq, dk, dv, weight):
        a = attention_weights(q, k, mask)
        y, slope = Tanh.forward(q + a @ v)
        own, trace = a.diagonal(dim1=-2, dim2=-1)[..., None], 0
        terms = AttentionTrace.pairs(a, slope, q, k, v, dq, dk, dv, weight)
        for _, c, dqa, _, dva, p, ds in terms:
            local = torch.addcmul(dqa, own, dva).mul_(c).sum(-1, keepdim=True)
            trace = trace + local + p.mul_(ds).mul_(a).sum(-1, keepdim=True)
        return y, trace

    @staticmethod
    def gradient(mask, q, k, v, dq, dk, dv, weight, g, gt):
        a, scale = attention_weights(q, k, mask), 1 / math.sqrt(q.shape[-1])
        y, slope = Tanh.forward(q + a @ v)
        at, own = gt * a, gt * a.diagonal(dim1=-2, dim2=-1)[..., None]
        ga, gq, gk, gv, gslope = map(torch.zeros_like, (a, q, k, v, q))
        terms, grads = AttentionTrace.pairs(a, slope, q, k, v, dq, dk, dv, weight), []
        for w, c, dqa, dka, dva, p, ds in terms:
            centred(a, p)
            ga.addcmul_(p, ds)
            ga.diagonal(dim1=-2, dim2=-1).add_((c * dva).sum(-1))
            gp, gs = ds.mul_(at), p.mul_(at).mul_(scale)
            own_s = gs.diagonal(dim1=-2, dim2=-1)[..., None]
            gc = (gp @ v).addcmul_(gt, dqa).addcmul_(own, dva)
            gv += gp.mT @ c
            gk += gs.mT @ dqa
            gq.addcmul_(own_s, dka)
            gslope.addcmul_(gc, w)
            gw = (gc * slope).sum(-2, keepdim=True)
            grads.append(((gs @ k).addcmul_(gt, c), own_s * q, own * c, gw))
        go = gslope.mul_(y).mul_(-2).add_(g).mul_(slope)
        gs = centred(a, ga.mul_(gt).add_(go @ v.mT)).mul_(a).mul_(scale)
        gdq, gdk, gdv, gw = (torch.stack(x, -2) for x in zip(*grads))
        return gq + go + gs @ k, gk + gs.mT @ q, gv + a.mT @ go, gdq, gdk, gdv, gw


def by_head(f, heads, mask, likes, *xs):
    """f.value of xs `(..., n, [p,] w)`, head by head; the results have the shapes of likes."""
    batch = xs[0].dim() - 2
    sets = math.prod(xs[0].shape[:batch])

    def split(x):  # (sets, n, [p,] heads, w / heads)
        return (sets, *x.shape[batch:-1], heads, x.shape[-1] // heads)

    mask = None if mask is None else mask.reshape(sets, -1)
    ys = ByHead.apply(f, mask, [split(y) for y in likes], *(x.reshape(split(x)) for x in xs))
    return [y.view(like.shape) for y, like in zip(ys, likes)]


def packed(x):
    """A contiguous copy of what matrix products read: q, k and v, but no stack of tangents."""
    return x.contiguous() if x.dim() == 4 else x


class ByHead(torch.autograd.Function):
    """f.value, and f.gradient on the way back, of as many sets and heads at a time as fit a cache.

    Nothing n × n is kept: f.gradient computes it again, which is cheaper than fresh memory.
    """

    @staticmethod
    def pieces(mask, *lists):
        """Parts `(b, heads, n, [p,] h)` of each tensor `(sets, n, [p,] heads, h)`."""
        sets, n, heads, _ = lists[0][0].shape
        fit = 2**19 if lists[0][0].device.type == "cpu" else 2**28  # a cache, or a GPU's memory
        few, size = max(1, min(heads, fit // n**2)), max(1, fit // (heads * n**2))
        for i in range(0, sets, size):
            for j in range(0, heads, few):
                part = slice(i, i + size), ..., slice(j, j + few), slice(None)
                yield (
                    None if mask is None else mask[i : i + size],
                    *([x[part].movedim(-2, 1) for x in xs] for xs in lists),
                )

    @staticmethod
    def forward(ctx, f, mask, shapes, *xs):
        ctx.f = f
        ctx.save_for_backward(mask, *xs)
        ys = [xs[0].new_empty(shape) for shape in shapes]
        for m, x, y in ByHead.pieces(mask, xs, ys):
            for to, part in zip(y, f.value(m, *map(packed, x))):
                to.copy_(part)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gs):
        mask, *xs = ctx.saved_tensors
        grads = [x.new_empty(x.shape) for x in xs]
        for m, x, grad in ByHead.pieces(mask, (*xs, *gs), grads):
            for to, part in zip(grad, ctx.f.gradient(m, *map(packed, x))):
                to.copy_(part)
        return None, None, None, *grads


class ConcatSquash(nn.Module):
    """CCS(x, z, t) = (W x + b) σ(W_g (t, z) + b_g) + W_s (t, z)."""

    def __init__(self, inputs, outputs, extra):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.gate = nn.Linear(extra, outputs)
        self.shift = nn.Linear(extra, outputs, bias=False)

    def forward(self, x, extra):
        """The value, and the gate that its tangents share."""
        gate = torch.sigmoid(self.gate(extra))
        return self.linear(x) * gate + self.shift(extra), gate


class ConcatSquashField(Field):
    """Four concat-squash layers with tanh between: each point moves by itself, given t and z."""

    def __init__(self, dim, hidden=(512, 512, 512), context=0):
        super().__init__(dim, time=True, context=context)
        sizes = (dim, *widths(hidden), dim)
        layers = (ConcatSquash(a, b, 1 + context) for a, b in zip(sizes, sizes[1:]))
        self.layers = nn.ModuleList(layers)

    def forward(self, t, x, mask=None, context=None):
        h, extra = self.enter(t, x, mask, context)
        for i, layer in enumerate(self.layers):
            h, _ = layer(tanh(h) if i else h, extra)
        return keep(h, mask)

    def value_and_trace(self, t, x, mask=None, context=None):
        """δh = gate ⊙ W (slope ⊙ δh) for the d unit vectors of each point."""
        h, extra = self.enter(t, x, mask, context)
        dh = torch.eye(self.dim, dtype=x.dtype, device=x.device)  # (..., n, d tangents, width)
        for i, layer in enumerate(self.layers):
            if i:
                h, slope = Tanh.apply(h)
                dh = dh * slope[..., None, :]
            h, gate = layer(h, extra)
            dh = dh @ layer.linear.weight.T * gate[..., None, :]
        trace = dh.diagonal(dim1=-2, dim2=-1).sum(-1).expand(x.shape[:-1])
        return keep(h, mask), keep(trace[..., None], mask).sum((-2, -1))


# ------------------------------------------------------------------------- baselines of Table 1


class DeepSets(nn.Module):
    """Zaheer et al. (2017): three layers tanh(W (x − max x) + b), max over points, two layers."""

    def __init__(self, in_dim, classes, width=256, dropout=0.5):
        super().__init__()
        sizes = (in_dim, width, width, width)
        self.in_dim = in_dim
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh(),
            nn.Dropout(dropout), nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, x, mask=None):
        check_set(x, self.in_dim, mask)
        check_values(x, mask)
        x = keep(x, mask)
        for layer in self.layers:
            x = tanh(layer(x - pool_max(x, mask).values))
        return self.head(pool_max(x, mask).values[..., 0, :])


class AttentionBlock(nn.Module):
    """MAB(x, y) of Lee et al. (2019): h = q + attention(q, k(y), v(y)), then h + relu(W h + b)."""

    def __init__(self, x_dim, y_dim, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(x_dim, width), nn.Linear(y_dim, width)
        self.v, self.out = nn.Linear(y_dim, width), nn.Linear(width, width)

    def forward(self, x, y, mask=None):  # mask is of y
        q = self.q(x)
        k, v = (split_heads(layer(y), self.heads) for layer in (self.k, self.v))
        h = q + merge_heads(attend(split_heads(q, self.heads), k, v, mask))
        return h + torch.relu(self.out(h))


class SetTransformer(nn.Module):
    """Lee et al. (2019): two ISABs of 32 inducing points, pooling by attention with one seed."""

    def __init__(self, in_dim, classes, width=256, heads=4, inducing=32, dropout=0.5):
        super().__init__()
        check_heads(heads, width)
        self.in_dim = in_dim
        points = [nn.init.xavier_uniform_(torch.empty(inducing, width)) for _ in range(2)]
        self.inducing = nn.ParameterList(points)
        self.gather = nn.ModuleList(AttentionBlock(width, d, width, heads) for d in (in_dim, width))
        self.spread = nn.ModuleList(AttentionBlock(d, width, width, heads) for d in (in_dim, width))
        self.seed = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, width)))
        self.pool = AttentionBlock(width, width, width, heads)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, classes)

    def forward(self, x, mask=None):
        check_set(x, self.in_dim, mask)
        check_values(x, mask)
        x = keep(x, mask)
        for points, gather, spread in zip(self.inducing, self.gather, self.spread):
            summary = gather(points.expand(*x.shape[:-2], *points.shape), x, mask)
            x = spread(x, summary)
        seed = self.seed.expand(*x.shape[:-2], *self.seed.shape)
        pooled = self.pool(seed, self.dropout(x), mask)[..., 0, :]
        return self.head(self.dropout(pooled))
