"""A mixture of Gaussians whose weights, means and variances are outputs of the network, for multimodal targets."""

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

LARGEST_LOG_VARIANCE = 60.0  # of a component in a prediction, so that its variance is finite in float32 for any outputs


@likelihoods.register("components")
class GaussianMixture(Likelihood):
    r"""A mixture of K Gaussians around a common location, with ``1 + 3 K`` outputs.

    .. math:: y \mid h \sim \sum_k \pi_k\, N(m_k, e^{s_k}), \qquad
        \pi = \operatorname{softmax}(a), \qquad m_k = h_0 + o_k, \qquad h = (h_0, a, o, s)

    The outputs are, in this order, the location :math:`h_0`, K logits a, K offsets o and K log-variances s. The
    location shifts all components together, so that its variance represents uncertainty about the position of the
    distribution without uncertainty about its shape.

    There is no sampling. For Gaussian h,

    - everything is exact if the outputs are deterministic;
    - mean, variance and both parts of the variance are exact if the logits are deterministic, and the whole
      distribution if the log-variances are, too;
    - otherwise the weights are those at the mean logits, and the epistemic part is of first order in the logits.

    Args:
        components: Number of components K, at least one.

    Raises:
        InputError: The number of components is smaller than one.
    """

    def __init__(self, components: int = 6) -> None:
        super().__init__()
        if not components >= 1:
            raise InputError(f"GaussianMixture: components must be at least 1, got {components}")
        self.components = int(components)
        self.outputs = 1 + 3 * self.components

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""Return a lower bound of the expectation of :math:`\log p(y \mid h)` over :math:`h \sim N(\mu, S)`.

        .. math:: \log \sum_k \exp\Big( \mu_{a_k} - \log \sum_j e^{\mu_{a_j} + S_{a_j a_j}/2}
            + \mathrm E \log N(y; m_k, e^{s_k}) \Big)

        The bound follows from two applications of Jensen's inequality. The logarithm of a sum of exponentials is
        convex, so that the expectation of the log density of each component may be taken inside; and the logarithm is
        concave, which bounds the normaliser of the weights. The last term is that of :class:`HeteroscedasticGaussian`.
        The bound is exact for deterministic outputs, and for one component with a deterministic logit for all Gaussian
        h.

        Args:
            moments: Moments of the outputs, mean ``(*batch, 1 + 3 K)``.
            y: Targets, ``(*batch,)``.

        Returns:
            The bound for each target, ``(*batch,)``.
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
        r"""Return the distribution of y as K Gaussians with the weights, means and variances of the components.

        .. math:: p(y) = \sum_k \pi_k\, N\big(y;\ \mathrm E m_k,\ \operatorname{Var} m_k + \mathrm E e^{s_k}\big),
            \qquad \text{epistemic} = g^\top S g

        with the gradient g of :math:`\sum_k \pi_k m_k`, the mean of the target, with respect to the outputs. The
        aleatoric part is the remainder of the variance of the mixture, due to noise and to the distance between
        components. The class states what is exact.

        Args:
            moments: Moments of the outputs, mean ``(*batch, 1 + 3 K)``.
            nodes: Not used; each component is represented by one Gaussian of the same mean and variance.
        """
        moments = as_moments("GaussianMixture.predictive", moments, self.outputs)
        h = self._joint(moments)
        log_weights = torch.log_softmax(h.logits, -1)
        weights = log_weights.exp()
        center, deviations = h.centered(weights)
        noises = torch.exp((h.log_noises + h.log_noise_variances / 2).clamp_max(LARGEST_LOG_VARIANCE))
        noise = (weights * noises).sum(-1)
        between = (weights * (h.mean_variances + deviations.square())).sum(-1)
        epistemic = torch.minimum(_variance_along(moments, self._direction(weights, deviations)), between)
        variances = h.mean_variances + noises
        return Predictive(h.means, variances, log_weights, center, epistemic, noise + between - epistemic)

    def short(self, moments: Moments | Tensor) -> Predictive:
        """Return :meth:`predictive`, which has few components already."""
        return self.predictive(moments)

    def mean_direction(self, moments: Moments) -> Tensor:
        r"""Return the gradient of the mean by the outputs, :math:`(1,\ \pi_k (m_k - \bar m),\ \pi_k,\ 0)`."""
        h = self._joint(moments)
        weights = torch.softmax(h.logits, -1)
        return self._direction(weights, h.centered(weights)[1])

    def initialise(self, weight: Tensor, bias: Tensor) -> None:
        """Start with equal weights, components spread over the scaled target and noise of half its scale."""
        count = self.components
        weight[1:].mul_(0.1)
        bias.zero_()
        if count > 1:
            bias[1 + count : 1 + 2 * count] = torch.linspace(-1, 1, count, device=bias.device)
        bias[1 + 2 * count :] = math.log(0.25)

    def _joint(self, moments: Moments) -> _Joint:
        """Return the moments of logits, means and log-variances of the components, without unused covariances."""
        count = self.components
        first, logits, offsets, log_noises = torch.split(moments.mean, [1, count, count, count], -1)
        v0, va, vo, vs = torch.split(moments.variance, [1, count, count, count], -1)
        spread, cross = v0 + vo, torch.zeros_like(vs)
        if not _is_diagonal(moments):
            a, b, c = 1 + count, 1 + 2 * count, 1 + 3 * count
            covariance = moments.covariance
            spread = spread + 2 * covariance[..., 0, a:b]
            cross = covariance[..., 0, b:c] + covariance[..., a:b, b:c].diagonal(dim1=-2, dim2=-1)
        return _Joint(logits, first, offsets, log_noises, va, spread, vs, cross)

    def _direction(self, weights: Tensor, deviations: Tensor) -> Tensor:
        """Return the gradient of :meth:`mean_direction` from weights and deviations of the components."""
        of_location = torch.ones_like(weights[..., :1])
        return torch.cat([of_location, weights * deviations, weights, torch.zeros_like(weights)], -1)


class _Joint(NamedTuple):
    """Moments of logits a, means m and log-variances s of the components, ``(*batch, K)`` each.

    Attributes:
        logits: Means of a.
        location: Mean of the location, ``(*batch, 1)``.
        offsets: Means of the offsets; with the location they are the means of m.
        log_noises: Means of s.
        logit_variances: Variances of a.
        mean_variances: Variances of m.
        log_noise_variances: Variances of s.
        mean_noise_covariances: Covariances of m and s of the same component.
    """

    logits: Tensor
    location: Tensor
    offsets: Tensor
    log_noises: Tensor
    logit_variances: Tensor
    mean_variances: Tensor
    log_noise_variances: Tensor
    mean_noise_covariances: Tensor

    @property
    def means(self) -> Tensor:
        """Means of m."""
        return self.location + self.offsets

    def centered(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of the mixture, ``(*batch,)``, and the deviations of its components from it.

        The deviations come from the offsets, so that a location far from zero does not round them.
        """
        center = (weights * self.offsets).sum(-1, keepdim=True)
        return (self.location + center).squeeze(-1), self.offsets - center


def _variance_along(moments: Moments, direction: Tensor) -> Tensor:
    """Return the variance of a linear combination of the outputs, ``(*batch,)``."""
    if _is_diagonal(moments):
        return (direction.square() * moments.variance).sum(-1)
    return torch.einsum("...i,...ij,...j->...", direction, moments.covariance, direction)


def _is_diagonal(moments: Moments) -> bool:
    """Return whether the type or structure of moments excludes correlations, so that no dense covariance is needed."""
    return isinstance(moments, DiagonalMoments) or (isinstance(moments, FactoredMoments) and not moments.blocks)
