"""MP-GELU, the paper's nonlinearity: a mask whose keep-probability is the chance that the unit is positive."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules.normal import cdf, standardise


@singledispatch
def mpgelu(value: Any) -> Any:
    r"""Moments of :math:`\epsilon \circ h` for masks :math:`\epsilon_i \sim \operatorname{Bernoulli}(k_i)` independent of h.

    .. math:: k = \Phi(m / \sqrt v), \qquad k\, m, \qquad k_i k_j C_{ij} + \delta_{ij}\, k_i (1 - k_i)(v_i + m_i^2)

    Section 2.2 of the paper. Exact for every kind of moments: the nonlinearity acts on the statistics, which are
    known numbers, and the mask is a dropout. With unit variance the mean is GELU of the mean. At zero variance it is
    ReLU, which is also what a plain tensor meets.

    Args:
        value: a tensor or moments with n features.
    """
    raise MissingRuleError(f"mpgelu: no rule for {type(value).__name__}; register one with @mpgelu.register")


def keep_probability(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Probability :math:`k = \Phi(m / \sqrt v)` that a Gaussian unit is positive, equation (3) of the paper."""
    ratio, _ = standardise(mean, variance)
    return cdf(ratio)


@mpgelu.register
def _(value: Tensor) -> Tensor:
    return torch.relu(value)


@mpgelu.register
def _(value: DiagonalMoments) -> DiagonalMoments:
    keep = keep_probability(value.mean, value.variance)
    mean = keep * value.mean
    return DiagonalMoments(mean, torch.addcmul(keep * value.variance, mean, value.mean - mean))


@mpgelu.register
def _(value: FullMoments) -> FullMoments:
    variance = value.variance
    keep = keep_probability(value.mean, variance)
    mean = keep * value.mean
    added = torch.diag_embed(_mask_variance(keep, variance, mean, value.mean))
    return FullMoments(mean, value.covariance * keep.unsqueeze(-1) * keep.unsqueeze(-2) + added)


@mpgelu.register
def _(value: FactoredMoments) -> FactoredMoments:
    variance = value.variance
    keep = keep_probability(value.mean, variance)
    mean = keep * value.mean
    residual = _mask_variance(keep, variance, mean, value.mean)
    if value.residual is not None:
        residual = residual + keep.square() * value.residual
    return replace(value, mean=mean, blocks=value.map_blocks(lambda block: block.scaled(keep)), residual=residual)


def _mask_variance(keep: Tensor, variance: Tensor, mean_after: Tensor, mean_before: Tensor) -> Tensor:
    """What the mask adds to each unit's variance, ``k (1 - k)(v + m^2)``, from products already at hand."""
    kept = keep * variance
    return torch.addcmul(torch.addcmul(kept, keep, kept, value=-1), mean_after, mean_before - mean_after)
