"""MP-GELU, the nonlinearity of the paper: a mask that keeps a unit with the probability that the unit is positive."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.rules.normal import cdf, standardise
from mpgelu.rules.scale import rescale


@singledispatch
def mpgelu(value: Any) -> Any:
    r"""Return moments of :math:`\epsilon \circ h`, independent :math:`\epsilon_i \sim \operatorname{Bernoulli}(k_i)`.

    .. math:: k = \Phi(m / \sqrt v), \qquad k\, m, \qquad k_i k_j C_{ij} + \delta_{ij}\, k_i (1 - k_i)(v_i + m_i^2)

    This is section 2.2 of the paper. It is exact for every type of moments: the nonlinearity acts on the statistics,
    which are known numbers, and the mask is a dropout. At unit variance the mean is GELU of the mean. At zero variance
    the operation is ReLU, which is also what a plain tensor gets.

    Args:
        value: A tensor or moments with n features.

    Raises:
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"mpgelu: no rule for {type(value).__name__}; register one with @mpgelu.register")


def keep_probability(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Return the probability :math:`k = \Phi(m / \sqrt v)` that a Gaussian unit is positive (equation 3).

    Args:
        mean: Means m, any shape.
        variance: Variances v of the same shape; at zero, k is 0, 1/2 or 1 by the sign of the mean.
    """
    ratio, _ = standardise(mean, variance)
    return cdf(ratio)


@mpgelu.register
def _(value: Tensor) -> Tensor:
    return torch.relu(value)


@mpgelu.register
def _(value: DiagonalMoments) -> DiagonalMoments:
    keep = keep_probability(value.mean, value.variance)
    mean = keep * value.mean
    variance = torch.addcmul(keep * value.variance, mean, value.mean - mean)
    return DiagonalMoments(mean, variance, event_dims=value.event_dims)


@mpgelu.register
def _(value: Moments) -> Moments:
    keep = keep_probability(value.mean, value.variance)
    mean, kept = keep * value.mean, keep * value.variance
    added = torch.addcmul((1 - keep) * kept, mean, value.mean - mean)  # k (1 - k)(v + m^2) without cancellation
    masked: Moments = rescale(value, mean, keep, added, row_wise=True)
    return masked
