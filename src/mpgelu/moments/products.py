"""Matrix products of each row, as elementwise sums where those are faster: for tiny factors and under a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW = 4  # columns of a product
_SMALL = 512  # entries of a factor


def contract(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Return the marginal variances of a block, :math:`\sum_r d_r F_{ri}^2`.

    Args:
        variance: Variances d of the sources, ``(*batch, rank)``.
        factor: Factor F, ``(*batch, rank, n)``.

    Returns:
        Variances ``(*batch, n)``.
    """
    if torch.compiler.is_compiling() or factor.shape[-1] * factor.shape[-2] <= _SMALL:
        return (variance.unsqueeze(-1) * factor.square()).sum(-2)
    return (variance.unsqueeze(-2) @ factor.square()).squeeze(-2)


def gram(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Return the covariance of a block, :math:`\sum_r d_r F_{ri} F_{rj}`.

    Args:
        variance: Variances d of the sources, ``(*batch, rank)``.
        factor: Factor F, ``(*batch, rank, n)``.

    Returns:
        Covariances ``(*batch, n, n)``.
    """
    weighted = variance.unsqueeze(-1) * factor
    if factor.shape[-1] <= _FEW and torch.compiler.is_compiling():
        return (weighted.unsqueeze(-1) * factor.unsqueeze(-2)).sum(-3)
    return weighted.mT @ factor


def products(left: Tensor, right: Tensor) -> Tensor:
    r"""Return the matrix product of each row, :math:`L R^\top`.

    Args:
        left: Matrices L, ``(*batch, a, n)``.
        right: Matrices R, ``(*batch, b, n)``.

    Returns:
        Products ``(*batch, a, b)``.
    """
    if right.shape[-2] <= _FEW and torch.compiler.is_compiling():
        return (left.unsqueeze(-2) * right.unsqueeze(-3)).sum(-1)
    return left @ right.mT
