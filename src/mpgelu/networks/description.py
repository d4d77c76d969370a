"""Networks as data: the form that files store, and that fast paths and export match against.

One recogniser, :func:`description_of`, turns a network into a :class:`Description`; one builder, :func:`build`, turns
it into a network of uninitialised parameters. Compiled kernels and ONNX graphs match descriptions against the forms
that they evaluate as a whole, those of :mod:`~mpgelu.networks.perceptron`, :mod:`~mpgelu.networks.plain` and
:mod:`~mpgelu.networks.headed`; all other networks run through the rules.
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


def description_of(network: nn.Module) -> Description | None:
    """Return the description of a network, or ``None`` if it has none.

    Args:
        network: Any module. It has a description if it is a registered layer, or an ``nn.Sequential`` of such layers
            that numbers them as torch does. A layer without parameters and buffers may be in several places.
    """
    if type(network) not in layers or shares_tensors(network):
        return None
    inside = list(network) if isinstance(network, nn.Sequential) else []
    children = [found for child in inside if (found := description_of(child)) is not None]
    if len(children) < len(inside) or [*network._modules] != [str(place) for place in range(len(inside))]:
        return None
    settings = layers.describe(network)
    return Description(settings.pop("kind"), settings, tuple(children))


def shares_tensors(network: nn.Module) -> bool:
    """Return whether a parameter or buffer has several names, as where a layer that holds it is in several places."""
    held = (*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False))
    return len({id(tensor) for _, tensor in held}) < len(held)


def describe(network: nn.Module, caller: str = "describe") -> Description:
    """Return the description of a network that must have one; see :func:`description_of`.

    Args:
        network: The network.
        caller: Name of the function that the error message starts with.

    Raises:
        InputError: The network has no description; the message names the first obstacle.

    Example:
        >>> from mpgelu.layers import Linear
        >>> describe(nn.Sequential(Linear(3, 2)))
        Description(kind='Sequential', settings={}, children=(Description(kind='Linear', settings={'in_features': 3,
            'out_features': 2, 'bias': True}, children=()),))
    """
    if (found := description_of(network)) is not None:
        return found
    if shares_tensors(network):
        raise InputError(f"{caller}: the network has a layer in several places; give each place a layer of its own")
    unknown = [type(module).__name__ for module in network.modules() if type(module) not in layers]
    what = f"a layer of type {unknown[0]}, which is not registered" if unknown else "containers with names of their own"
    raise InputError(f"{caller}: the network has {what}; register layers with mpgelu.layers.layers.register")


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
            made = make(*children, **description.settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"cannot build a layer {description.kind} of {dict(description.settings)}: {error}") from error
    layers.check(made, description.settings)
    return made
