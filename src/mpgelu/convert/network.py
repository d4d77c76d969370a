"""The network that a conversion builds: layers, and the order of their application."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Step(NamedTuple):
    """One step of a converted network.

    Attributes:
        result: Name of the resulting value.
        path: Path to a layer or to a constant in the network.
        operands: Names of the values that the layer is applied to, ``None`` for an omitted argument; ``None`` for a
            constant.
    """

    result: str
    path: str
    operands: tuple[str | None, ...] | None


class ConvertedNetwork(nn.Module):
    """A network built by :func:`mpgelu.from_torch`: a list of steps, each of which applies a layer to earlier values.

    A tensor runs the ordinary network in evaluation mode, moments run the random one. Training mode has no effect.
    Parameters have the same names as in the torch module.

    Args:
        input: Name of the input value.
    """

    def __init__(self, input: str) -> None:
        super().__init__()
        self.input = input
        self.steps: list[Step] = []

    def forward(self, input: Any) -> Any:
        """Apply the network to a tensor or to moments."""
        values: dict[str | None, Any] = {None: None, self.input: input}
        result = self.input
        for result, path, operands in self.steps:
            part: Any = self
            for name in path.split("."):
                part = getattr(part, name)
            values[result] = part if operands is None else part(*[values[operand] for operand in operands])
        return values[result]

    def append(
        self, result: str, path: str, part: nn.Module | Tensor, operands: tuple[str | None, ...] | None = None
    ) -> None:
        """Add a step, and register its layer or constant at the same path as in the module.

        Args:
            result: Name of the resulting value.
            path: Path of the layer or constant, with dots between names.
            part: The layer or constant.
            operands: Names of the values that the layer is applied to; ``None`` for a constant.
        """
        *parents, name = path.split(".")
        home: nn.Module = self
        for parent in parents:
            if not hasattr(home, parent):
                home.add_module(parent, nn.Module())
            home = getattr(home, parent)
        if isinstance(part, nn.Module):
            home.add_module(name, part)
        elif isinstance(part, nn.Parameter):
            home.register_parameter(name, part)
        elif not hasattr(home, name):
            home.register_buffer(name, part)
        self.steps.append(Step(result, path, operands))
