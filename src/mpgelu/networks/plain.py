"""Recognition of networks whose outputs for deterministic inputs one call of a compiled kernel evaluates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from mpgelu.native import integers
from mpgelu.native.plain import PlainNetworks
from mpgelu.native.train import TrainedShape
from mpgelu.networks.description import Description, description_of

_NONLINEARITIES: dict[str, Literal["silu", "relu"]] = {"SiLU": "silu", "ReLU": "relu", "MPGELU": "relu"}
_EMBEDDING = ("frequency", "phase", "weight")  # parameters of Periodic, in the order of the kernel


@dataclass(frozen=True)
class PlainForm:
    """Names of the layers of a network that the kernel supports.

    The layers are an optional :class:`Periodic` embedding, an optional :class:`Scale`, and linear maps with the same
    nonlinearity between any two. MP-GELU of a deterministic input is ReLU.

    Args:
        embedding: Name of the periodic embedding; ``None`` without one.
        scale: Name of the scale before the first linear map; ``None`` without one.
        linear: Names of the linear maps, in order.
        nonlinearity: Nonlinearity between the linear maps.
    """

    embedding: str | None
    scale: str | None
    linear: tuple[str, ...]
    nonlinearity: Literal["silu", "relu"]

    def arrays(self, state: Mapping[str, Tensor]) -> PlainNetworks:
        """Return the parameters of M networks in the form of the kernel; the scale is merged into the first linear map.

        Args:
            state: Parameters by their names in the network, ``(M, ...)`` each.
        """
        embedding = () if self.embedding is None else [state[f"{self.embedding}.{part}"] for part in _EMBEDDING]
        weights = [state[f"{name}.weight"] for name in self.linear]
        if self.scale is not None:
            weights[0] = weights[0] * state[f"{self.scale}.weight"].unsqueeze(1)
        biases = [state.get(f"{name}.bias") for name in self.linear]
        given = [w.new_zeros(w.shape[:2]) if b is None else b for w, b in zip(weights, biases, strict=True)]
        return PlainNetworks(embedding, weights, given, self.nonlinearity)

    def trained(self, state: Mapping[str, Tensor]) -> tuple[TrainedShape, list[list[Tensor]]] | None:
        """Return the form in which the kernel trains M networks, or ``None`` if a linear map has no bias.

        Args:
            state: Parameters by their names in the network, ``(M, ...)`` each.

        Returns:
            The sizes of the networks, and the parameters of scale, embedding and linear maps.
        """
        pairs = [(state[f"{name}.weight"], state.get(f"{name}.bias")) for name in self.linear]
        linear = [part for pair in pairs for part in pair if part is not None]
        if len(linear) < 2 * len(pairs):
            return None
        embedding = [state[f"{self.embedding}.{part}"] for part in _EMBEDDING] if self.embedding is not None else []
        scale = [state[f"{self.scale}.weight"]] if self.scale is not None else []
        features, cosines = embedding[0].shape[1:] if embedding else (linear[0].shape[2], 0)
        widths = integers([linear[0].shape[2], *(weight.shape[1] for weight in linear[::2])])
        return TrainedShape(features, cosines, bool(scale), widths, self.nonlinearity), [scale, embedding, linear]


def plain_form(network: nn.Module) -> PlainForm | None:
    """Return the form of a sequence of layers that the kernel supports, or ``None`` for any other network."""
    found = description_of(network)
    return None if found is None or found.kind != "Sequential" else form_of(found.children)


def form_of(layers: Sequence[Description]) -> PlainForm | None:
    """Return the same for the descriptions of the layers, whose names are their positions."""
    left = [(str(place), layer.kind) for place, layer in enumerate(layers)]
    embedding = left.pop(0)[0] if left and left[0][1] == "Periodic" else None
    scale = left.pop(0)[0] if left and left[0][1] == "Scale" else None
    linear, between = left[::2], {_NONLINEARITIES.get(kind) for _, kind in left[1::2]} or {"relu"}
    if len(left) % 2 == 0 or any(kind != "Linear" for _, kind in linear) or len(between) > 1:
        return None
    (nonlinearity,) = between
    names = tuple(name for name, _ in linear)
    return None if nonlinearity is None else PlainForm(embedding, scale, names, nonlinearity)
