"""Linear layer with known weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import linear


def sizes(layer: nn.Linear) -> dict[str, int | bool]:
    """Arguments of a linear layer, for its description."""
    return {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}


@layers.register(read=sizes)
class Linear(nn.Linear):
    """``torch.nn.Linear`` that also takes moments; see :func:`mpgelu.rules.linear`.

    Its arguments are those of torch: ``in_features``, ``out_features``, ``bias``, ``device``, ``dtype``.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return linear(input, self.weight, self.bias)
