"""Matrix products: which of them ``torch.autocast`` may round, and forms of small ones that are faster.

Inside ``torch.autocast`` matrix products take and give bfloat16. That is harmless where weights map a value and every
term of a variance is positive: :func:`linear_map` allows it, and gives the result back in the precision of its input.
Everything else keeps the precision of its operands by :func:`full_precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW = 4  # columns of a product
_SMALL = 512  # entries of a factor
P = ParamSpec("P")


def full_precision(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate a function of tensors so that ``torch.autocast`` does not change the precision of its products."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        device = next(value.device.type for value in args if isinstance(value, Tensor))
        if device == "meta" or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def linear_map(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``value @ weight.T + bias`` in the dtype of ``value``; ``torch.autocast`` may round the product.

    Args:
        value: Tensor ``(*batch, n)``.
        weight: Matrix ``(outputs, n)``.
        bias: Vector ``(outputs,)``, or ``None``.
    """
    result = F.linear(value, weight, bias)
    return result if result.dtype == value.dtype else result.to(value.dtype)


@full_precision
def combine(variance: Tensor, table: Tensor) -> Tensor:
    """Return the matrix product of variances and what each of them adds.

    Args:
        variance: Variances ``(*batch, rank)``.
        table: Matrix ``(rank, entries)``.
    """
    return variance @ table


@full_precision
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


@full_precision
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
    result = left @ right.mT
    return result if result.dtype == left.dtype else result.to(left.dtype)
