"""Nodes of the sum that stands for an expectation over a normal variable."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normal_nodes(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""Nodes and log weights for an expectation over :math:`z \sim N(0, 1)`, each ``(count,)``.

    The trapezoidal rule in t with :math:`z \propto \sinh t`. For the narrow components of strongly correlated outputs
    32 such nodes do better than 48 of Gauss-Hermite, which puts many where the normal density is negligible. The
    outermost node balances the tail that is cut off against the spacing; its place was found by experiment.
    """
    t = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device) if count > 1 else like.new_zeros(1)
    z = torch.sinh(t) * (min(1.2 * math.sqrt(count), 8.0) / math.sinh(1))
    return z, torch.log_softmax(torch.cosh(t).log() - 0.5 * z.square(), 0)
