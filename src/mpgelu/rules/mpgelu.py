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
    r"""Moments of :math:`\epsilon \circ h`, :math:`\epsilon_i \sim \operatorname{Bernoulli}(k_i)` independent of h.

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
    variance = torch.addcmul(keep * value.variance, mean, value.mean - mean)
    return DiagonalMoments(mean, variance, value.event_dims)


@mpgelu.register
def _(value: FullMoments) -> FullMoments:
    keep, mean, added = _mask(value.mean, value.variance)
    covariance = value.covariance * keep.unsqueeze(-1) * keep.unsqueeze(-2)
    return FullMoments(mean, covariance + torch.diag_embed(added))


@mpgelu.register
def _(value: FactoredMoments) -> FactoredMoments:
    keep, mean, residual = _mask(value.mean, value.variance)
    if value.residual is not None:
        residual = torch.addcmul(residual, keep * keep, value.residual)
    return replace(
        value,
        mean=mean,
        blocks=value.map_blocks(lambda block: block.scaled(keep, row_wise=True)),
        residual=residual,
        merged=value.residual_sources,
    )


def _mask(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep-probability, mean after the mask, and what the mask adds to each variance: ``k (1 - k)(v + m^2)``."""
    keep = keep_probability(mean, variance)
    after, kept = keep * mean, keep * variance
    return keep, after, torch.addcmul((1 - keep) * kept, after, mean - after)
