"""Multiplication by known factors, and the step that every elementwise rule ends with."""

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
    r"""Moments of :math:`g \circ h` for a known :math:`g`.

    .. math:: g\, m, \qquad g_i g_j C_{ij}

    Exact for every kind of moments.

    Args:
        value: A tensor or moments with n features.
        gain: A number, ``(n,)`` or anything that broadcasts to the mean without enlarging it.
    """
    raise MissingRuleError(f"scale: no rule for {type(value).__name__}; register one with @scale.register")


@scale.register
def _(value: Tensor, gain: Tensor | float) -> Tensor:
    return value * gain


@scale.register(DiagonalMoments)
@scale.register(FullMoments)
@scale.register(FactoredMoments)
def _(value: Moments, gain: Tensor | float) -> Moments:
    gain = torch.as_tensor(gain, dtype=value.mean.dtype, device=value.mean.device)
    row_wise = gain.dim() > 1
    check_constant("scale", value, gain)
    gain = gain.expand(value.mean.shape if row_wise else value.features)
    rescaled: Moments = rescale(value, value.mean * gain, gain, row_wise=row_wise)
    return rescaled


@singledispatch
def rescale(value: Any, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False) -> Any:
    r"""Moments with a new mean and the covariance :math:`g_i g_j C_{ij} + \delta_{ij}\, e_i`.

    The building block of rules for nonlinear functions: a best linear fit with gain g and an independent rest. Such a
    rule can be registered once for :class:`Moments`. A plain tensor is known exactly and becomes ``mean``.

    Args:
        value: A tensor or moments with n features.
        mean: ``(*batch, n)``.
        gain: g, ``(n,)`` or ``(*batch, n)``.
        added: e, variance that each unit gets of its own, ``(*batch, n)``; ``None`` for none.
        row_wise: Whether each row has its own gain; without batch dimensions the shape does not show it.
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
    return DiagonalMoments(mean, variance if added is None else variance + added, value.event_dims)


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
        residual = value.residual * gain.square()
        residual = residual if added is None else residual + added
    return replace(value, mean=mean, blocks=blocks, residual=residual, merged=value.residual_sources)


def check_constant(caller: str, value: Moments, constant: Tensor) -> None:
    """A known tensor that meets moments must not add features or rows to them."""
    try:
        constant.expand(value.mean.shape)
    except RuntimeError:
        raise InputError(
            f"{caller}: a constant of shape {tuple(constant.shape)} does not fit moments whose mean has shape "
            f"{tuple(value.mean.shape)}; it may be a number or have shape ({value.features},)"
        ) from None
