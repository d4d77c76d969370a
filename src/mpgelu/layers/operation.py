"""Any rule as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Operation(nn.Module):
    """A rule without parameters of its own; gives it a name in a network, and in the audit of one.

    Args:
        rule: Called with what the layer is given, one or more values.
        **settings: Its further arguments.
    """

    def __init__(self, rule: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.rule = rule
        self.settings = settings

    def forward(self, *inputs: Any) -> Any:
        """Apply the rule to tensors or moments."""
        return self.rule(*inputs, **self.settings)

    def extra_repr(self) -> str:
        """Rule and settings shown by ``print(network)``."""
        return ", ".join([self.rule.__name__, *(f"{name}={value!r}" for name, value in self.settings.items())])
