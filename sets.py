"""Permutation-equivariant vector fields on sets, their exact traces, and the discrete baselines.

    paper                                                  here
    ---------------------------------------------------    -----------------------------------
    Sec. 4.1, f(x) = σ(λIx + γ pool(x)); Table 3, FC ...   DeepSetsField
    Sec. 4.1, self-attention; Table 3, K, Q, V             AttentionField
    App. C.3, CCS(x, z, t); Table 3, Concatsquash × 4      ConcatSquashField
    Eq. 5, 9, Tr(∂f/∂z)                                    Field.value_and_trace
    Sec. 3.3, ∂f/∂z e of Hutchinson's estimator            Field.value_and_jvp
    Table 1, DeepSets and Set Transformer                  DeepSets, SetTransformer

Shapes: x is `(..., n, d)`, a set of n points after any batch axes. mask is `(..., n)`, True where a
point exists; a padded point changes nothing for the others and does not move. t is a number, or
has the batch axes. context is `(..., c)`, one vector per set. Tangents δx have one more axis in
front, `(p, ..., n, d)`: p directions in which x moves.

Departures from the paper:
  - Traces are exact. Only ∂fᵢ/∂xᵢ counts in tr ∂f/∂x, so the d unit vectors of all points move at
    once, and each point follows its own alone (`own` in `value_and_jvp`).
  - `time=True` feeds t to the first layers; the authors' fields ignore it. `context` likewise.
  - DeepSetsField has λ = 1, γ = −1 and the maximum as pool, on hidden features and without an outer
    σ, as in the authors' code.
  - ConcatSquash has a bias in its gate and none in its shift, as in the authors' code; the text can
    be read so, Table 3 has it the other way round.
  - The Set Transformer has no layer norms and no network before PMA: so it has 1.15 M parameters.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Widths = int | Sequence[int]  # of hidden layers

# -------------------------------------------------------------------------- what a person may give


def check_widths(hidden: Widths) -> tuple[int, ...]:
    """Hidden widths as a tuple; one number stands for two layers of that width."""
    sizes = (hidden, hidden) if isinstance(hidden, int) else hidden
    right = isinstance(sizes, tuple | list) and sizes
    if not right or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"hidden must be positive widths such as (128, 128), not {hidden!r}")
    return tuple(sizes)


def check_heads(heads: int, width: int) -> None:
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(f"heads must divide the width {width}, but is {heads}")


def check_shapes(x: Tensor, dim: int, mask: Tensor | None = None) -> None:
    """Raise a ValueError unless x is (..., n, dim) with n > 0 and mask, if any, fits it."""
    shape = tuple(x.shape)
    if len(shape) < 2 or shape[-1] != dim:
        raise ValueError(f"x must be (..., points, {dim}), not {shape}")
    if shape[-2] == 0:
        raise ValueError(f"x must hold at least one point per set, but is {shape}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape[:-1]):
        got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise ValueError(f"mask must be bool of shape {shape[:-1]}, True for a point, not {got}")


def check_set(x: Tensor, dim: int, mask: Tensor | None = None, axes: int = 1) -> None:
    """check_shapes, and on a CPU (a GPU would have to wait) a ValueError for NaN, infinity, or a
    mask that leaves no point in its last `axes` axes: those of a set, or of a series of sets."""
    check_shapes(x, dim, mask)
    if x.device.type != "cpu":
        return
    if mask is not None and not mask.flatten(-axes).any(-1).all():
        raise ValueError("mask must leave every set at least one point, but some have none")
    if not torch.isfinite(keep(x, mask)).all():
        raise ValueError("x must be finite, but holds NaN or infinity")


# ------------------------------------------------------------------- points that exist, and pools


def keep(x: Tensor, mask: Tensor | None, other: Tensor | float = 0) -> Tensor:
    """x where a point exists, `other` elsewhere."""
    return x if mask is None else torch.where(mask[..., None], x, other)


def count(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The number of points of each set, at least 1, in x's precision."""
    if mask is None:
        return torch.full(x.shape[:-2], x.shape[-2], dtype=x.dtype, device=x.device)
    return mask.sum(-1).clamp(min=1).to(x.dtype)


