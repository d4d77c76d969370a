"""Multiplication by known factors, and the last step that all elementwise rules share."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments


@singledispatch
def scale(value: Any, gain: Tensor | float) -> Any:
    r"""Return the moments of :math:`g \circ h` for known factors :math:`g`.

    .. math:: g\, m, \qquad g_i g_j C_{ij}

    Exact for every type of moments.

    Args:
        value: A tensor or moments with n features.
        gain: A number, ``(n,)``, or any tensor that broadcasts to the mean without enlarging it.

    Raises:
        InputError: The shape of the gain does not fit.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"scale: no rule for {type(value).__name__}; register one with @scale.register")


@scale.register
def _(value: Tensor, gain: Tensor | float) -> Tensor:
    return value * gain


@scale.register
def _(value: Moments, gain: Tensor | float) -> Moments:
    gain = torch.as_tensor(gain, dtype=value.mean.dtype, device=value.mean.device)
    row_wise = gain.dim() > 1
    check_constant("scale", value, gain)
    gain = gain.expand(value.mean.shape if row_wise else value.features)
    rescaled: Moments = rescale(value, value.mean * gain, gain, row_wise=row_wise)
    return rescaled


@singledispatch
def rescale(value: Any, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False) -> Any:
    r"""Return moments with a new mean and the covariance :math:`g_i g_j C_{ij} + \delta_{ij}\, e_i`.

    Rules of nonlinear functions are built from it: a best linear fit of gain g with an independent residual. Such a
    rule can be registered once for :class:`Moments`. For a plain tensor, which has no covariance, the result is
    ``mean``.

    Args:
        value: A tensor or moments with n features.
        mean: The new mean, ``(*batch, n)``.
        gain: Factors g, ``(n,)`` or ``(*batch, n)``.
        added: Variances e that each unit gains independently of the others, ``(*batch, n)``; ``None`` for zero.
        row_wise: Whether each row has its own gain. Without batch dimensions the shape does not show it.

    Raises:
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"rescale: no rule for {type(value).__name__}; register one with @rescale.register")


@rescale.register
def _(value: Tensor, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False) -> Tensor:
    return mean


@rescale.register
def _(
    value: DiagonalMoments, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False
) -> DiagonalMoments:
    variance = value.variance * gain.square()
    return DiagonalMoments(mean, variance if added is None else variance + added, event_dims=value.event_dims)


@rescale.register
def _(
    value: FullMoments, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False
) -> FullMoments:
    covariance = value.covariance * gain.unsqueeze(-1) * gain.unsqueeze(-2)
    return FullMoments(mean, covariance if added is None else covariance + torch.diag_embed(added))


@rescale.register
def _(
    value: FactoredMoments, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False
) -> FactoredMoments:
    blocks = value.map_blocks(lambda block: block.scaled(gain, row_wise))
    residual = added
    if value.residual is not None:
        square = gain.square()
        residual = value.residual * square if added is None else torch.addcmul(added, square, value.residual)
    return replace(value, mean=mean, blocks=blocks, residual=residual, merged=value.residual_sources)


def check_constant(caller: str, value: Moments, constant: Tensor) -> None:
    """Check that a constant tensor broadcasts to the mean of moments without adding features or rows.

    Raises:
        InputError: It does not.
    """
    try:
        constant.expand(value.mean.shape)
    except RuntimeError:
        raise InputError(
            f"{caller}: a constant of shape {tuple(constant.shape)} does not fit moments whose mean has shape "
            f"{tuple(value.mean.shape)}; it may be a number or have shape ({value.features},)"
        ) from None
