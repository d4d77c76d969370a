"""The MP-GELU layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import mpgelu


@layers.register()
class MPGELU(nn.Module):
    """Mask with the probability that each unit is positive; see :func:`mpgelu.rules.mpgelu`. It has no parameters."""

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor (as ReLU) or to moments."""
        return mpgelu(input)
