"""Linear layer with known weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.rules import linear


class Linear(nn.Linear):
    """``torch.nn.Linear`` that also takes moments; see :func:`mpgelu.rules.linear`.

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether to add a bias.
        device: where the parameters live.
        dtype: of the parameters.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return linear(input, self.weight, self.bias)
