"""Several branches applied to the same input."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.layers.registry import layers
from mpgelu.rules import concatenate, fork


@layers.register()
class Beside(nn.Sequential):
    """Apply branches to the same input and concatenate their outputs.

    The joint covariance is exact for factored moments, because the sources that branches share are recognised; see
    :func:`mpgelu.rules.fork`. The positional arguments are the branches, modules from one value to one value.

    Example:
        >>> import torch, mpgelu
        >>> both = mpgelu.layers.Beside(mpgelu.Linear(3, 1), mpgelu.Linear(3, 2))
        >>> both(torch.randn(5, 3)).shape
        torch.Size([5, 3])
    """

    def forward(self, input: Any) -> Any:
        """Return the concatenated outputs of all branches for a tensor or moments."""
        shared = fork(input)
        return concatenate(*(branch(shared) for branch in self))
