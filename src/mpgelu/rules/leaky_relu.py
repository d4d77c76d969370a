"""Leaky ReLU of a Gaussian vector, as the sum of a linear function and a ReLU."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, Literal

from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules.activations import Rectifier
from mpgelu.rules.elementwise import elementwise
from mpgelu.rules.mpgelu import keep_probability
from mpgelu.rules.relu import check_covariance, relu

Covariance = Literal["exact", "gain"]


@singledispatch
def leaky_relu(value: Any, negative_slope: float = 0.01, covariance: Covariance = "exact") -> Any:
    r"""Return the moments of :math:`\alpha h + (1 - \alpha) h_+` for Gaussian :math:`h`; :math:`\alpha = 0` is ReLU.

    .. math:: \alpha^2 C_{ij} + \alpha (1 - \alpha)\, C_{ij} (\Phi_i + \Phi_j) + (1 - \alpha)^2
        \operatorname{Cov}(h_{i+}, h_{j+}), \qquad \Phi_i = \Phi(m_i / \sqrt{v_i})

    Means and variances are exact for a Gaussian input. Covariances are exact to the quadrature error of :func:`relu`;
    factored moments then become full ones, unless they are certain. With ``"gain"`` covariances are approximated as in
    :func:`elementwise`, and factored moments stay factored.

    Args:
        value: A tensor or moments with n features.
        negative_slope: The slope :math:`\alpha` for negative values.
        covariance: ``"exact"`` or ``"gain"``; it matters for full and factored moments.

    Raises:
        InputError: ``covariance`` is neither of the two.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"leaky_relu: no rule for {type(value).__name__}; register one with @leaky_relu.register")


@leaky_relu.register(Tensor)
@leaky_relu.register(DiagonalMoments)
def _(value: Tensor | DiagonalMoments, negative_slope: float = 0.01, covariance: Covariance = "exact") -> Any:
    check_covariance("leaky_relu", covariance, Covariance)
    return elementwise(value, Rectifier(negative_slope))


@leaky_relu.register
def _(value: FullMoments, negative_slope: float = 0.01, covariance: Covariance = "exact") -> FullMoments:
    check_covariance("leaky_relu", covariance, Covariance)
    if covariance == "gain":
        fitted: FullMoments = elementwise(value, Rectifier(negative_slope))
        return fitted
    rectified: FullMoments = relu(value)
    if negative_slope == 0:
        return rectified
    keep = keep_probability(value.mean, value.variance)
    linear, bend = negative_slope, 1 - negative_slope
    weights = linear * linear + linear * bend * (keep.unsqueeze(-1) + keep.unsqueeze(-2))
    return FullMoments(
        linear * value.mean + bend * rectified.mean,
        value.covariance * weights + bend * bend * rectified.covariance,
    )


@leaky_relu.register
def _(
    value: FactoredMoments, negative_slope: float = 0.01, covariance: Covariance = "exact"
) -> FactoredMoments | FullMoments:
    check_covariance("leaky_relu", covariance, Covariance)
    if covariance == "gain" or value.is_certain:
        fitted: FactoredMoments = elementwise(value, Rectifier(negative_slope))
        return fitted
    full: FullMoments = leaky_relu(FullMoments.from_moments(value), negative_slope)
    return full
