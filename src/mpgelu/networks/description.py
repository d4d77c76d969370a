"""Networks as data: the form that files store, and that fast paths and export match against.

One recogniser, :func:`describe`, turns a network into a :class:`Description`; one builder, :func:`build`, turns it
into a network of uninitialised parameters. :func:`perceptron_of` recognises the plain perceptrons that the compiled
kernels and the ONNX graph evaluate as a whole; all other networks run through the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpgelu.errors import DataError, InputError
from mpgelu.layers import layers


@dataclass(frozen=True)
class Description:
    """A layer, or a container with the descriptions of its children.

    Args:
        kind: Registered name of the type.
        settings: Constructor arguments of the layer, without parameters and buffers.
        children: Descriptions of what a container holds, in order.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Description, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the description as nested dictionaries and lists that JSON can represent."""
        children = {"children": [child.as_json() for child in self.children]} if self.children else {}
        return {"kind": self.kind, **self.settings, **children}

    @staticmethod
    def from_json(text: Any) -> Description:
        """Return the description that :meth:`as_json` has written.

        Args:
            text: The parsed JSON.

        Raises:
            DataError: The structure is not that of a description.
        """
        if not isinstance(text, dict) or not isinstance(text.get("kind"), str):
            raise DataError(f"the description of a network must name the kind of each layer, got {str(text)[:60]!r}")
        children = text.get("children", [])
        if not isinstance(children, list):
            raise DataError(f"the children of a {text['kind']} must be a list, got {type(children).__name__}")
        settings = {name: value for name, value in text.items() if name not in ("kind", "children")}
        return Description(text["kind"], settings, tuple(map(Description.from_json, children)))

    def leaves(self, path: str = "") -> Iterator[tuple[str, Description]]:
        """Iterate over the layers without children, each with its name in the network."""
        if not self.children:
            yield path, self
        for position, child in enumerate(self.children):
            yield from child.leaves(f"{path}.{position}" if path else str(position))


def describe(network: nn.Module) -> Description:
    """Return the description of a network.

    Args:
        network: A registered layer, or an ``nn.Sequential`` of such layers.

    Raises:
        InputError: A layer is of a type that is not registered.

    Example:
        >>> from mpgelu.layers import Linear
        >>> describe(nn.Sequential(Linear(3, 2)))
        Description(kind='Sequential', settings={}, children=(Description(kind='Linear', settings={'in_features': 3,
            'out_features': 2, 'bias': True}, children=()),))
    """
    found = layers.describe(network)
    children = network.children() if isinstance(network, nn.Sequential) else ()
    return Description(found.pop("kind"), found, tuple(map(describe, children)))


def is_describable(network: nn.Module) -> bool:
    """Return whether every layer is of a registered type and every container numbers its layers as torch does."""
    inside = list(network.named_children()) if isinstance(network, nn.Sequential) else []
    numbered = [name for name, _ in inside] == [str(position) for position in range(len(inside))]
    return type(network) in layers and numbered and all(is_describable(child) for _, child in inside)


def build(description: Description) -> nn.Module:
    """Return a network of a description, with parameters on the device "meta".

    Load a state with ``load_state_dict(state, assign=True)`` before use.

    Args:
        description: The description of the network.

    Raises:
        DataError: A kind is not registered, or its settings are not accepted by the type.
    """
    children = [build(child) for child in description.children]
    make = layers.type_of(description.kind)
    try:
        with torch.device("meta"):
            return make(*children, **description.settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"cannot build a layer {description.kind} of {dict(description.settings)}: {error}") from error


@dataclass(frozen=True)
class MaskedLinear:
    """The position of one linear layer in a perceptron, and of the dropout before it.

    Args:
        name: Name of the linear layer in the network.
        gaussian: Whether its weights are random.
        bias: Whether it has a bias.
        dropout: Name of the dropout layer before it; ``None`` if there is none.
        rescale: The setting ``rescale`` of the dropout.
    """

    name: str
    gaussian: bool
    bias: bool
    dropout: str | None
    rescale: bool


@dataclass(frozen=True)
class Perceptron:
    """Linear layers with the same nonlinearity between any two of them, and optional dropout before each.

    Args:
        layers: The linear layers, in order.
        nonlinearity: The nonlinearity; ``None`` for a single layer.
    """

    layers: tuple[MaskedLinear, ...]
    nonlinearity: Description | None


def perceptron_of(description: Description) -> Perceptron | None:
    """Return the structure of a plain perceptron, or ``None`` for any other network."""
    if description.kind != "Sequential" or any(child.children for child in description.children):
        return None
    found: list[MaskedLinear] = []
    between: list[Description] = []
    dropout: tuple[str, Description] | None = None
    after_linear = False
    for name, layer in description.leaves():
        if layer.kind == "Dropout" and not after_linear and dropout is None:
            dropout = name, layer
        elif layer.kind in ("Linear", "GaussianLinear") and not after_linear:
            held, rescale = (dropout[0], dropout[1].settings["rescale"]) if dropout else (None, False)
            found.append(MaskedLinear(name, layer.kind == "GaussianLinear", layer.settings["bias"], held, rescale))
            dropout, after_linear = None, True
        elif after_linear and layer.kind not in ("Dropout", "Linear", "GaussianLinear"):
            between.append(layer)
            after_linear = False
        else:
            return None
    if not after_linear or any(layer != between[0] for layer in between):
        return None
    return Perceptron(tuple(found), between[0] if between else None)


def check_describable(caller: str, network: nn.Module) -> Description:
    """Return the description of a network that must have one.

    Args:
        caller: Name of the function that the error message starts with.
        network: The network.

    Raises:
        InputError: The network cannot be described; the message names the first obstacle.
    """
    if is_describable(network):
        return describe(network)
    unknown = [type(module).__name__ for module in network.modules() if type(module) not in layers]
    what = f"a layer of type {unknown[0]}, which is not registered" if unknown else "containers with names of their own"
    raise InputError(f"{caller}: the network has {what}; register layers with mpgelu.layers.layers.register")
