"""Dropout as a random operation: an independent Bernoulli mask on every unit."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import FullMoments, Moments
from mpgelu.rules.scale import rescale


def dropout(value: Any, rate: Tensor | float, rescale: bool = True) -> Any:
    r"""Moments of :math:`\xi \circ h` with :math:`\xi_i` zero with probability ``rate``, otherwise one, or
    :math:`1/(1-p)` when rescaled.

    Exact for every kind of moments. A plain tensor meets the mean of the mask, so that with ``rescale`` nothing
    happens to it.

    Args:
        value: A tensor or moments.
        rate: Probability p of dropping a unit, in [0, 1).
        rescale: Divide what is kept by 1 - p, as ``torch.nn.Dropout`` does; the paper does not.
    """  # noqa: D205
    return multiply(value, *mask_moments(rate, rescale))


def mask_moments(rate: Tensor | float, rescale: bool) -> tuple[Tensor | float, Tensor | float]:
    r"""Return the mean and the variance of the factors by which dropout multiplies the units.

    Args:
        rate: Probability p of dropping a unit.
        rescale: Whether the kept units are divided by 1 - p.

    Returns:
        :math:`(1,\; p / (1 - p))` if rescaled, otherwise :math:`(1 - p,\; p (1 - p))`.
    """
    keep = 1 - rate
    one = torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0
    return (one, rate / keep) if rescale else (keep, rate * keep)


@singledispatch
def multiply(value: Any, gain: Tensor | float, noise: Tensor | float) -> Any:
    r"""Return the moments of :math:`\xi \circ h` for independent :math:`\xi_i` of mean ``gain`` and variance ``noise``.

    .. math:: g\, m, \qquad g_i g_j C_{ij} + \delta_{ij}\, n_i (v_i + m_i^2)

    Exact for every type of moments. A plain tensor is multiplied by the gain.

    Args:
        value: A tensor or moments with n features.
        gain: Mean g of the factors; a number or ``(n,)``.
        noise: Variance n of the factors; a number or ``(n,)``.

    Raises:
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"multiply: no rule for {type(value).__name__}; register one with @multiply.register")


@multiply.register
def _(value: Tensor, gain: Tensor | float, noise: Tensor | float) -> Tensor:
    return value * gain


@multiply.register
def _(value: FullMoments, gain: Tensor | float, noise: Tensor | float) -> FullMoments:
    gain = torch.as_tensor(gain, dtype=value.mean.dtype, device=value.mean.device)
    gains = gain * gain if gain.dim() == 0 else gain.unsqueeze(-1) * gain
    second = value.variance + value.mean.square()
    return FullMoments(value.mean * gain, value.covariance * gains + torch.diag_embed(second * noise))


@multiply.register
def _(value: Moments, gain: Tensor | float, noise: Tensor | float) -> Moments:
    gains = torch.as_tensor(gain, dtype=value.mean.dtype, device=value.mean.device).expand(value.features)
    second = value.variance + value.mean.square()
    masked: Moments = rescale(value, value.mean * gain, gains, second * noise)
    return masked
