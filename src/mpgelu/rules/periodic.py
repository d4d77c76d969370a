"""Periodic embedding: each feature followed by learned combinations of its cosines, exact for Gaussian features."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import Block, DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments.products import full_precision


@singledispatch
def periodic(value: Any, frequency: Tensor, phase: Tensor, weight: Tensor) -> Any:
    r"""Return the moments of :math:`(x_j,\; W_j^\top \cos A_j)` with :math:`A_{ji} = 2\pi(w_{ji} x_j + b_{ji})`.

    For Gaussian :math:`x` all moments are closed forms. With :math:`V = \operatorname{Var} A` and
    :math:`Q = \operatorname{Cov}(A, B)` of two angles, of one feature or of two,

    .. math:: \mathrm E \cos A = \cos(\mathrm E A)\, e^{-V_A/2}, \qquad
        \operatorname{Cov}(x, \cos A) = -\operatorname{Cov}(x, A) \sin(\mathrm E A)\, e^{-V_A/2},

    .. math:: \operatorname{Cov}(\cos A, \cos B) = e^{-(V_A + V_B)/2}
        \big[\cos \mathrm E A \cos \mathrm E B\,(\cosh Q - 1) + \sin \mathrm E A \sin \mathrm E B\, \sinh Q\big]

    The result is exact for full moments; diagonal moments have the exact marginals. Factored moments of independent
    features (a residual and no blocks) stay factored and exact. With correlated features they become full or, with
    ``max_rank=math.inf``, stay factored and exact by a joint factorisation of all outputs. Certain moments
    stay certain. Expectations are computed in float64 and returned in the dtype of the input.

    Args:
        value: A tensor or moments with n features.
        frequency: Frequencies w in cycles per unit of the feature, ``(n, k)``.
        phase: Phases b in cycles, ``(n, k)``.
        weight: Coefficients W of the cosines, ``(n, k, d)``.

    Returns:
        ``n (1 + d)`` features: each input feature, followed by its d combinations of cosines.

    Raises:
        InputError: The number of features or the dtype does not fit the frequencies.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"periodic: no rule for {type(value).__name__}; register one with @periodic.register")


@periodic.register
def _(value: Tensor, frequency: Tensor, phase: Tensor, weight: Tensor) -> Tensor:
    _check(value, frequency)
    cosines = torch.cos(2 * math.pi * (value.unsqueeze(-1) * frequency + phase))  # (*batch, n, k)
    return _beside(value, cosines, weight).flatten(-2)


@periodic.register
def _(value: DiagonalMoments, frequency: Tensor, phase: Tensor, weight: Tensor) -> DiagonalMoments:
    _check(value.mean, frequency)
    if value.is_certain:
        return DiagonalMoments.certain(periodic(value.mean, frequency, phase, weight), event_dims=value.event_dims)
    fit = fit_apart(value.mean, value.variance, frequency, phase, weight)
    variance = fit.gain.square() * value.variance.unsqueeze(-1) + fit.added
    return DiagonalMoments(fit.mean.flatten(-2), variance.flatten(-2).to(value.mean.dtype), event_dims=value.event_dims)


@periodic.register
def _(value: FullMoments, frequency: Tensor, phase: Tensor, weight: Tensor) -> FullMoments:
    _check(value.mean, frequency)
    if value.is_certain:
        return FullMoments.certain(periodic(value.mean, frequency, phase, weight))
    fit = _fit_together(value.mean, value.covariance, frequency, phase, weight)
    n, _, d = weight.shape
    rest = F.pad(fit.rest.reshape(*value.batch_shape, n, d, n, d), (1, 0, 0, 0, 1, 0))
    covariance = _outer(fit.gain) * value.covariance[..., :, None, :, None] + rest  # (*batch, n, 1 + d, n, 1 + d)
    return FullMoments(fit.mean.flatten(-2), covariance.flatten(-2).flatten(-3, -2).to(value.mean.dtype))


@periodic.register
def _(value: FactoredMoments, frequency: Tensor, phase: Tensor, weight: Tensor) -> FactoredMoments | FullMoments:
    if value.is_certain:
        return replace(value, mean=periodic(value.mean, frequency, phase, weight))
    if value.blocks and value.max_rank != math.inf:
        full: FullMoments = periodic(FullMoments.from_moments(value), frequency, phase, weight)
        return full
    _check(value.mean, frequency)
    blocks = value.blocks
    if value.residual is not None:
        blocks = (
            *blocks,
            Block(torch.eye(value.features, dtype=value.mean.dtype, device=value.mean.device), value.residual),
        )
    if value.blocks:
        fit = _fit_together(value.mean, value.covariance, frequency, phase, weight)
    else:
        fit = fit_apart(value.mean, value.variance, frequency, phase, weight)
    carried = tuple(Block(_gained(block, fit.gain), block.variance, row_wise=True) for block in blocks)
    return replace(value, mean=fit.mean.flatten(-2), blocks=(*carried, _rest_block(fit)), residual=None)


