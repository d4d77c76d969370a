"""Linear maps with independent Gaussian weights; the first two moments are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments
from mpgelu.moments.products import linear_map
from mpgelu.rules.linear import linear


@singledispatch
def gaussian_linear(
    value: Any, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> Any:
    r"""Return the moments of :math:`W h + b` for independent Gaussian entries of W and b, independent of :math:`h`.

    .. math:: M m + \bar b, \qquad M C M^\top + \operatorname{diag}(V (m^2 + v) + V_b)

    with :math:`M, V` the means and variances of the weights. Exact for full and factored moments; diagonal moments
    drop the correlations of :math:`M C M^\top`. For a plain tensor the mean weights are used.

    Args:
        value: A tensor or moments with n features.
        weight: Means M of the weights, ``(outputs, n)``.
        weight_variance: Variances V of the weights, ``(outputs, n)``.
        bias: Means of the biases, ``(outputs,)``, or ``None``.
        bias_variance: Variances of the biases, ``(outputs,)``, or ``None``.

    Raises:
        InputError: The number of features or the dtype does not fit the weights.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(
        f"gaussian_linear: no rule for {type(value).__name__}; register one with @gaussian_linear.register"
    )


@gaussian_linear.register
def _(
    value: Tensor, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> Tensor:
    mean: Tensor = linear(value, weight, bias)
    return mean


@gaussian_linear.register
def _(
    value: DiagonalMoments, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> DiagonalMoments:
    moments: DiagonalMoments = linear(value, weight, bias)
    return replace(moments, variance=moments.variance + variance_of_weights(value, weight_variance, bias_variance))


@gaussian_linear.register
def _(
    value: FullMoments, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> FullMoments:
    moments: FullMoments = linear(value, weight, bias)
    added = torch.diag_embed(variance_of_weights(value, weight_variance, bias_variance))
    return replace(moments, covariance=moments.covariance + added)


@gaussian_linear.register
def _(
    value: FactoredMoments, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> FactoredMoments | FullMoments:
    moments: FactoredMoments | FullMoments = linear(value, weight, bias)
    added = variance_of_weights(value, weight_variance, bias_variance)
    if isinstance(moments, FullMoments):  # the linear rule found the dense form cheaper
        return replace(moments, covariance=moments.covariance + torch.diag_embed(added))
    return replace(moments, residual=added)


def variance_of_weights(value: Moments, weight_variance: Tensor, bias_variance: Tensor | None) -> Tensor:
    """Return the variance that the random weights add to each output, ``(*batch, outputs)``."""
    return linear_map(value.mean.square() + value.variance, weight_variance, bias_variance)
