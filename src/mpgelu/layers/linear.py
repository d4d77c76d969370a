"""Linear layer with known weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.rules import linear


class Linear(nn.Linear):
    """``torch.nn.Linear`` that also takes moments; see :func:`mpgelu.rules.linear`.

    Its arguments are those of torch: ``in_features``, ``out_features``, ``bias``, ``device``, ``dtype``.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        return linear(input, self.weight, self.bias)
