"""Linear layer with independent Gaussian weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.layers.linear import sizes
from mpgelu.layers.registry import layers
from mpgelu.rules import gaussian_linear


@layers.register(read=sizes)
class GaussianLinear(nn.Linear):
    """Linear layer whose weights and biases are independent Gaussians; see :func:`mpgelu.rules.gaussian_linear`.

    The means are initialised as in ``torch.nn.Linear``. Variances are parametrised by their logarithms. Training
    maximises the evidence lower bound if :meth:`kl` divided by the number of rows is given as ``penalty`` to
    :func:`mpgelu.fit`.

    Args:
        in_features: Number of input features.
        out_features: Number of output features.
        bias: Whether to add a bias.
        initial_variance: Initial variance of every weight and bias.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Raises:
        InputError: ``initial_variance`` is not positive.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        initial_variance: float = 1e-4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not initial_variance > 0:
            raise InputError(f"GaussianLinear: initial_variance must be positive, got {initial_variance}")
        super().__init__(in_features, out_features, bias, device, dtype)
        start = math.log(initial_variance)
        self.log_weight_variance = nn.Parameter(torch.full_like(self.weight, start))
        self.log_bias_variance = nn.Parameter(torch.full_like(self.bias, start)) if bias else None

    @property
    def weight_variance(self) -> Tensor:
        """Variance of every weight, ``(out_features, in_features)``."""
        return self.log_weight_variance.exp()

    @property
    def bias_variance(self) -> Tensor | None:
        """Variance of every bias, ``(out_features,)``; ``None`` without bias."""
        return None if self.log_bias_variance is None else self.log_bias_variance.exp()

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor, with the mean weights, or to moments."""
        return gaussian_linear(input, self.weight, self.weight_variance, self.bias, self.bias_variance)

    def kl(self, prior_variance: float | Tensor = 1.0) -> Tensor:
        r"""Return the Kullback-Leibler divergence of weights and biases from independent :math:`N(0, \sigma_0^2)`.

        .. math:: \tfrac12 \sum \Big( \frac{v + m^2}{\sigma_0^2} - 1 - \log\frac{v}{\sigma_0^2} \Big)

        Args:
            prior_variance: Prior variance :math:`\sigma_0^2`, one number for the layer.

        Returns:
            A scalar tensor, through which gradients flow to means and variances.
        """
        total = _kl(self.weight, self.log_weight_variance, prior_variance)
        if self.log_bias_variance is not None:
            total = total + _kl(self.bias, self.log_bias_variance, prior_variance)
        return total


def _kl(mean: Tensor, log_variance: Tensor, prior_variance: float | Tensor) -> Tensor:
    """Return the divergence of one tensor of Gaussian parameters."""
    prior = torch.as_tensor(prior_variance, dtype=mean.dtype, device=mean.device)
    return 0.5 * ((log_variance.exp() + mean.square()) / prior - 1 - log_variance + prior.log()).sum()
