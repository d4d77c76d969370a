"""The ReLU layer."""

from __future__ import annotations

from typing import Any, get_args

from torch import nn

from mpgelu.errors import InputError
from mpgelu.rules import relu
from mpgelu.rules.relu import Covariance


class ReLU(nn.Module):
    """Rectifier of a Gaussian vector; see :func:`mpgelu.rules.relu`.

    Args:
        covariance: ``"exact"`` or ``"dvi"`` (the approximation of the paper's baseline).
    """

    def __init__(self, covariance: Covariance = "exact") -> None:
        super().__init__()
        if covariance not in get_args(Covariance):
            raise InputError(f"ReLU: covariance must be 'exact' or 'dvi', got {covariance!r}")
        self.covariance: Covariance = covariance

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return relu(input, self.covariance)

    def extra_repr(self) -> str:
        """Settings shown by ``print(network)``."""
        return f"covariance={self.covariance!r}"
