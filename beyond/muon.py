"""Muon (Jordan et al., 2024): for a weight matrix, step along the nearest orthogonal matrix.

    m ← μ m + (1 − μ) g,   U S Vᵀ = g + μ (m − g)
    W ← (1 − lr λ) W − 10 lr √max(1, rows/columns) · U Vᵀ

All directions of the momentum advance alike, not only the few with large gradients. So does its
noise: without the decay λ, weights grow for as long as they are trained. Vectors, matrices with
a short side (the first and last layers) and with a long one (the GRU's, whose orthogonalisation
took a third of a step) take Adam's step with lr, and no decay. In short runs of our classifier it
took about half of Adam's steps. torch.optim.Muon always computes U Vᵀ in bfloat16, which is slow
on most CPUs (here: under an autocast); and it leaves Adam's share to a second optimiser.
"""

import torch

SHORT, LONG = 64, 1024  # a matrix with a side below or above is Adam's


def orthogonal(m):
    """About U Vᵀ of m = U S Vᵀ: five steps of X ← aX + (bA + cA²)X, A = XXᵀ, lift S to about 1."""
    x = m.mT if m.shape[0] > m.shape[1] else m
    x = x / x.norm().clamp(min=1e-20)  # so that S ≤ 1
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if m.shape[0] > m.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.95, betas=(0.9, 0.99), eps=1e-8, decay=0.0):
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "decay": decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() == 2 and min(p.shape) >= SHORT and max(p.shape) <= LONG:
                    self.orthogonal_step(p, self.state[p], **group)
                else:
                    self.adam_step(p, self.state[p], **group)

    def orthogonal_step(self, p, state, *, lr, momentum, decay=0.0, **_):  # 0: older checkpoints
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, 1 - momentum)
        size = 10 * lr * max(1, p.shape[0] / p.shape[1]) ** 0.5
        p.mul_(1 - lr * decay).sub_(size * orthogonal(torch.lerp(p.grad, m, momentum)))

    def adam_step(self, p, state, *, lr, betas, eps, **_):
        m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
        n = state["steps"] = state.get("steps", 0) + 1
        m.lerp_(p.grad, 1 - betas[0])
        v.lerp_(p.grad.square(), 1 - betas[1])
        m_hat, v_hat = (x / (1 - beta**n) for x, beta in zip((m, v), betas))
        p.sub_(lr * m_hat / (v_hat.sqrt() + eps))
