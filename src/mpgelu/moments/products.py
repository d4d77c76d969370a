"""Small matrix products of each row, written out as sums where these are faster: under a compiler, or if tiny."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW = 4  # columns of a product
_SMALL = 512  # entries of a factor


def contract(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Marginal variances of a block, :math:`\sum_r d_r F_{ri}^2`.

    Args:
        variance: Of the sources, ``(*batch, rank)``.
        factor: ``(*batch, rank, n)``.
    """
    if torch.compiler.is_compiling() or factor.shape[-1] * factor.shape[-2] <= _SMALL:
        return (variance.unsqueeze(-1) * factor.square()).sum(-2)
    return (variance.unsqueeze(-2) @ factor.square()).squeeze(-2)


def gram(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Covariance of a block, :math:`\sum_r d_r F_{ri} F_{rj}`.

    Args:
        variance: Of the sources, ``(*batch, rank)``.
        factor: ``(*batch, rank, n)``.
    """
    weighted = variance.unsqueeze(-1) * factor
    if factor.shape[-1] <= _FEW and torch.compiler.is_compiling():
        return (weighted.unsqueeze(-1) * factor.unsqueeze(-2)).sum(-3)
    return weighted.mT @ factor


def products(left: Tensor, right: Tensor) -> Tensor:
    r"""Matrix products of each row, :math:`L R^\top`.

    Args:
        left: ``(*batch, a, n)``.
        right: ``(*batch, b, n)``.
    """
    if right.shape[-2] <= _FEW and torch.compiler.is_compiling():
        return (left.unsqueeze(-2) * right.unsqueeze(-3)).sum(-1)
    return left @ right.mT
