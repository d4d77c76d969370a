"""A network as data: the form that files hold, and that fast paths and export match.

One recogniser, :func:`describe`, turns a network into a :class:`Description`; one builder, :func:`build`, turns it back
into a network of fresh parameters. :func:`perceptron_of` answers whether a description is a plain perceptron, which the
compiled kernels and the ONNX graph do in one piece; whatever it does not match runs through the rules.
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
    """A layer, or a container with the descriptions of what it contains.

    Args:
        kind: Registered name of the type.
        settings: Arguments that build the layer again; parameters and buffers are not among them.
        children: What a container holds, in order.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Description, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as what JSON can hold."""
        children = {"children": [child.as_json() for child in self.children]} if self.children else {}
        return {"kind": self.kind, **self.settings, **children}

    @staticmethod
    def from_json(text: Any) -> Description:
        """What :meth:`as_json` gave, read back.

        Raises:
            DataError: It is something else.
        """
        if not isinstance(text, dict) or not isinstance(text.get("kind"), str):
            raise DataError(f"the description of a network must name the kind of each layer, got {str(text)[:60]!r}")
        children = text.get("children", [])
        if not isinstance(children, list):
            raise DataError(f"the children of a {text['kind']} must be a list, got {type(children).__name__}")
        settings = {name: value for name, value in text.items() if name not in ("kind", "children")}
        return Description(text["kind"], settings, tuple(map(Description.from_json, children)))

    def leaves(self, path: str = "") -> Iterator[tuple[str, Description]]:
        """Every layer that contains no other, with the name it has in the network."""
        if not self.children:
            yield path, self
        for position, child in enumerate(self.children):
            yield from child.leaves(f"{path}.{position}" if path else str(position))


def describe(network: nn.Module) -> Description:
    """The description of a network.

    Raises:
        InputError: A layer is of a type that is not registered.
    """
    found = layers.describe(network)
    children = network.children() if isinstance(network, nn.Sequential) else ()
    return Description(found.pop("kind"), found, tuple(map(describe, children)))


def is_describable(network: nn.Module) -> bool:
    """Whether every layer is of a registered type, and containers number their layers as torch does."""
    inside = list(network.named_children()) if isinstance(network, nn.Sequential) else []
    numbered = [name for name, _ in inside] == [str(position) for position in range(len(inside))]
    return type(network) in layers and numbered and all(is_describable(child) for _, child in inside)


def build(description: Description) -> nn.Module:
    """A network of this description, with parameters on the device "meta": load a state into it, assigned.

    Raises:
        DataError: A kind is not registered, or its settings are not those of the type.
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
    """Where a perceptron keeps one linear layer and the dropout before it.

    Args:
        name: Name of the linear layer in the network.
        gaussian: Whether its weights are random.
        bias: Whether it has one.
        dropout: Name of the dropout layer before it; ``None`` for none.
        rescale: Setting ``rescale`` of the dropout.
    """

    name: str
    gaussian: bool
    bias: bool
    dropout: str | None
    rescale: bool


@dataclass(frozen=True)
class Perceptron:
    """Linear layers with one nonlinearity between them and dropout before any.

    Args:
        layers: In order.
        nonlinearity: What stands between two of them; ``None`` if there is only one.
    """

    layers: tuple[MaskedLinear, ...]
    nonlinearity: Description | None


def perceptron_of(description: Description) -> Perceptron | None:
    """The layers of a plain perceptron, or ``None`` for any other network."""
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
    """The description of a network that must have one.

    Raises:
        InputError: It has none; the message names the first layer that is in the way.
    """
    if is_describable(network):
        return describe(network)
    unknown = [type(module).__name__ for module in network.modules() if type(module) not in layers]
    what = f"a layer of type {unknown[0]}, which is not registered" if unknown else "containers with names of their own"
    raise InputError(f"{caller}: the network has {what}; register layers with mpgelu.layers.layers.register")