def pool_max(h: Tensor, mask: Tensor | None = None) -> torch.return_types.max:
    """max over the points that exist and the index that attains it, `(..., 1, w)` each."""
    if mask is not None:
        h = h.masked_fill(~mask[..., None], torch.finfo(h.dtype).min)
    return h.max(-2, keepdim=True)


def pool_mean(h: Tensor, mask: Tensor | None = None) -> Tensor:
    """mean over the points that exist, `(..., 1, w)`."""
    return keep(h, mask).sum(-2, keepdim=True) / count(h, mask)[..., None, None]


class PointNorm(nn.BatchNorm1d):
    """Batch normalisation over all points of all sets, padded ones left out.

    Where several processes train one model, `total` is a function that sums over all of them.
    """

    def __init__(self, features: int):
        super().__init__(features)
        self.total = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.training or (mask is None and self.total is None):
            return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)
        axes, total = tuple(range(x.dim() - 1)), self.total or (lambda statistic: statistic)
        x = x.to(self.weight.dtype)  # sums need more than bfloat16
        n = total(keep(torch.ones_like(x[..., :1]), mask).sum())
        mean = total(keep(x, mask).sum(axes)) / n
        x = keep(x - mean, mask)
        var = total(x.square().sum(axes)) / n
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1).clamp(min=1), self.momentum)
        return x * torch.rsqrt(var + self.eps) * self.weight + self.bias


# -------------------------------------------------------------------------------------- attention


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)  # (..., heads, n, width / heads)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """A v = softmax(q kᵀ / √h) v over the points that exist; over all in a set without points."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":  # torch's fused kernel is slower there
        with torch.autocast("cpu", enabled=False):
            return attention_weights(q, k, mask) @ v
    if mask is not None:
        mask = (mask | ~mask.any(-1, keepdim=True))[..., None, None, :]
    return F.scaled_dot_product_attention(q, k, v, mask)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """A = softmax(q kᵀ / √h), with weight 0 on padded points."""
    s = q / math.sqrt(q.shape[-1]) @ k.mT
    if mask is not None:
        s = s.masked_fill(~mask[..., None, None, :], torch.finfo(s.dtype).min)
    return torch.softmax(s, -1)


def attend_with_tangents(q, k, v, dq, dk, dv, mask=None, own=False) -> tuple[Tensor, Tensor]:
    """r = A v and δr = δA v + A δv,  δA = A ⊙ (δs − Σⱼ A δs),  δs = (δq kᵀ + q δkᵀ)/√h.

    If own, point i does not follow the keys and values of the others: diag(q·δk) in place of q δkᵀ
    and diag(A) δv in place of A δv.
    """
    a = attention_weights(q, k, mask)
    q, dq = q / math.sqrt(q.shape[-1]), dq / math.sqrt(q.shape[-1])
    if own:
        ds = dq @ k.mT + torch.diag_embed((q * dk).sum(-1))
        a_dv = a.diagonal(dim1=-2, dim2=-1)[..., None] * dv
    else:
        ds, a_dv = dq @ k.mT + q @ dk.mT, a @ dv
    da = a * (ds - (a * ds).sum(-1, keepdim=True))
    return a @ v, da @ v + a_dv


# ---------------------------------------------------------------------------------------- fields


