"""A transformer as the field of a set flow: ours, not the paper's, for training by matching.

    TransformerField    residual attention layers that read t and the context
    near                their attention begins by looking at near points
    FineView            flat parts of shapes, at the scale of the noise
    deepen              more layers for a trained one, which begin as the identity

x is `(..., n, d)`, mask `(..., n)`, context `(..., c)` and t as in `sets.py`. Tangents of h are
dh `(p, ..., n, w)`.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from beyond.fast import fast_attend_with_tangents
from sets import Field, attend, check_heads, keep, merge_heads, split_heads


def norm_with_tangents(norm, x, dx):
    """y = (x − μ)/σ and δy = (δx − mean δx − y mean(y δx))/σ, both times the norm's weights."""
    x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps)
    y = x * scale
    dx = dx - dx.mean(-1, keepdim=True) - y * (y * dx).mean(-1, keepdim=True)
    return y * norm.weight + norm.bias, dx * (scale * norm.weight)


def with_square(x):
    """(x, |x|²)."""
    return torch.cat([x, x.square().sum(-1, keepdim=True)], -1)


def near(dim, width, heads):
    """A layer from (x, |x|²) to additions to q, k, v that start as −½ a²|xᵢ − xⱼ|² in the scores.

    A softmax ignores what all j share, so a²(xᵢ·xⱼ − ½|xⱼ|²) does the same: q gets a xᵢ and a
    constant, k gets a xⱼ and −|xⱼ|², v nothing. Each head has its own a, from 0.3, hardly local, to
    10, where only near points count.
    """
    layer, size = nn.Linear(dim + 1, 3 * width), width // heads
    if size <= dim:
        raise ValueError(f"width {width} in {heads} heads: each requires at least {dim + 1}")
    with torch.no_grad():
        layer.weight.zero_(), layer.bias.zero_()
        a = torch.logspace(math.log10(0.3), 1, heads)[:, None] * size**0.25  # scores are over √size
        (q, k, _), (one, _, _) = (
            part.view(3, heads, size, -1) for part in (layer.weight, layer.bias)
        )
        for i in range(dim):
            q[:, i, i : i + 1] = k[:, i, i : i + 1] = a
        one[:, dim], k[:, dim, dim:] = a / math.sqrt(2), -a / math.sqrt(2)
    return layer


class TransformerLayer(nn.Module):
    """h + attention(norm(h), x), then h + network(norm(h)); a condition scales and shifts norms.

    The condition starts without effect, as in Peebles and Xie (2023), but without their gates.
    near adds to the scores of attention: without it, to see its neighbours is what a layer learns
    last.
    """

    def __init__(self, dim, width, heads, extra):
        super().__init__()
        self.heads = heads
        self.condition, self.near = nn.Linear(extra, 4 * width), near(dim, width, heads)
        nn.init.zeros_(self.condition.weight), nn.init.zeros_(self.condition.bias)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def start_as_identity(self):
        """Let both branches add nothing to h at first."""
        for linear in (self.merge, self.narrow):
            nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)

    def forward(self, h, place, extra, mask=None):
        scale, shift, scale2, shift2 = self.condition(extra).chunk(4, -1)
        y = torch.addcmul(shift, self.norms[0](h), 1 + scale)
        q, k, v = (self.qkv(y) + self.near(place)).chunk(3, -1)
        q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
        h = h + self.merge(merge_heads(attend(q, k, v, mask)))
        y = torch.addcmul(shift2, self.norms[1](h), 1 + scale2)
        return h + self.narrow(F.silu(self.widen(y)))

    def with_tangents(self, h, dh, place, dplace, extra, mask=None):
        scale, shift, scale2, shift2 = self.condition(extra).chunk(4, -1)
        y, dy = norm_with_tangents(self.norms[0], h, dh)
        y, dy = torch.addcmul(shift, y, 1 + scale), dy * (1 + scale)
        q, k, v = (self.qkv(y) + self.near(place)).chunk(3, -1)
        dq, dk, dv = (dy @ self.qkv.weight.T + dplace @ self.near.weight.T).chunk(3, -1)
        parts = (split_heads(part, self.heads) for part in (q, k, v, dq, dk, dv))
        r, dr = fast_attend_with_tangents(*parts, mask)
        h, dh = h + self.merge(merge_heads(r)), dh + merge_heads(dr) @ self.merge.weight.T
        y, dy = norm_with_tangents(self.norms[1], h, dh)
        y, dy = torch.addcmul(shift2, y, 1 + scale2), dy * (1 + scale2)
        y, dy = self.widen(y), dy @ self.widen.weight.T
        gate = torch.sigmoid(y)  # silu(y) = y σ(y)
        dy = dy * (gate + y * gate * (1 - gate))
        return h + self.narrow(y * gate), dh + dy @ self.narrow.weight.T


