"""Gaussian observation noise whose variance is an output of the network."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpgelu.likelihoods.base import Likelihood, NoisePart, likelihoods
from mpgelu.likelihoods.outputs import MeanAndLogVariance, as_moments, check_target
from mpgelu.moments import Moments
from mpgelu.predictive import Predictive
from mpgelu.predictive.nodes import NODES


@likelihoods.register()
class HeteroscedasticGaussian(Likelihood):
    r"""Two outputs, mean and log-variance of the target: :math:`y \mid h \sim N(h_1, e^{h_2})`.

    Example:
        >>> import torch, mpgelu
        >>> outputs = mpgelu.DiagonalMoments(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.5, 0.0]]))
        >>> p = HeteroscedasticGaussian().predictive(outputs)
        >>> p.epistemic_variance, p.aleatoric_variance
        (tensor([0.5000]), tensor([1.]))
    """

    outputs = 2

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""The expectation of :math:`\log p(y \mid h)` over :math:`h \sim N(\mu, S)`, ``(*batch,)``; a closed form.

        .. math:: -\tfrac12 \Big\{ \log 2\pi + \mu_2
            + \big(S_{11} + (\mu_1 - S_{12} - y)^2\big)\, e^{S_{22}/2 - \mu_2} \Big\}

        This is equation (1) of the paper, whose second term is misprinted there as :math:`\mu_1`. It is exact for
        Gaussian h.

        Args:
            moments: Moments of the two outputs, mean ``(*batch, 2)``.
            y: Targets, ``(*batch,)``.

        Raises:
            InputError: The network has another number of outputs, or the shape of y is not that of the batch.
        """
        moments = as_moments("HeteroscedasticGaussian.expected_log_prob", moments, 2)
        check_target("HeteroscedasticGaussian.expected_log_prob", moments, y)
        mean, log_variance = MeanAndLogVariance.of(moments.mean)
        s11, s12, _, s22 = moments.covariance.flatten(-2).unbind(-1)
        error, precision = mean - s12 - y, torch.exp(s22 / 2 - log_variance)
        return -0.5 * (math.log(2 * math.pi) + log_variance + (s11 + error * error) * precision)

    def predictive(self, moments: Moments | Tensor, nodes: int = NODES) -> Predictive:
        """The distribution of y: a mixture over the log-variance, each component Gaussian; see :class:`Predictive`.

        Args:
            moments: Moments of the two outputs, mean ``(*batch, 2)``; a tensor of known outputs gives a single
                Gaussian.
            nodes: Number of components of the mixture.
        """
        if isinstance(moments, Tensor):  # known outputs leave one Gaussian
            known = as_moments("HeteroscedasticGaussian.predictive", moments, 2).mean
            mean, log_variance = MeanAndLogVariance.of(known)
            return Predictive.gaussian(mean, torch.zeros_like(mean), log_variance.exp())
        moments = as_moments("HeteroscedasticGaussian.predictive", moments, 2)
        return Predictive.heteroscedastic(moments.mean, moments.covariance, nodes=nodes)

    def variance(self, moments: Moments | Tensor) -> Tensor:
        r"""Return the predictive variance :math:`S_{11} + e^{\mu_2 + S_{22}/2}`, exact for Gaussian h."""
        moments = as_moments("HeteroscedasticGaussian.variance", moments, 2)
        return moments.variance[..., 0] + self.noise(moments)

    def noise(self, moments: Moments | Tensor) -> Tensor:
        r"""Return the expected variance of the noise, :math:`e^{\mu_2 + S_{22}/2}`, exact for Gaussian h."""
        moments = as_moments("HeteroscedasticGaussian.noise", moments, 2)
        return (moments.mean[..., 1] + moments.variance[..., 1] / 2).exp()

    def gaussians(self, log_variance: Tensor, known: bool) -> list[NoisePart] | None:
        """Return the noise as one Gaussian; a subclass that overrides :meth:`predictive` overrides this method too."""
        return [NoisePart(1.0, log_variance)] if type(self).predictive is HeteroscedasticGaussian.predictive else None

    @staticmethod
    def in_unit(scale: float, offset: float) -> tuple[list[float], list[float]]:
        """Return gains and shifts of the two outputs that express them in the unit of ``scale * y + offset``.

        Args:
            scale: Positive factor.
            offset: Shift of the target.
        """
        return [scale, 1.0], [offset, 2 * math.log(scale)]

    def initialise(self, weight: Tensor, bias: Tensor) -> None:
        """Start with unit noise that hardly depends on the features."""
        weight[1].mul_(0.1)
        bias.zero_()
