"""The ReLU layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import relu
from mpgelu.rules.relu import Covariance, check_covariance


@layers.register("covariance")
class ReLU(nn.Module):
    """Rectifier of a Gaussian vector; see :func:`mpgelu.rules.relu`.

    Means and variances are exact for Gaussian inputs.

    Args:
        covariance: ``"exact"`` to quadrature error, or ``"dvi"`` for the approximation of the paper's baseline.

    Raises:
        InputError: ``covariance`` is neither of the two.
    """

    def __init__(self, covariance: Covariance = "exact") -> None:
        super().__init__()
        check_covariance("ReLU", covariance, Covariance)
        self.covariance: Covariance = covariance

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return relu(input, self.covariance)

    def extra_repr(self) -> str:
        """Return the settings that ``print(network)`` shows."""
        return f"covariance={self.covariance!r}"
