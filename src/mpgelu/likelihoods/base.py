"""The interface of likelihoods, which alone know what the outputs of a network mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.moments import Moments
from mpgelu.predictive import Predictive
from mpgelu.registry import Registry

likelihoods: Registry[Likelihood] = Registry("likelihood")


class Likelihood(nn.Module):
    """The distribution of a target given the outputs h of a network, averaged over Gaussian h.

    Subclasses implement :meth:`expected_log_prob` and :meth:`predictive` and set ``outputs``; the other methods follow
    from these unless a subclass knows a cheaper form. Whoever trains, predicts, explains or exports asks the
    likelihood; nobody else knows the place of an output. Register a subclass with ``likelihoods.register`` so that
    models with it can be saved.

    Attributes:
        outputs: How many numbers the network must give for each row.
    """

    outputs: int = 1

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""Expectation of :math:`\log p(y \mid h)` over the moments of h, ``(*batch,)``: the training objective.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``; a tensor counts as known exactly.
            y: Targets ``(*batch,)``.
        """
        raise NotImplementedError

    def predictive(self, moments: Moments | Tensor, nodes: int = 32) -> Predictive:
        """Distribution of the target for each row, ``(*batch,)``.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``; a tensor counts as known exactly.
            nodes: Components of the mixture that stands for an uncertain noise, where there is one.
        """
        raise NotImplementedError

    def variance(self, moments: Moments | Tensor) -> Tensor:
        """Predictive variance of the target, ``(*batch,)``."""
        return self.predictive(moments, 2).variance

    def noise(self, moments: Moments | Tensor) -> Tensor:
        """Expected variance of the observation given the outputs, the aleatoric part, ``(*batch,)``."""
        return self.predictive(moments, 2).aleatoric_variance

    def short(self, moments: Moments | Tensor) -> Predictive:
        """The distribution by as few components as will do, where many such distributions are mixed, ``(*batch,)``.

        By default the Gaussian of the same mean and variances.
        """
        return self.predictive(moments, 2).matched()

    def mean_direction(self, moments: Moments) -> Tensor:
        """Derivative of the mean of the target by the outputs, ``(*batch, outputs)``, for attribution.

        The mean of the target is the first output unless a subclass overrides this.

        Args:
            moments: Moments of the outputs.
        """
        first = torch.zeros_like(moments.mean)
        first[..., 0] = 1
        return first

    def gaussians(self, log_variance: Tensor, known: bool) -> list[tuple[float, Tensor]] | None:
        """Write the noise as a mixture of Gaussians around the mean, the first of two outputs.

        Kernels and graphs that know heteroscedastic Gaussian noise can then do this likelihood too. The default is
        ``None``: it has no such form, and whoever asks evaluates :meth:`predictive` instead.

        Args:
            log_variance: The second output, ``(*batch,)``.
            known: Whether this output is known exactly; otherwise only a shift of it keeps its distribution Gaussian.

        Returns:
            The share and the log-variance of each Gaussian; the shares sum to one.
        """
        return None

    def initialise(self, weight: Tensor, bias: Tensor) -> None:
        """Scale the freshly drawn last layer, ``(outputs, n)`` and ``(outputs,)``, so that training starts well."""
        bias.zero_()

    def described(self) -> dict[str, Any]:
        """Name and settings, for ``likelihoods.build``."""
        return likelihoods.describe(self)
