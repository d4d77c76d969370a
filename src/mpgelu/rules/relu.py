"""ReLU of a Gaussian vector: exact means and variances, and two ways to the covariance."""

from __future__ import annotations

from functools import cache, singledispatch
from typing import Any, Literal

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules.normal import cdf, pdf, standardise
from mpgelu.rules.relu_pairs import dvi_pairs, exact_pairs

Covariance = Literal["exact", "dvi"]


@singledispatch
def relu(value: Any, covariance: Covariance = "exact") -> Any:
    r"""Moments of :math:`\max(h, 0)` for Gaussian :math:`h`.

    With :math:`a = m / s`, :math:`s = \sqrt v` and :math:`\mathrm{SR}(a) = \varphi(a) + a \Phi(a)`:

    .. math:: s\,\mathrm{SR}(a), \qquad v\,[\Phi(a) - \mathrm{SR}(a)\,\mathrm{SR}(-a)]

    Means and variances are exact for a Gaussian input. Covariances are exact to the quadrature error
    (2e-6 of s1 s2) or follow the DVI approximation (1.2e-2), the paper's baseline. Factored moments become full ones.

    Args:
        value: a tensor or moments with n features.
        covariance: ``"exact"`` or ``"dvi"``, for full and factored moments.
    """
    raise MissingRuleError(f"relu: no rule for {type(value).__name__}; register one with @relu.register")


@relu.register
def _(value: Tensor, covariance: Covariance = "exact") -> Tensor:
    return torch.relu(value)


@relu.register
def _(value: DiagonalMoments, covariance: Covariance = "exact") -> DiagonalMoments:
    mean, variance, _, _ = _marginals(value.mean, value.variance)
    return DiagonalMoments(mean, variance)


@relu.register
def _(value: FullMoments, covariance: Covariance = "exact") -> FullMoments:
    mean, variance, ratio, stddev = _marginals(value.mean, value.variance)
    first, second, slots = _pairs(value.features, value.mean.device)
    scale = stddev[..., first] * stddev[..., second]
    correlation = (value.covariance.flatten(-2)[..., first * value.features + second] / scale).clamp(-1, 1)
    pairs = exact_pairs if covariance == "exact" else dvi_pairs
    below = scale * pairs(ratio[..., first], ratio[..., second], correlation)
    return FullMoments(mean, torch.cat([variance, below], dim=-1)[..., slots])


@relu.register
def _(value: FactoredMoments, covariance: Covariance = "exact") -> FullMoments:
    full: FullMoments = relu(FullMoments.from_moments(value), covariance)
    return full


def _marginals(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance after ReLU, and the ratio and standard deviation before it."""
    ratio, stddev = standardise(mean, variance)
    probability = cdf(ratio)
    ramp = pdf(ratio) + ratio * probability  # SR(a); SR(-a) = SR(a) - a
    after = mean * probability + torch.where(variance > 0, stddev, 0) * pdf(ratio)
    return after, variance * (probability - ramp * (ramp - ratio)), ratio, stddev


@cache
def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the pairs i < j, and where each entry of the n x n matrix is found in (variances, pairs)."""
    first, second = torch.triu_indices(n, n, offset=1, device=device)
    slots = torch.empty(n, n, dtype=torch.long, device=device)
    slots.fill_diagonal_(0)
    slots.diagonal().copy_(torch.arange(n, device=device))
    slots[first, second] = slots[second, first] = n + torch.arange(len(first), device=device)
    return first, second, slots