# The embedding as its best linear fit


class EmbeddingFit(NamedTuple):
    r"""The best linear fit of the embedding of Gaussian features, :math:`\bar y + g\,(x_j - m_j) + e`.

    The residual :math:`e` is uncorrelated with all features, and zero for the feature itself. Its covariance is stored
    for groups of features whose residuals are uncorrelated: either every feature is a group, or all features are one.

    Attributes:
        mean: Expectation :math:`\bar y`, ``(*batch, n, 1 + d)``.
        gain: Slope g, ``(*batch, n, 1 + d)``.
        rest: Covariance of e in float64, ``(*batch, groups, size d, size d)`` for groups of ``size`` features.
    """

    mean: Tensor
    gain: Tensor
    rest: Tensor

    @property
    def added(self) -> Tensor:
        """Variance of the residual, ``(*batch, n, 1 + d)``; defined if each feature is a group."""
        return F.pad(self.rest.diagonal(dim1=-2, dim2=-1), (1, 0))


def fit_apart(mean: Tensor, variance: Tensor, frequency: Tensor, phase: Tensor, weight: Tensor) -> EmbeddingFit:
    """Return the fit for independent features, each of which is a group.

    Args:
        mean: Means, ``(*batch, n)``.
        variance: Variances, ``(*batch, n)``.
        frequency: Frequencies, ``(n, k)``.
        phase: Phases, ``(n, k)``.
        weight: Coefficients, ``(n, k, d)``.
    """
    parameters = (part.unsqueeze(1) for part in (frequency, phase, weight))
    return _fit(mean.unsqueeze(-1), variance[..., None, None], *parameters)


def _fit_together(mean: Tensor, covariance: Tensor, frequency: Tensor, phase: Tensor, weight: Tensor) -> EmbeddingFit:
    """Return the fit with all features in one group, for means ``(*batch, n)`` and covariances ``(*batch, n, n)``."""
    parameters = (part.unsqueeze(0) for part in (frequency, phase, weight))
    return _fit(mean.unsqueeze(-2), covariance.unsqueeze(-3), *parameters)


def _fit(mean: Tensor, covariance: Tensor, frequency: Tensor, phase: Tensor, weight: Tensor) -> EmbeddingFit:
    """Return the fit; all arguments have a dimension of groups before that of features."""
    dtype = mean.dtype
    mean, covariance, frequency, phase, weight = (t.double() for t in (mean, covariance, frequency, phase, weight))
    slope = 2 * math.pi * frequency
    angle = slope * mean.unsqueeze(-1) + 2 * math.pi * phase  # (*batch, groups, features, k)
    spread = slope.square() * covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # V
    cos, sin, damping = angle.cos(), angle.sin(), torch.exp(-spread / 2)
    pairs = _rest(cos, sin, spread, _outer(slope) * covariance[..., :, None, :, None])
    rest = _combined_pairs(pairs, weight).flatten(-2).flatten(-3, -2)
    variance = rest.diagonal(dim1=-2, dim2=-1)
    missing = torch.where(variance < 0, -variance, 0)  # by rounding

    def beside(value: Tensor, cosines: Tensor) -> Tensor:
        return _beside(value.flatten(-2), cosines.flatten(-3, -2), weight.flatten(0, 1)).to(dtype)

    return EmbeddingFit(
        beside(mean, cos * damping),
        beside(torch.ones_like(mean), -slope * sin * damping),
        rest + torch.diag_embed(missing),
    )


def _rest(cos: Tensor, sin: Tensor, spread: Tensor, covariance: Tensor) -> Tensor:
    r"""Return the covariance of all pairs of cosines that a linear function of the features does not explain.

    .. math:: e^{-(V_A + V_B)/2} \big[\cos A \cos B\,(\cosh Q - 1) + \sin A \sin B\,(\sinh Q - Q)\big]

    The factor :math:`e^{|Q|}` is extracted, so that large variances do not overflow and small ones do not cancel.

    Args:
        cos: Cosines of the mean angles, ``(*batch, n, k)``.
        sin: Sines of the mean angles, ``(*batch, n, k)``.
        spread: Variances V of the angles, ``(*batch, n, k)``.
        covariance: Covariances Q of the angles, ``(*batch, n, k, n, k)``.
    """
    sign = torch.where(covariance < 0, -1.0, 1.0)  # never 0, or second derivatives at Q = 0 would be lost
    size = sign * covariance
    half = (spread[..., :, :, None, None] + spread[..., None, None, :, :]) / 2
    scale = torch.exp((size - half).clamp_max(0))  # |Q| <= (V_A + V_B) / 2; the clamp is for rounding
    fall = -torch.expm1(-size)
    decay = 1 - fall
    even, odd = fall.square() / 2, fall * (1 + decay) / 2 - size * decay
    return scale * (_outer(cos) * even + sign * _outer(sin) * odd)


