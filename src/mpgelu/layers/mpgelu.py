"""The MP-GELU layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import mpgelu


@layers.register()
class MPGELU(nn.Module):
    """Keep each unit with the probability that it is positive; see :func:`mpgelu.rules.mpgelu`.

    The layer has no parameters. Its moments are exact for every type of moments and any distribution of the input with
    these moments.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to moments, or ReLU to a tensor."""
        return mpgelu(input)
