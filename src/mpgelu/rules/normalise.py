"""Normalisation: by known statistics, which is linear, and by those of the vector itself, which is not."""

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
    r"""Moments of :math:`w \circ (h - \mu) / \sqrt{\sigma^2 + \epsilon} + b` with the statistics learned in training.

    One known scale and shift for each feature: exact for every kind of moments.

    Args:
        value: A tensor or moments with n features.
        mean: :math:`\mu`, ``(n,)``.
        variance: :math:`\sigma^2`, ``(n,)``.
        weight: ``(n,)`` or ``None``.
        bias: ``(n,)`` or ``None``.
        eps: Added to the variance.
    """
    gain = (variance + eps).rsqrt()
    if weight is not None:
        gain = gain * weight
    shift = -mean * gain
    return add(scale(value, gain), shift if bias is None else shift + bias)


@singledispatch
def layer_norm(value: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    r"""Moments of :math:`w \circ c / \sqrt{S} + b`, :math:`c = h - \bar h` and :math:`S = |c|^2 / n + \epsilon`.

    The layer is not linear in :math:`h`, and all its moments are *approximated*: it is linearised in :math:`c` and
    :math:`S` around their expectations :math:`\mu = \mathrm E\,c` and :math:`q = \mathrm E\,S`, which gives

    .. math:: \frac{w \circ \mu}{\sqrt q} + b, \qquad J C J^\top, \qquad
        J = \frac{\operatorname{diag}(w)}{\sqrt q} \Big(I - \frac{1 1^\top}{n} - \frac{\mu \mu^\top}{n q}\Big)

    First order in the spread of the vector, and exact without any. The expectation of :math:`S` counts the variance
    of the units in, so that a small mean under much noise is not blown up.

    Args:
        value: A tensor or moments with n features.
        weight: w, ``(n,)`` or ``None``.
        bias: b, ``(n,)`` or ``None``.
        eps: Added to the variance of the vector.
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
    return DiagonalMoments(mean, (value.variance.unsqueeze(-2) @ columns.square()).squeeze(-2), value.event_dims)


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
    """The mean after normalising, and J applied to the rows of a matrix ``(*batch, rows, n)``.

    Args:
        mean: ``(*batch, n)``.
        spread: Expected variance within the vector beyond that of its mean, ``(*batch,)``.
        weight: ``(n,)`` or ``None``.
        bias: ``(n,)`` or ``None``.
        eps: Added to the variance.
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
    return torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