class Field(nn.Module):
    """dx = f(t, x), permutation-equivariant in the points of x.

    A new field defines `forward`; its tangents and trace then follow by forward-mode
    differentiation. The fields below have theirs written out.
    """

    def __init__(self, dim: int, time: bool = False, context: int = 0):
        super().__init__()
        self.dim, self.time, self.context = dim, time, context

    def inputs(self, t, x, mask, context):
        """x without its padding, and (t, context) as `(..., 1, time + c)` for the first layers."""
        self.check(t, x, mask, context)
        extra = [] if context is None else [context[..., None, :]]
        if self.time:
            t = torch.as_tensor(t, dtype=x.dtype, device=x.device)
            extra.insert(0, t.expand(x.shape[:-2])[..., None, None])
        return keep(x, mask), torch.cat(extra, -1) if extra else None

    def check(self, t, x, mask, context):
        """Raise a ValueError that names what does not fit."""
        check_shapes(x, self.dim, mask)
        batch, given = tuple(x.shape[:-2]), 0 if context is None else context.shape[-1]
        if given != self.context:
            raise ValueError(f"context must have {self.context} numbers per set, not {given}")
        if given and context.shape[:-1] != batch:
            wanted = (*batch, given)
            raise ValueError(f"context must have the shape {wanted}, not {tuple(context.shape)}")
        if isinstance(t, Tensor) and t.dim() and tuple(t.shape) != batch:
            raise ValueError(f"t must be a number or of shape {batch}, not {tuple(t.shape)}")

    def value_and_jvp(self, t, x, e, mask=None, context=None) -> tuple[Tensor, Tensor]:
        """f and (∂f/∂x) e for tangents e `(p, ..., n, d)`."""
        self.check(t, x, mask, context)

        def push(e):
            return torch.func.jvp(lambda x: self(t, x, mask, context), (x,), (e,))

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward mode
            return torch.func.vmap(push, out_dims=(None, 0))(e)

    def value_and_trace(self, t, x, mask=None, context=None) -> tuple[Tensor, Tensor]:
        """f and tr ∂f/∂x per set, from n·d tangents, 64 at a time."""
        self.check(t, x, mask, context)
        n, d = x.shape[-2:]
        trace, basis = 0, torch.eye(n * d, dtype=x.dtype, device=x.device).view(n * d, n, d)
        for e in basis.split(64):
            e = e.view(len(e), *[1] * (x.dim() - 2), n, d).expand(len(e), *x.shape)
            dx, je = self.value_and_jvp(t, x, e, mask, context)
            trace = trace + (e * je).sum((0, -2, -1))
        return dx, trace


class ExactField(Field):
    """A field whose `value_and_jvp(t, x, e, mask, context, own)` is written out, with its trace.

    If own, (∂f/∂x) e is (∂fᵢ/∂xᵢ) eᵢ for every point i: what eⱼ does to other points is left out.
    With the d unit vectors as e these are the diagonal blocks, and tr ∂f/∂x = Σᵢ tr ∂fᵢ/∂xᵢ.
    """

    def value_and_trace(self, t, x, mask=None, context=None):
        units = torch.eye(self.dim, dtype=x.dtype, device=x.device)
        e = units.view(self.dim, *[1] * (x.dim() - 1), self.dim)  # alike for all points
        dx, je = self.value_and_jvp(t, x, e, mask, context, own=True)
        return dx, je.diagonal(dim1=0, dim2=-1).sum((-2, -1))


def tanh_with_tangents(h, dh) -> tuple[Tensor, Tensor]:
    """y = tanh h and δy = (1 − y²) ⊙ δh."""
    y = torch.tanh(h)
    return y, (1 - y * y) * dh


