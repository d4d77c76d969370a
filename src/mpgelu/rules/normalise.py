"""Normalisation by known statistics, which is linear, and by the statistics of the vector itself, which is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import Block, DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments.products import combine
from mpgelu.rules.add import add
from mpgelu.rules.scale import scale


def batch_norm(
    value: Any,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    r"""Return the moments of :math:`w \circ (h - \mu) / \sqrt{\sigma^2 + \epsilon} + b` with fixed statistics.

    This is a known scale and shift of each feature, which is exact for every type of moments.

    Args:
        value: A tensor or moments with n features.
        mean: Running means :math:`\mu`, ``(n,)``.
        variance: Running variances :math:`\sigma^2`, ``(n,)``.
        weight: Factors w, ``(n,)`` or ``None``.
        bias: Shifts b, ``(n,)`` or ``None``.
        eps: The constant :math:`\epsilon` added to the variance.
    """
    gain = (variance + eps).rsqrt()
    if weight is not None:
        gain = gain * weight
    shift = -mean * gain
    return add(scale(value, gain), shift if bias is None else shift + bias)


@singledispatch
def layer_norm(value: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    r"""Return moments of :math:`w \circ c / \sqrt{S} + b`, :math:`c = h - \bar h`, :math:`S = |c|^2 / n + \epsilon`.

    The operation is not linear in :math:`h`, and all its moments are *approximated*: it is linearised in :math:`c` and
    :math:`S` around their expectations :math:`\mu = \mathrm E\,c` and :math:`q = \mathrm E\,S`, which gives

    .. math:: \frac{w \circ \mu}{\sqrt q} + b, \qquad J C J^\top, \qquad
        J = \frac{\operatorname{diag}(w)}{\sqrt q} \Big(I - \frac{1 1^\top}{n} - \frac{\mu \mu^\top}{n q}\Big)

    The approximation is of first order in the standard deviations of the vector, and exact if these are zero. The
    expectation of :math:`S` includes the variance of the units, so that a small mean with large noise is not
    amplified.

    Args:
        value: A tensor or moments with n features; the last dimension is normalised.
        weight: Factors w, ``(n,)`` or ``None``.
        bias: Shifts b, ``(n,)`` or ``None``.
        eps: The constant :math:`\epsilon` added to the variance of the vector.

    Raises:
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"layer_norm: no rule for {type(value).__name__}; register one with @layer_norm.register")


@layer_norm.register
def _(value: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(value, value.shape[-1:], weight, bias, eps)


@layer_norm.register
def _(
    value: DiagonalMoments, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> DiagonalMoments:
    spread = value.variance.mean(-1) * (1 - 1 / value.features)
    mean, jacobian = _linearised(value.mean, spread, weight, bias, eps)
    columns = jacobian(_identity(value.mean))
    return DiagonalMoments(mean, combine(value.variance.unsqueeze(-2), columns.square()).squeeze(-2), value.event_dims)


@layer_norm.register
def _(value: FullMoments, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> FullMoments:
    spread = value.variance.mean(-1) - value.covariance.mean((-2, -1))
    mean, jacobian = _linearised(value.mean, spread, weight, bias, eps)
    return FullMoments(mean, jacobian(jacobian(value.covariance).mT))


@layer_norm.register
def _(
    value: FactoredMoments, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> FactoredMoments:
    value = value.with_named_residual()
    spread = torch.zeros_like(value.mean[..., 0])
    for block in value.blocks:
        spread = spread + (block.variance * block.scaled_factor.var(-1, correction=0)).sum(-1)
    mean, jacobian = _linearised(value.mean, spread, weight, bias, eps)
    mapped = value.map_blocks(
        lambda block: Block(jacobian(block.scaled_factor), block.variance, row_wise=True, merged=block.merged)
    )
    return replace(value, mean=mean, blocks=mapped)


def _linearised(
    mean: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the mean after normalisation, and a function that applies J to the rows of a matrix ``(*batch, rows, n)``.

    Args:
        mean: Means of the units, ``(*batch, n)``.
        spread: Expected variance within the vector in excess of that of its mean, ``(*batch,)``.
        weight: Factors w, ``(n,)`` or ``None``.
        bias: Shifts b, ``(n,)`` or ``None``.
        eps: The constant added to the variance.
    """
    centred = mean - mean.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1) + spread + eps).rsqrt().unsqueeze(-1)  # 1 / sqrt q
    direction = (centred * scale).unsqueeze(-2)
    gain = (scale if weight is None else scale * weight).unsqueeze(-2)

    def jacobian(rows: Tensor) -> Tensor:
        rows = rows - rows.mean(-1, keepdim=True)
        return (rows - direction * (rows * direction).mean(-1, keepdim=True)) * gain

    after = centred * gain.squeeze(-2)
    return after if bias is None else after + bias, jacobian


def _identity(mean: Tensor) -> Tensor:
    """Return the identity matrix of the size, dtype and device of a mean."""
    return torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
