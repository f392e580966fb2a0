"""Flow matching for sets: ours, to train the paper's models without a solver in the loop.

A chain of K blocks from data x to noise z is one field v(u, x_u), piecewise in u: block i owns
[i/K, (i + 1)/K]. Along the straight path x_s = (1 − s) x + s z, s = s(u), matching regresses it on

    dx_s/ds = z − x,    loss = ∫ (1 − s) E |v − (z − x)|² du   per coordinate,

as Lipman et al. (2023) and Liu et al. (2023) do. What is particular to sets:

    noise_level               s(u): even in log s, since the likelihood weighs errors by 1/s
    assign                    `coupling="swaps"`: noise goes to near points of the same set, for
                              straighter paths (a minibatch coupling, but within each set)
    exchange                  `spare`: each target x is replaced by E[x given x_s] over more points
                              of the same shape: the same field, from targets of lower variance
    start_at_scale            a chain begins at the speed and the scale of each block's noise, and
    in_proportion             its outputs learn at rates in proportion to their sizes
    temporal_matching_loss    the decoder of a TemporalSetVAE, given z_t
    Moments                   a loss without the noise of matching, through which the encoder learns

Shapes are those of exnode.py: x `(..., n, d)`, mask `(..., n)`, context `(..., c)`.
"""

import math

import torch
from torch import Tensor, nn

from exnode import normal
from sets import PointNetwork, count, keep, pool_mean
from support.arguments import one_of

COUPLINGS = ("swaps", "none")


def matching_loss(
    flow, x, mask=None, context=None, coupling="swaps", generator=None, finest=0.1, spare=None
) -> Tensor:
    """∫ (1 − s) |Δ f(x_s) − (z − x)|² du per coordinate, x_s = (1 − s) x + s z, for a SetFlow.

    Block i runs from s(i/K) to s((i + 1)/K) in its time t₁, so its field f has Δ = t₁ / (s((i +
    1)/K) − s(i/K)) times the speed of dx_s/ds. Each block gets its share of the sets, each set one
    u. `spare` `(..., m, d)` are other points that could as well have been drawn for each set.
    """
    x, mask, context = flow.read(x, mask, context)
    one_of("coupling", coupling, COUPLINGS)
    if finest <= 0:
        raise ValueError(f"finest must be positive, not {finest}")
    if spare is not None and (coupling != "none" or spare.shape[:-2] != x.shape[:-2]):
        got = f"{coupling!r} and {tuple(spare.shape)}"
        raise ValueError(f"spare: for coupling='none' and the sets of x, not {got}")
    mask = None if mask is None else mask.reshape(-1, x.shape[-2])
    context = None if context is None else context.reshape(-1, context.shape[-1])
    x = keep(flow.to_units(x).reshape(-1, *x.shape[-2:]), mask)
    z = normal(x.shape, x, generator)
    z = assign(x, z, mask) if coupling == "swaps" else z

    rows, u = share_out(len(x), len(flow.blocks), x, generator)
    s = noise_level(u, finest)
    x_s, target = torch.lerp(x[rows], z[rows], s[:, None, None]), (z - x)[rows]
    if spare is not None:
        spare = flow.to_units(spare).reshape(len(x), *spare.shape[-2:])
        target = target - exchange(x[rows], spare[rows], x_s, s)
    mask, context = (None if a is None else a[rows] for a in (mask, context))
    return sum(block_losses(flow, finest, x_s, s, target, mask, context)) / len(flow.blocks)


