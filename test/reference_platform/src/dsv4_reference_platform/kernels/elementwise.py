"""Activation functions, and a sum, whose result for an element does not depend on where it lies.

``torch.sigmoid``, ``torch.nn.functional.silu`` and ``softplus`` use one approximation in the
vectorised body of a tensor and another for the elements left over at its end, so a token's bits
would follow its place in the batch. Built from ``exp``, ``log1p`` and IEEE arithmetic, for which
body and tail agree, they do not.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Logistic function, fp32 in and out, any shape."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``, fp32 in and out, any shape."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``, fp32 in and out, any shape; exact form for large ``|x|``."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, left to right, keeping it: ``[..., n] -> [..., 1]``."""
    total = x[..., :1].clone()
    for column in range(1, x.shape[-1]):
        total += x[..., column : column + 1]
    return total
