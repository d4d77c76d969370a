"""A mixture of Gaussians whose weights, means and variances the network predicts: targets with several modes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.likelihoods.base import Likelihood, likelihoods
from mpgelu.likelihoods.outputs import as_moments, check_target
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.predictive import Predictive


@likelihoods.register("components")
class GaussianMixture(Likelihood):
    r"""K Gaussians around one location, of any weights, places and widths: ``1 + 3 K`` outputs.

    .. math:: y \mid h \sim \sum_k \pi_k\, N(m_k, e^{s_k}), \qquad
        \pi = \operatorname{softmax}(a), \qquad m_k = h_0 + o_k, \qquad h = (h_0, a, o, s)

    The outputs are, in this order, the location :math:`h_0`, K logits a, K offsets o and K log-variances s. The
    location moves all components together: a network that is sure of the shape of the distribution and unsure of its
    place says so by the variance of this one output.

    Nothing here samples. What is exact for Gaussian h:

    - everything, where the outputs are known;
    - mean, variances and both parts of the variance, where the logits are known; the distribution too, where also the
      log-variances are known;
    - else weights are those at the mean logits, and the epistemic part is of first order in the logits.

    Args:
        components: K, at least one.
    """

    def __init__(self, components: int = 6) -> None:
        super().__init__()
        if not components >= 1:
            raise InputError(f"GaussianMixture: components must be at least 1, got {components}")
        self.components = int(components)
        self.outputs = 1 + 3 * self.components

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""A lower bound of the expectation of :math:`\log p(y \mid h)` over :math:`h \sim N(\mu, S)`, in closed form.

        .. math:: \log \sum_k \exp\Big( \mu_{a_k} - \log \sum_j e^{\mu_{a_j} + S_{a_j a_j}/2}
            + \mathrm E \log N(y; m_k, e^{s_k}) \Big)

        Jensen's inequality twice: the logarithm of a sum of exponentials is convex, which lets the expectation of
        each component's log density inside, and concave in the exponentials, which bounds the normaliser of the
        weights. The last term is that of :class:`HeteroscedasticGaussian`. Exact for known outputs; for one component
        with a known logit it is exact for all Gaussian h.

        Args:
            moments: Of the outputs, mean ``(*batch, 1 + 3 K)``.
            y: Targets ``(*batch,)``.
        """
        caller = "GaussianMixture.expected_log_prob"
        moments = as_moments(caller, moments, self.outputs)
        check_target(caller, moments, y)
        h = self._joint(moments)
        log_weights = h.logits - torch.logsumexp(h.logits + h.logit_variances / 2, -1, keepdim=True)
        squares = h.mean_variances + (h.means - h.mean_noise_covariances - y.unsqueeze(-1)).square()
        precisions = torch.exp(h.log_noise_variances / 2 - h.log_noises)
        log_densities = -0.5 * (math.log(2 * math.pi) + h.log_noises + squares * precisions)
        return torch.logsumexp(log_weights + log_densities, -1)

    def predictive(self, moments: Moments | Tensor, nodes: int = 1) -> Predictive:
        r"""Distribution of y: K Gaussians with the weights, means and variances of the components.

        .. math:: p(y) = \sum_k \pi_k\, N\big(y;\ \mathrm E m_k,\ \operatorname{Var} m_k + \mathrm E e^{s_k}\big),
            \qquad \text{epistemic} = g^\top S g

        with g the derivative of :math:`\sum_k \pi_k m_k`, the mean of the target, by the outputs. The aleatoric part
        is the rest of the mixture's variance: noise, and the distance between components. See the class for what is
        exact.

        Args:
            moments: Of the outputs, mean ``(*batch, 1 + 3 K)``.
            nodes: Not needed: a component stays one Gaussian, of the right mean and variance.
        """
        moments = as_moments("GaussianMixture.predictive", moments, self.outputs)
        h = self._joint(moments)
        log_weights = torch.log_softmax(h.logits, -1)
        weights = log_weights.exp()
        mean = (weights * h.means).sum(-1)
        noises = torch.exp(h.log_noises + h.log_noise_variances / 2)
        noise = (weights * noises).sum(-1)
        between = (weights * (h.mean_variances + (h.means - mean.unsqueeze(-1)).square())).sum(-1)
        epistemic = torch.minimum(_variance_along(moments, self._direction(weights, h.means, mean)), between)
        variances = h.mean_variances + noises
        return Predictive(h.means, variances, log_weights, mean, epistemic, noise + between - epistemic)

    def short(self, moments: Moments | Tensor) -> Predictive:
        """The same distribution: it has few components."""
        return self.predictive(moments)

    def mean_direction(self, moments: Moments) -> Tensor:
        r"""Derivative of the mean of the target by the outputs: :math:`(1,\ \pi_k (m_k - \bar m),\ \pi_k,\ 0)`."""
        h = self._joint(moments)
        weights = torch.softmax(h.logits, -1)
        return self._direction(weights, h.means, (weights * h.means).sum(-1))

    def initialise(self, weight: Tensor, bias: Tensor) -> None:
        """Start with equal weights, components spread over the scaled target and noise of half its scale."""
        count = self.components
        weight[1:].mul_(0.1)
        bias.zero_()
        if count > 1:
            bias[1 + count : 1 + 2 * count] = torch.linspace(-1, 1, count, device=bias.device)
        bias[1 + 2 * count :] = math.log(0.25)

    def _joint(self, moments: Moments) -> _Joint:
        """Means, variances and the covariances that matter, of the components."""
        count = self.components
        first, logits, offsets, log_noises = torch.split(moments.mean, [1, count, count, count], -1)
        v0, va, vo, vs = torch.split(moments.variance, [1, count, count, count], -1)
        spread, cross = v0 + vo, torch.zeros_like(vs)
        if not _is_diagonal(moments):
            a, b, c = 1 + count, 1 + 2 * count, 1 + 3 * count
            covariance = moments.covariance
            spread = spread + 2 * covariance[..., 0, a:b]
            cross = covariance[..., 0, b:c] + covariance[..., a:b, b:c].diagonal(dim1=-2, dim2=-1)
        return _Joint(logits, first + offsets, log_noises, va, spread, vs, cross)

    def _direction(self, weights: Tensor, means: Tensor, mean: Tensor) -> Tensor:
        of_logits = weights * (means - mean.unsqueeze(-1))
        return torch.cat([torch.ones_like(mean).unsqueeze(-1), of_logits, weights, torch.zeros_like(weights)], -1)


class _Joint(NamedTuple):
    """Moments of logits a, means m and log-variances s of the components, each ``(*batch, K)``."""

    logits: Tensor
    means: Tensor
    log_noises: Tensor
    logit_variances: Tensor
    mean_variances: Tensor
    log_noise_variances: Tensor
    mean_noise_covariances: Tensor


def _variance_along(moments: Moments, direction: Tensor) -> Tensor:
    """Variance of a linear combination of the outputs, ``(*batch,)``."""
    if _is_diagonal(moments):
        return (direction.square() * moments.variance).sum(-1)
    return torch.einsum("...i,...ij,...j->...", direction, moments.covariance, direction)


def _is_diagonal(moments: Moments) -> bool:
    """Whether outputs are uncorrelated by their type or structure, which spares dense covariances."""
    return isinstance(moments, DiagonalMoments) or (isinstance(moments, FactoredMoments) and not moments.blocks)
