"""A rule as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Operation(nn.Module):
    """A rule without parameters, as a module that has a name in a network and in its audit by :func:`mpgelu.verify`.

    Args:
        rule: Called with the inputs of the layer, one or more values.
        **settings: Further keyword arguments of the rule.

    Example:
        >>> import torch, mpgelu
        >>> Operation(mpgelu.rules.scale, gain=2.0)(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, rule: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.rule = rule
        self.settings = settings

    def forward(self, *inputs: Any) -> Any:
        """Apply the rule to tensors or moments."""
        return self.rule(*inputs, **self.settings)

    def extra_repr(self) -> str:
        """Return the rule and the settings that ``print(network)`` shows."""
        return ", ".join([self.rule.__name__, *(f"{name}={value!r}" for name, value in self.settings.items())])
