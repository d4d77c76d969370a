"""Networks side by side."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import concatenate, fork


@layers.register()
class Beside(nn.Sequential):
    """Branches that take the same input and whose outputs are joined, one after the other.

    The joint covariance is exact for factored moments: what the branches share is recognised by its sources; see
    :func:`mpgelu.rules.fork`. The arguments are the branches, modules from one value to one value.

    Example:
        >>> import torch, mpgelu
        >>> both = mpgelu.layers.Beside(mpgelu.Linear(3, 1), mpgelu.Linear(3, 2))
        >>> both(torch.randn(5, 3)).shape
        torch.Size([5, 3])
    """

    def forward(self, input: Any) -> Any:
        """Apply every branch to a tensor or to moments."""
        shared = fork(input)
        return concatenate(*(branch(shared) for branch in self))
