"""Quadrature nodes for expectations over a normal variable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NODES = 32  # components of a mixture over an uncertain noise variance, unless a caller asks for fewer


def normal_nodes(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return nodes and log weights for an expectation over :math:`z \sim N(0, 1)`, ``(count,)`` each.

    The nodes are those of the trapezoidal rule in t with :math:`z \propto \sinh t`. For the narrow components of
    strongly correlated outputs 32 of them are more accurate than 48 Gauss-Hermite nodes, many of which lie where the
    normal density is negligible. The outermost node balances the truncation of the tail against the spacing; it was
    found by experiment.

    Args:
        count: Number of nodes.
        like: Tensor whose dtype and device the nodes get.
    """
    t = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device) if count > 1 else like.new_zeros(1)
    z = torch.sinh(t) * (min(1.2 * math.sqrt(count), 8.0) / math.sinh(1))
    return z, torch.log_softmax(torch.cosh(t).log() - 0.5 * z.square(), 0)


def heteroscedastic_components(mean: Tensor, covariance: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the Gaussian components of :math:`y \mid h \sim N(h_1, e^{h_2})` with :math:`h \sim N(E, S)`.

    With :math:`h_2 = E_2 + \sqrt{S_{22}}\, z` at node z the component is

    .. math:: N\Big(E_1 + \frac{S_{12}}{\sqrt{S_{22}}}\, z,\ S_{11} - \frac{S_{12}^2}{S_{22}} + e^{h_2}\Big).

    A conditional variance that is negative by rounding is set to zero; its gradient is kept.

    Args:
        mean: Means E, ``(*batch, 2)``.
        covariance: Covariance S, ``(*batch, 2, 2)``.
        nodes: Number of components K.

    Returns:
        Means and variances of the components, ``(*batch, K)``, and their log weights, ``(K,)``.
    """
    mean1, mean2 = mean.unbind(-1)
    variance1, covariance12, variance2 = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    uncertain = variance2 > 0
    stddev2 = torch.where(uncertain, variance2, 1.0).sqrt()
    slope = torch.where(uncertain, covariance12 / stddev2, 0.0)
    conditional = variance1 - slope.square()
    conditional = conditional + (conditional.clamp_min(0) - conditional).detach()
    z, log_weights = normal_nodes(nodes, mean)
    h2 = mean2[..., None] + torch.where(uncertain, stddev2, 0.0)[..., None] * z
    return mean1[..., None] + slope[..., None] * z, conditional[..., None] + h2.exp(), log_weights
