"""What a person may give a model: sets, times, counts and names, checked and made into tensors.

Shapes are those of exnode.py. Whatever does not fit is a ValueError that names it.
"""

from numbers import Integral

import torch
from torch import Tensor

from sets import check_set


def one_of(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def check_counts(**counts):
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def as_tensor(name, value, like, dtype=None):
    """value as a tensor, or None; arrays and lists go to the device of `like`."""
    if value is None:
        return None
    device = value.device if isinstance(value, Tensor) else like.device
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"{name} must be a tensor or an array of numbers: {e}") from None


def as_sets(model, dim, x, mask=None, context=None, axes=1):
    """x, mask and context as tensors in the model's precision; a ValueError if x holds no sets."""
    like = next(model.parameters())
    x, context = (as_tensor(k, v, like, like.dtype) for k, v in (("x", x), ("context", context)))
    mask = as_tensor("mask", mask, like)
    check_set(x, dim, mask, axes)
    return x, mask, context


def as_times(t, batch):
    """Times `(T,)` or `(batch, T)` as a float64 tensor `(batch, T)` on the CPU."""
    t = as_tensor("t", t, torch.empty(0), torch.float64).cpu()
    if not t.numel() or t.shape[:-1] not in ((), (batch,)) or not t.dim():
        raise ValueError(f"t must be times (T,) or ({batch}, T), not {tuple(t.shape)}")
    if not t.isfinite().all():
        raise ValueError(f"t must be finite, not {t.tolist()}")
    return t.expand(batch, -1).clone()


def check_order(t, seen=None):
    """A ValueError unless times `(B, T)` increase; of a set not `seen`, one may be repeated."""
    rises = t.diff() > 0
    if seen is not None:
        rises |= (t.diff() == 0) & ~seen[:, 1:].cpu()
    if not rises.all():
        raise ValueError(f"t must be strictly increasing, not {t.tolist()}")
