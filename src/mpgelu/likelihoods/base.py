"""The interface of likelihoods, the only code that knows the meaning of the outputs of a network."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.moments import Moments
from mpgelu.predictive import Predictive
from mpgelu.predictive.nodes import NODES
from mpgelu.registry import Registry

likelihoods: Registry[Likelihood] = Registry("likelihood")


class NoisePart(NamedTuple):
    """One component of noise that is a mixture of Gaussians.

    Attributes:
        share: Weight of the component.
        log_variance: Log-variance, ``(*batch,)``.
        offset: Mean of the component minus that of the noise, ``(*batch,)``; ``None`` stands for zero.
    """

    share: float
    log_variance: Tensor
    offset: Tensor | None = None


class Likelihood(nn.Module):
    """The distribution of a target given the outputs h of a network, averaged over Gaussian h.

    Subclasses implement :meth:`expected_log_prob` and :meth:`predictive` and set ``outputs``; the other methods follow
    from these unless a subclass has a cheaper form. Training, prediction, attribution and export ask the likelihood,
    and no other code depends on the position of an output. Register a subclass with ``@likelihoods.register(...)`` so
    that models with it can be saved.

    Attributes:
        outputs: Number of outputs that the network must have.
    """

    outputs: int = 1

    def expected_log_prob(self, moments: Moments | Tensor, y: Tensor) -> Tensor:
        r"""Return the training objective, the expectation of :math:`\log p(y \mid h)` over h, ``(*batch,)``.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``; a tensor stands for known outputs.
            y: Targets, ``(*batch,)``.
        """
        raise NotImplementedError

    def predictive(self, moments: Moments | Tensor, nodes: int = NODES) -> Predictive:
        """Return the distribution of the target for each row, ``(*batch,)``.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``; a tensor stands for known outputs.
            nodes: Number of mixture components that represent an uncertain noise variance, where there is one.
        """
        raise NotImplementedError

    def variance(self, moments: Moments | Tensor) -> Tensor:
        """Return the predictive variance of the target, ``(*batch,)``.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``.
        """
        return self.predictive(moments, 2).variance

    def noise(self, moments: Moments | Tensor) -> Tensor:
        """The aleatoric part of the variance, the expected variance of the target given the outputs, ``(*batch,)``.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``.
        """
        return self.predictive(moments, 2).aleatoric_variance

    def short(self, moments: Moments | Tensor) -> Predictive:
        """Return an approximation of the distribution with few components, for mixtures of many models, ``(*batch,)``.

        The default is the Gaussian of the same mean and variances.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``.
        """
        return self.predictive(moments, 2).matched()

    def mean_direction(self, moments: Moments) -> Tensor:
        """The derivative of the mean of the target by the outputs, ``(*batch, outputs)``, which attribution uses.

        The default is that of a mean which is the first output.

        Args:
            moments: Moments of the outputs, mean ``(*batch, outputs)``.
        """
        first = torch.zeros_like(moments.mean)
        first[..., 0] = 1
        return first

    def gaussians(self, log_variance: Tensor, known: bool) -> list[NoisePart] | None:
        """Return the noise as a mixture of Gaussians around the mean, which is the first of two outputs.

        Kernels and graphs that implement heteroscedastic Gaussian noise can then evaluate this likelihood too. The
        default is ``None``: there is no such form, and the caller evaluates :meth:`predictive` instead.

        Args:
            log_variance: The second output, ``(*batch,)``.
            known: Whether this output is known exactly. If it is Gaussian, only a shift of it keeps it Gaussian.

        Returns:
            Gaussians whose weights sum to one, and whose offsets have mean zero; or ``None``.
        """
        return None

    def initialise(self, weight: Tensor, bias: Tensor) -> None:
        """Scale the freshly initialised last layer in place, so that training starts from a sensible distribution.

        Args:
            weight: Weights of the last layer, ``(outputs, n)``.
            bias: Biases of the last layer, ``(outputs,)``.
        """
        bias.zero_()

    def described(self) -> dict[str, Any]:
        """Return name and settings, as ``likelihoods.build`` takes them."""
        return likelihoods.describe(self)


def check_likelihood(caller: str, likelihood: object) -> None:
    """Raise unless an argument ``likelihood`` is a :class:`Likelihood`.

    Raises:
        InputError: It is not.
    """
    if isinstance(likelihood, type):
        raise InputError(f"{caller}: likelihood must be an object, got a class; did you mean {likelihood.__name__}()?")
    if not isinstance(likelihood, Likelihood):
        came = type(likelihood).__name__
        raise InputError(f"{caller}: likelihood must be a Likelihood, such as HeteroscedasticGaussian(), got {came}")