@full_precision
def _beside(value: Tensor, cosines: Tensor, weight: Tensor) -> Tensor:
    """Return the features with the combinations of their cosines, ``(*batch, n, 1 + d)``."""
    rows = cosines.reshape(-1, *cosines.shape[-2:])  # ONNX wants every dimension of einsum named
    combined = torch.einsum("bnk,nkd->bnd", rows, weight).reshape(*value.shape, weight.shape[-1])
    # A sum of padded tensors, since torch.cat inside vmap fixes the number of rows of a traced graph.
    return F.pad(value.unsqueeze(-1), (0, weight.shape[-1])) + F.pad(combined, (1, 0))


@full_precision
def _combined_pairs(pairs: Tensor, weight: Tensor) -> Tensor:
    """Return the covariances of the combinations, from those of the cosines ``(*batch, groups, size, k, size, k)``."""
    rows = pairs.reshape(-1, *pairs.shape[-5:])
    # Two operands at a time: with three, the package opt_einsum would fix the number of rows of a traced graph.
    half = torch.einsum("bgikjl,gikd->bgidjl", rows, weight)
    combined = torch.einsum("bgidjl,gjle->bgidje", half, weight)
    return combined.reshape(*pairs.shape[:-5], *combined.shape[1:])


def _outer(value: Tensor) -> Tensor:
    """Return the products of all pairs of entries of matrices, ``(*batch, n, k, n, k)``."""
    return value[..., :, :, None, None] * value[..., None, None, :, :]


# Blocks


def _gained(block: Block, gain: Tensor) -> Tensor:
    """Return the factor of a block after the linear part of the fit, ``(*batch, rank, n (1 + d))``."""
    return (block.scaled_factor.unsqueeze(-1) * gain.unsqueeze(-3)).flatten(-2)


def _rest_block(fit: EmbeddingFit) -> Block:
    """Return the residual of the fit as a block with sources of its own."""
    factor, variance = _sources(fit.rest)  # (*batch, groups, rank, features d), (*batch, groups, rank)
    factor = factor.reshape(*factor.shape[:-1], -1, fit.mean.shape[-1] - 1)
    factor = F.pad(factor, (1, 0)).flatten(-2)  # (*batch, groups, rank, features (1 + d))
    places = torch.eye(factor.shape[-3], dtype=factor.dtype, device=factor.device)[:, None, :, None]
    factor = (factor.unsqueeze(-2) * places).flatten(-2).flatten(-3, -2)  # (*batch, all ranks, n (1 + d))
    return Block(factor.to(fit.mean.dtype), variance.flatten(-2).to(fit.mean.dtype), row_wise=True)


def _sources(covariance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return F and d of :math:`C = F^\top \operatorname{diag}(d)\, F`, by the square-root-free Cholesky method.

    Sources whose variance is rounding error are set to zero, so singular matrices, including zero, can be factored.

    Args:
        covariance: Covariances C, ``(*batch, n, n)``.
    """
    n = covariance.shape[-1]
    smallest = n * torch.finfo(covariance.dtype).eps * covariance.diagonal(dim1=-2, dim2=-1)
    rows, variances = [], []
    for i in range(n):
        pivot = covariance[..., 0, 0]
        matters = pivot > smallest[..., i]
        variance = torch.where(matters, pivot, 0)
        row = torch.where(matters.unsqueeze(-1), covariance[..., 0, :], 0) / torch.where(matters, pivot, 1).unsqueeze(
            -1
        )
        rows.append(F.pad(row, (i, 0)))
        variances.append(variance)
        after = row[..., 1:]
        covariance = covariance[..., 1:, 1:] - variance[..., None, None] * after.unsqueeze(-1) * after.unsqueeze(-2)
    return torch.stack(rows, -2), torch.stack(variances, -1)


def _check(value: Tensor, frequency: Tensor) -> None:
    """Raise if the number of features or the dtype of the input does not fit the frequencies."""
    n, came = frequency.shape[0], value.shape[-1] if value.dim() else 0
    if came != n:
        raise InputError(
            f"periodic: frequency embeds {n} features but the input has {came} (frequency {tuple(frequency.shape)}, "
            f"input {tuple(value.shape)}); did you mean Periodic({came})?"
        )
    if value.dtype != frequency.dtype:
        raise InputError(
            f"periodic: frequency is {frequency.dtype} but the input is {value.dtype}; "
            "use x.to(frequency.dtype) or network.to(x.dtype)"
        )