class PointNetwork(nn.Module):
    """Linear, tanh, Linear, …, the same for every point; the first layer also sees (t, context)."""

    tanh_with_tangents = staticmethod(tanh_with_tangents)

    def __init__(self, dim, hidden, extra=0):
        super().__init__()
        sizes = (dim, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.extra = nn.Linear(extra, hidden[0], bias=False) if extra else None

    def first(self, x, extra=None):
        h = self.layers[0](x)
        return h if extra is None else h + self.extra(extra)

    def forward(self, x, extra=None):
        h = self.first(x, extra)
        for layer in self.layers[1:]:
            h = layer(torch.tanh(h))
        return h

    def with_tangents(self, x, dx, extra=None):
        """h and δh."""
        h, dh = self.first(x, extra), dx @ self.layers[0].weight.T
        for layer in self.layers[1:]:
            y, dy = self.tanh_with_tangents(h, dh)
            h, dh = layer(y), dy @ layer.weight.T
        return h, dh


class DeepSetsField(ExactField):
    """f(x)ᵢ = W (hᵢ − maxⱼ hⱼ) + b,  h = network(x)."""

    def __init__(self, dim: int, hidden: Widths = 512, time: bool = False, context: int = 0):
        super().__init__(dim, time, context)
        hidden = check_widths(hidden)
        self.network = PointNetwork(dim, hidden, time + context)
        self.out = nn.Linear(hidden[-1], dim)

    def forward(self, t, x, mask=None, context=None):
        x, extra = self.inputs(t, x, mask, context)
        h = self.network(x, extra)
        return keep(self.out(h - pool_max(h, mask).values), mask)

    def value_and_jvp(self, t, x, e, mask=None, context=None, own=False):
        """f and W (δhᵢ − Σⱼ cⱼ ⊙ δhⱼ),  c = 1 where j attains the maximum; if own, only j = i."""
        x, extra = self.inputs(t, x, mask, context)
        h, dh = self.network.with_tangents(x, keep(e, mask), extra)
        top, index = pool_max(h, mask)
        c = torch.zeros_like(h).scatter(-2, index, 1.0)
        dtop = c * dh if own else (c * dh).sum(-2, keepdim=True)
        return keep(self.out(h - top), mask), keep((dh - dtop) @ self.out.weight.T, mask)


class AttentionField(ExactField):
    """f(x) = W tanh(q + A v) + b,  A = softmax(q kᵀ / √h), q, k, v = networks of x; in heads."""

    network = PointNetwork
    attend = staticmethod(attend)
    attend_with_tangents = staticmethod(attend_with_tangents)

    def __init__(
        self, dim: int, hidden: Widths = 128, heads: int = 4, time: bool = False, context: int = 0
    ):
        super().__init__(dim, time, context)
        hidden, self.heads = check_widths(hidden), heads
        check_heads(heads, hidden[-1])
        self.q, self.k, self.v = (self.network(dim, hidden, time + context) for _ in range(3))
        self.out = nn.Linear(hidden[-1], dim)

    def forward(self, t, x, mask=None, context=None):
        x, extra = self.inputs(t, x, mask, context)
        q, k, v = (split_heads(net(x, extra), self.heads) for net in (self.q, self.k, self.v))
        return keep(self.out(torch.tanh(merge_heads(q + self.attend(q, k, v, mask)))), mask)

    def value_and_jvp(self, t, x, e, mask=None, context=None, own=False):
        """f and W δy,  y = tanh(q + r), r = A v."""
        x, extra = self.inputs(t, x, mask, context)
        e = keep(e, mask)
        (q, dq), (k, dk), (v, dv) = (
            [split_heads(part, self.heads) for part in net.with_tangents(x, e, extra)]
            for net in (self.q, self.k, self.v)
        )
        r, dr = self.attend_with_tangents(q, k, v, dq, dk, dv, mask, own)
        y, dy = tanh_with_tangents(merge_heads(q + r), merge_heads(dq + dr))
        return keep(self.out(y), mask), keep(dy @ self.out.weight.T, mask)


class ConcatSquash(nn.Module):
    """CCS(x, z, t) = (W x + b) ⊙ σ(W_g (t, z) + b_g) + W_s (t, z)."""

    def __init__(self, inputs, outputs, extra):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.gate = nn.Linear(extra, outputs)
        self.shift = nn.Linear(extra, outputs, bias=False)

    def forward(self, x, extra):
        return self.linear(x) * torch.sigmoid(self.gate(extra)) + self.shift(extra)

    def tangents(self, dx, extra):
        return (dx @ self.linear.weight.T) * torch.sigmoid(self.gate(extra))


class ConcatSquashField(ExactField):
    """Four concat-squash layers with tanh between: each point moves by itself, given t and z."""

    def __init__(self, dim: int, hidden: Widths = (512, 512, 512), context: int = 0):
        super().__init__(dim, time=True, context=context)
        sizes = (dim, *check_widths(hidden), dim)
        layers = (ConcatSquash(a, b, 1 + context) for a, b in zip(sizes, sizes[1:]))
        self.layers = nn.ModuleList(layers)

    def forward(self, t, x, mask=None, context=None):
        x, extra = self.inputs(t, x, mask, context)
        h = self.layers[0](x, extra)
        for layer in self.layers[1:]:
            h = layer(torch.tanh(h), extra)
        return keep(h, mask)

    def value_and_jvp(self, t, x, e, mask=None, context=None, own=False):
        """f and δh ← gate ⊙ W δy, layer by layer; no point follows another anyway."""
        x, extra = self.inputs(t, x, mask, context)
        h, dh = self.layers[0](x, extra), self.layers[0].tangents(keep(e, mask), extra)
        for layer in self.layers[1:]:
            y, dy = tanh_with_tangents(h, dh)
            h, dh = layer(y, extra), layer.tangents(dy, extra)
        return keep(h, mask), keep(dh, mask)


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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_set(x, self.in_dim, mask)
        x = keep(x, mask)
        for layer in self.layers:
            x = torch.tanh(layer(x - pool_max(x, mask).values))
        return self.head(pool_max(x, mask).values[..., 0, :])


class MAB(nn.Module):
    """Multihead attention block: h = q + attention(q, k, v), then h + relu(W h + b).

    q is linear in x, k and v in y, whose mask it is.
    """

    def __init__(self, x_dim, y_dim, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(x_dim, width), nn.Linear(y_dim, width)
        self.v, self.out = nn.Linear(y_dim, width), nn.Linear(width, width)

    def forward(self, x, y, mask=None):
        pairs = ((self.q, x), (self.k, y), (self.v, y))
        q, k, v = (split_heads(layer(points), self.heads) for layer, points in pairs)
        h = merge_heads(q + attend(q, k, v, mask))
        return h + torch.relu(self.out(h))


class ISAB(nn.Module):
    """Induced set attention block: MAB(x, MAB(inducing points, x))."""

    def __init__(self, dim, width, heads, inducing):
        super().__init__()
        self.points = nn.Parameter(nn.init.xavier_uniform_(torch.empty(inducing, width)))
        self.gather = MAB(width, dim, width, heads)
        self.spread = MAB(dim, width, width, heads)

    def forward(self, x, mask=None):
        points = self.points.expand(*x.shape[:-2], -1, -1)
        return self.spread(x, self.gather(points, x, mask))


class PMA(nn.Module):
    """Pooling by multihead attention: MAB(seed, x), with one seed, `(..., width)`."""

    def __init__(self, width, heads):
        super().__init__()
        self.seed = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, width)))
        self.block = MAB(width, width, width, heads)

    def forward(self, x, mask=None):
        return self.block(self.seed.expand(*x.shape[:-2], -1, -1), x, mask)[..., 0, :]


class SetTransformer(nn.Module):
    """Lee et al. (2019): two ISABs of 32 inducing points each, PMA, one layer; with dropout."""

    def __init__(self, in_dim, classes, width=256, heads=4, inducing=32, dropout=0.5):
        super().__init__()
        check_heads(heads, width)
        self.in_dim = in_dim
        self.blocks = nn.ModuleList(ISAB(dim, width, heads, inducing) for dim in (in_dim, width))
        self.pool = PMA(width, heads)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_set(x, self.in_dim, mask)
        x = keep(x, mask)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.dropout(self.pool(self.dropout(x), mask)))
