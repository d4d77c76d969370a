"""Gaussian observation noise with one variance for all rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.likelihoods.base import Likelihood, likelihoods
from mpgelu.likelihoods.outputs import as_moments, check_target
from mpgelu.moments import Moments
from mpgelu.predictive import Predictive


@likelihoods.register(read=lambda gaussian: {"noise_variance": gaussian.noise_variance.item()})
class Gaussian(Likelihood):
    r"""One output, the mean of the target: :math:`y \mid h \sim N(h, \sigma^2)`.

    Unit noise is the setting of the one-output tables of the paper.

    Args:
        noise_variance: Variance :math:`\sigma^2` of the noise.
        learn_noise: Whether the variance is a trained parameter, parametrised by its logarithm.

    Raises:
        InputError: The variance is not positive.

    Example:
        >>> import torch, mpgelu
        >>> outputs = mpgelu.DiagonalMoments(torch.tensor([[2.0]]), torch.tensor([[0.5]]))
        >>> Gaussian(noise_variance=0.25).predictive(outputs).variance
        tensor([0.7500])
    """

    log_noise_variance: Tensor

    def __init__(self, noise_variance: float = 1.0, learn_noise: bool = False) -> None:
        super().__init__()
        if not noise_variance > 0:
            raise InputError(f"Gaussian: noise_variance must be positive, got {noise_variance}")
        start = torch.tensor(math.log(noise_variance))
        if learn_noise:
            self.log_noise_variance = nn.Parameter(start)
        else:
            self.register_buffer("log_noise_variance", start)

    @property
    def noise_variance(self) -> Tensor:
        """Variance of the observation noise, a scalar tensor."""
        return self.log_noise_variance.exp()

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""The expectation of :math:`\log p(y \mid h)` over :math:`h \sim N(\mu, s^2)`, ``(*batch,)``; a closed form.

        .. math:: -\tfrac12 \Big\{ \log 2\pi\sigma^2 + \frac{s^2 + (\mu - y)^2}{\sigma^2} \Big\}

        Args:
            moments: Moments of the output, mean ``(*batch, 1)``.
            y: Targets, ``(*batch,)``.

        Raises:
            InputError: The network has another number of outputs, or the shape of y is not that of the batch.
        """
        moments = as_moments("Gaussian.expected_log_prob", moments, 1)
        check_target("Gaussian.expected_log_prob", moments, y)
        error = moments.mean.squeeze(-1) - y
        squares = moments.variance.squeeze(-1) + error * error
        return -0.5 * (math.log(2 * math.pi) + self.log_noise_variance + squares / self.noise_variance)

    def predictive(self, moments: Moments | Tensor, nodes: int = 1) -> Predictive:
        r"""Return the distribution of y, :math:`N(\mu, s^2 + \sigma^2)`, which is exact for Gaussian h.

        Args:
            moments: Moments of the output, mean ``(*batch, 1)``.
            nodes: Not used, because there is one component.
        """
        moments = as_moments("Gaussian.predictive", moments, 1)
        mean, variance = moments.mean.squeeze(-1), moments.variance.squeeze(-1)
        return Predictive.gaussian(mean, variance, self.noise_variance.to(mean).expand(mean.shape))

    @staticmethod
    def in_unit(scale: float, offset: float) -> tuple[list[float], list[float]]:
        """Return gain and shift of the output that express it in the unit of ``scale * y + offset``."""
        return [scale], [offset]