class FineView(nn.Module):
    """How the others lie to each point at the scale of the noise: along every axis, and around it.

    Attention with fixed weights. A head measures along one axis, or along all, in units of a width
    w in proportion to the noise, which is t / end in units of the data's deviation. With u = x / w,
    A = softmaxⱼ(−½ |uᵢ − uⱼ|²), it sees Σⱼ Aᵢⱼ (uⱼ − uᵢ) and Σⱼ Aᵢⱼ (uⱼ − uᵢ)². Seats, wings and
    legs have many points at nearly one height, which layers that see x itself are slow to resolve.
    u² is large where w is small: LEAST keeps what float32 rounds off to about a hundredth of what
    is seen.
    """

    BANDWIDTHS, LEAST = (2.0, 6.0), 0.006  # w = width · (noise + least)

    def __init__(self, dim, width, end):
        super().__init__()
        self.end = end
        axes = torch.cat([torch.eye(dim), torch.ones(1, dim)])  # of each head
        self.register_buffer("axes", axes.repeat(len(self.BANDWIDTHS), 1), persistent=False)
        bandwidths = torch.tensor(self.BANDWIDTHS).repeat_interleave(dim + 1)[:, None]
        self.register_buffer("bandwidths", bandwidths, persistent=False)
        self.heads = len(self.axes)
        self.out = nn.Linear(2 * dim * self.heads, width)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)  # a field learns to look

    def scales(self, t):
        """1/w of every head along every axis, `(..., 1, heads, d)`; t is `(..., 1, 1)`."""
        axes, w = self.axes.to(t.dtype), self.bandwidths.to(t.dtype)
        return axes / (w * (t.clamp(min=0) / self.end + self.LEAST)[..., None])

    def queries_and_keys(self, u):
        """q·k / √(2d) = uᵢ·uⱼ − ½ |uⱼ|²."""
        q = torch.cat([u, torch.full_like(u, -0.5)], -1) * math.sqrt(2 * u.shape[-1])
        return q.flatten(-2), torch.cat([u, u * u], -1).flatten(-2)

    def means(self, r):
        """Of u and u², `(..., heads, d)` each."""
        return r.unflatten(-1, (self.heads, -1)).chunk(2, -1)

    def seen(self, u, mean, square):
        """Means of uⱼ − uᵢ and its square, mapped to the width of the layers."""
        return self.out(torch.cat([mean - u, square - 2 * u * mean + u * u], -1).flatten(-2))

    def forward(self, x, t, mask=None):
        u = x[..., None, :] * self.scales(t)
        q, k = self.queries_and_keys(u)
        q, k = split_heads(q, self.heads), split_heads(k, self.heads)
        return self.seen(u, *self.means(merge_heads(attend(q, k, k, mask))))

    def with_tangents(self, x, dx, t, mask=None):
        """The value and J dx for tangents dx `(p, ..., n, d)`."""
        scales = self.scales(t)
        u, du = x[..., None, :] * scales, dx[..., None, :] * scales
        q, k = self.queries_and_keys(u)
        dq = torch.cat([du, torch.zeros_like(du)], -1).flatten(-2) * math.sqrt(2 * u.shape[-1])
        dk = torch.cat([du, 2 * u * du], -1).flatten(-2)
        q, k, dq, dk = (split_heads(part, self.heads) for part in (q, k, dq, dk))
        r, dr = fast_attend_with_tangents(q, k, k, dq, dk, dk, mask)
        mean, square = self.means(merge_heads(r))
        dmean, dsquare = self.means(merge_heads(dr))
        dsquare = dsquare - 2 * (du * (mean - u) + u * dmean)
        dseen = torch.cat([dmean - du, dsquare], -1).flatten(-2)
        return self.seen(u, mean, square), dseen @ self.out.weight.T


class TransformerField(Field):
    """Residual attention layers that read t and the context: ours, for training by matching.

    Its trace has no shortcut: Hutchinson's estimate, or n·d tangents for the exact one. `fine` adds
    a FineView to what the layers begin with; `end` is the time at which there is only noise.
    """

    def __init__(self, dim, width=128, layers=4, heads=4, context=0, end=1.0, fine=False):
        super().__init__(dim, time=True, context=context)
        check_heads(heads, width)
        if layers < 1:
            raise ValueError(f"layers must be at least 1, not {layers}")
        frequencies = 2.0 ** torch.arange(4) * math.pi
        self.register_buffer("frequencies", frequencies, persistent=False)
        read = 1 + context + 2 * len(frequencies)
        self.condition = nn.Sequential(nn.Linear(read, width), nn.SiLU())
        self.first = nn.Linear(dim, width)
        self.fine = FineView(dim, width, end) if fine else None
        layers = (TransformerLayer(dim, width, heads, width) for _ in range(layers))
        self.layers = nn.ModuleList(layers)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, dim)

    def conditions(self, extra):
        """What all layers know of (t, context). Time is finest near 0, where the data are."""
        u = torch.log1p(100 * extra[..., :1]) / math.log(101)
        waves = u * self.frequencies.to(u.dtype)
        return self.condition(torch.cat([u, extra[..., 1:], waves.sin(), waves.cos()], -1))

    def forward(self, t, x, mask=None, context=None):
        x, extra = self.inputs(t, x, mask, context)
        place = with_square(x)
        h = self.first(x)
        if self.fine:
            h = h + self.fine(x, extra[..., :1], mask)
        extra = self.conditions(extra)
        for layer in self.layers:
            h = layer(h, place, extra, mask)
        return keep(self.out(self.norm(h)), mask)

    def value_and_jvp(self, t, x, e, mask=None, context=None):
        x, extra = self.inputs(t, x, mask, context)
        e = keep(e, mask)
        place = with_square(x)
        dplace = torch.cat([e, 2 * (e * x).sum(-1, keepdim=True)], -1)
        h, dh = self.first(x), e @ self.first.weight.T
        if self.fine:
            seen, dseen = self.fine.with_tangents(x, e, extra[..., :1], mask)
            h, dh = h + seen, dh + dseen
        extra = self.conditions(extra)
        for layer in self.layers:
            h, dh = layer.with_tangents(h, dh, place, dplace, extra, mask)
        h, dh = norm_with_tangents(self.norm, h, dh)
        return keep(self.out(h), mask), keep(dh @ self.out.weight.T, mask)


def deepen(flow, known):
    """Let a transformer's layers beyond the first `known` begin as the identity; their names."""
    names = []
    for i, block in enumerate(flow.blocks):
        layers = block.field.layers if isinstance(block.field, TransformerField) else []
        for k, layer in list(enumerate(layers))[known:]:
            layer.start_as_identity()
            names.append(f"blocks.{i}.field.layers.{k}.")
    return names