def share_out(sets, blocks, like, generator=None):
    """Sets for each block in turn, at random, and a u for each, evenly in its block's interval."""
    order = torch.randperm(sets, device=like.device, generator=generator)
    order, u = order.repeat(-(-blocks // sets)), []  # no block goes without a set
    for i, rows in enumerate(order.tensor_split(blocks)):
        draw = torch.rand(len(rows), dtype=like.dtype, device=like.device, generator=generator)
        place = (torch.arange(len(rows), device=like.device) + draw) / len(rows)
        u.append((i + place) / blocks)
    return order, torch.cat(u)


def block_losses(flow, finest, *tensors):
    """The loss of each block, from its part of x_s, s, target, mask and context."""
    blocks = len(flow.blocks)
    parts = [[None] * blocks if a is None else a.tensor_split(blocks) for a in tensors]
    for i, (block, x_s, s, target, mask, context) in enumerate(zip(flow.blocks, *parts)):
        first, last = noise_level(i / blocks, finest), noise_level((i + 1) / blocks, finest)
        t = (s - first) / (last - first) * block.t1
        v = block.t1 / (last - first) * block.field(t, x_s, mask, context)  # Δ f(x_s)
        error = keep(v - target, mask).square().sum((-2, -1))
        yield ((1 - s) * error).sum() / (count(v, mask).sum() * flow.dim)


def noise_level(u, finest):
    """Noise s(u) = ε ((1 + 1/ε)ᵘ − 1), from 0 to 1: even in log s above ε = finest, in s below.

    The likelihood weighs an error of the field by (1 − s)/s ds (Kingma et al., 2021), and that is
    (1 − s) du where s > ε. Noise finer than the data's own does not deserve that weight.
    """
    return finest * ((1 + 1 / finest) ** u - 1)


@torch.no_grad()
def start_at_scale(flow, finest):
    """Let block i of a chain begin at the speed and the length scale of the noise it owns.

    The block is to move points by no more than s((i + 1)/K) − s(i/K) in its time t₁, so its output
    is scaled by their ratio, which is 0.01 for fine noise. PyTorch's initial networks see x through
    tanh(w·x + b) with |w| of about 0.6; details at noise s require |w| up to 1/s, which takes
    thousands of steps to learn. So they begin with
      - each w along one axis, scaled by numbers even in their logarithm from 1 to 1/2s, at most 30,
        with the steepest point of its tanh at a place drawn from N(0, I);
      - later layers near the identity, so that head h of attention looks along axis h: points at
        one height see each other. Heads beyond the axes, and networks without heads, see all axes.
    """
    for i, block in enumerate(flow.blocks):
        first, middle, last = (noise_level((i + k) / len(flow.blocks), finest) for k in (0, 0.5, 1))
        for p in block.field.out.parameters():
            p.mul_((last - first) / block.t1)
        for network in block.field.modules():
            if isinstance(network, PointNetwork):
                start_along_axes(network, getattr(block.field, "heads", 1), 0.5 / middle)


def start_along_axes(network, heads, steepest):
    """A point network whose first layer looks along axes, and whose later ones hardly mix that."""
    (w, b), later = network.layers[0].parameters(), network.layers[1:]
    width, dim = w.shape
    head, axis = torch.arange(width) * heads // width, torch.arange(width) % dim
    axis = torch.where(head < min(dim, heads - 1), head, axis)
    scale = min(max(steepest, 1), 30) ** torch.rand(width, 1).to(w)
    w.copy_(scale * w.norm(dim=1, keepdim=True) * torch.eye(dim)[axis].to(w))
    b.copy_(-(w * torch.randn_like(w)).sum(-1))
    for layer in later:
        gain = 1.0 if layer is later[-1] else 0.5  # softer before a tanh
        layer.weight.mul_(0.3).add_(gain * torch.eye(*layer.weight.shape).to(w))


def in_proportion(flow, lr):
    """Parameters of a chain in groups: its output layers learn in proportion to their sizes.

    Adam moves every number of W by lr, whether W is 1 or 0.01, where the noise is fine. 1 is the
    size of PyTorch's initial weights.
    """
    outs = [block.field.out for block in flow.blocks]
    sizes = [(3 * out.weight.square().sum(1).mean()).sqrt().item() for out in outs]
    slow = {id(p) for out in outs for p in out.parameters()}
    groups = [{"params": [p for p in flow.parameters() if id(p) not in slow]}]
    return groups + [
        {"params": list(out.parameters()), "lr": lr * min(size, 1)}
        for out, size in zip(outs, sizes)
    ]


@torch.no_grad()
def exchange(x, spare, x_s, s):
    """(E[x′ᵢ] − xᵢ)/s, x′ᵢ being xᵢ or one of spare with weights exp(−|x_s − (1 − s) x′|² / 2s²).

    The target z − x is (x_s − x)/s; minus this, it has E[x′] in place of x. Each of spare was as
    likely to be drawn for point i, and only x_s depends on which one was. So the mean of the target
    given x_s stays, and its variance falls (Rao and Blackwell). One thing is lost where sets are
    centred by their own points: their mean would tell the mean of the noise.
    """
    s = s[:, None, None].clamp(min=1e-3)  # with less noise a point is only itself
    q, half = x_s * ((1 - s) / s**2), 0.5 * ((1 - s) / s) ** 2
    own = (q * x - half * x * x).sum(-1, keepdim=True)
    others = torch.baddbmm(-half * spare.square().sum(-1)[:, None], q, spare.mT)  # (B, n, m)
    w = torch.softmax(torch.cat([own, others], -1), -1)[..., 1:]
    return (w @ spare - w.sum(-1, keepdim=True) * x) / s


@torch.no_grad()
def assign(x, z, mask=None, sweeps=3):
    """Reorder the noise z `(B, n, d)` within each set so that Σᵢ |xᵢ − zᵢ|² is nearly minimal.

    Start from equal ranks along the first axis; then, for every pair, swap zᵢ and zⱼ wherever
    (xᵢ − xⱼ)·(zᵢ − zⱼ) < 0, which is when that shortens the sum. Disjoint pairs go together.
    """
    ranks = []
    for points in (x, z):
        key = points[..., 0] if mask is None else points[..., 0].masked_fill(~mask, math.inf)
        ranks.append(key.argsort(-1)[..., None].expand_as(z))
    z = torch.empty_like(z).scatter_(-2, ranks[0], z.gather(-2, ranks[1]))
    z, x = (a.movedim(-1, 0).contiguous() for a in (z, x))  # (d, B, n)
    for _ in range(sweeps):
        for other in round_robin(x.shape[-1]).to(x.device):
            zj = z[..., other]
            swap = ((x - x[..., other]) * (z - zj)).sum(0) < 0  # alike for both of a pair
            if mask is not None:
                swap &= mask & mask[..., other]
            z = torch.where(swap, zj, z)
    return z.movedim(0, -1)


def round_robin(n):
    """Whom each of n meets, `(rounds, n)`, every other once; who rests in a round meets itself.

    With an odd number of rounds, i and j meet in round r if i + j = r modulo rounds, and one i has
    2i = r: it rests, or with an even n meets the last.
    """
    rounds, i = n - 1 + n % 2, torch.arange(n)
    r = torch.arange(rounds)[:, None]
    met = (r - i) % rounds
    if n % 2 == 0:
        met = torch.where(met == i, n - 1, met)
        met[:, -1:] = r * (n // 2) % rounds  # n/2 is the inverse of 2
    return met


# -------------------------------------------------------------------------------- sets over time


def temporal_matching_loss(
    vae, x, t, mask=None, coupling="swaps", generator=None, pieces=0, times=0, moments=0.0
) -> tuple[Tensor, Tensor]:
    """The matching loss of a TemporalSetVAE's decoder given z_t, and the KL per series.

    With `times`, the decoder is trained at that number of random times of each series; the encoder
    sees all. With `pieces`, half of the loss is over random pieces of that number of points: such
    a piece does not see the rest of its set, so it depends on z_t, which attention over whole sets
    can ignore. `moments` is the weight of the error of `vae.moments`, at all of t.
    """
    if moments and not hasattr(vae, "moments"):
        raise ValueError(f"moments={moments}: attach a head first, vae.moments = Moments(…)")
    x, t, mask, seen = vae.read(x, t, mask)
    if pieces and (mask is not None or not 0 < pieces <= x.shape[-2]):
        raise ValueError(f"pieces={pieces} of sets of {x.shape[-2]} points, without a mask")
    posterior = vae.encode(x, t, mask)
    z, loss = vae.latents(posterior.sample(generator), t), 0
    if moments:
        sets, own, latents = observed(x, mask, z)
        loss = moments * vae.moments(vae.decoder.to_units(sets, own), latents, own)
    if times:
        rank = torch.randperm(x.shape[1], device=x.device, generator=generator).argsort()
        some = torch.where(seen, rank, x.shape[1]).argsort(-1)[:, :times]  # of the observed ones
        x, z = x.take_along_dim(some[..., None, None], 1), z.take_along_dim(some[..., None], 1)
        mask = None if mask is None else mask.take_along_dim(some[..., None], 1)
    x, mask, z = observed(x, mask, z)
    whole = matching_loss(vae.decoder, x, mask, z, coupling, generator)
    if not pieces:
        return loss + whole, posterior.kl()
    draws = torch.rand(x.shape[:-1], dtype=x.dtype, device=x.device, generator=generator)
    order = draws.argsort(-1)[..., : x.shape[-2] // pieces * pieces, None]  # not that of a file
    part = x.take_along_dim(order, -2).unflatten(-2, (-1, pieces))
    z = z[..., None, :].expand(*part.shape[:-2], -1)
    parts = matching_loss(vae.decoder, part, None, z, coupling, generator)
    return loss + (whole + parts) / 2, posterior.kl()


def observed(x, mask, z):
    """The sets of series that have a point, with their masks and latents; all, without a mask."""
    if mask is None:
        return x, None, z
    seen = mask.any(-1)
    return x[seen], mask[seen], z[seen]


class Moments(nn.Module):
    """Mean square of W z_t + b − φ(x_t), φ(x) = meanᵢ (cos, sin)(ω·xᵢ) at fixed frequencies ω.

    φ is the characteristic function of the set's points, in the units of the decoder. Matching
    teaches the encoder little through its noise; φ has no noise but that of the set.
    """

    def __init__(self, latent, frequencies=96, dim=2):
        super().__init__()
        draw = torch.randn(frequencies, dim, generator=torch.Generator().manual_seed(0))
        scale = torch.logspace(math.log10(0.6), math.log10(8), frequencies)  # from sets to strokes
        self.register_buffer("frequencies", draw * scale[:, None])
        self.linear = nn.Linear(latent, 2 * frequencies)

    def forward(self, x, z, mask=None):
        angle = x @ self.frequencies.T
        phi = pool_mean(torch.cat([angle.cos(), angle.sin()], -1), mask)[..., 0, :]
        return (self.linear(z) - phi).square().mean()
