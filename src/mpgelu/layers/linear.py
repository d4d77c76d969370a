"""Linear layer with known weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import linear


def sizes(layer: nn.Linear) -> dict[str, int | bool]:
    """Return the constructor arguments of a linear layer, for its description in files."""
    return {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}


@layers.register(read=sizes)
class Linear(nn.Linear):
    """``torch.nn.Linear`` that also accepts moments; see :func:`mpgelu.rules.linear`.

    The arguments are those of torch: ``in_features``, ``out_features``, ``bias``, ``device``, ``dtype``. Exact for
    full and factored moments; diagonal moments drop the correlations of the outputs.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return linear(input, self.weight, self.bias)
