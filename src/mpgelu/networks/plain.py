"""Networks on known inputs in one native call: an answer to "can this network be done at once?"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from mpgelu.layers import MPGELU, Linear, Periodic, ReLU, Scale, SiLU
from mpgelu.native.plain import PlainNetworks

_NONLINEARITIES: dict[type[nn.Module], Literal["silu", "relu"]] = {SiLU: "silu", ReLU: "relu", MPGELU: "relu"}


@dataclass(frozen=True)
class PlainForm:
    """Where a network of a kind that the kernel knows keeps its parameters.

    Args:
        embedding: Name of its periodic embedding; ``None`` for none.
        scale: Name of a scale before the first linear map; ``None`` for none.
        linear: Names of the linear maps, in order.
        nonlinearity: Between them.
    """

    embedding: str | None
    scale: str | None
    linear: tuple[str, ...]
    nonlinearity: Literal["silu", "relu"]

    def arrays(self, state: Mapping[str, Tensor]) -> PlainNetworks:
        """The parameters of M networks, with the scale multiplied into the first linear map.

        Args:
            state: Parameters by their names in the network, each ``(M, ...)``.
        """
        parts = ("frequency", "phase", "weight")
        embedding = () if self.embedding is None else [state[f"{self.embedding}.{part}"] for part in parts]
        weights = [state[f"{name}.weight"].detach() for name in self.linear]
        if self.scale is not None:
            weights[0] = weights[0] * state[f"{self.scale}.weight"].detach().unsqueeze(1)
        biases = [state.get(f"{name}.bias") for name in self.linear]
        given = [w.new_zeros(w.shape[:2]) if b is None else b for w, b in zip(weights, biases, strict=True)]
        return PlainNetworks(embedding, weights, given, self.nonlinearity)


def plain_form(network: nn.Module) -> PlainForm | None:
    """The form of a sequence that the kernel knows; ``None`` for any other network."""
    if type(network) is not nn.Sequential:
        return None
    left = [(name, layer) for name, layer in network.named_children()]
    embedding = left.pop(0)[0] if left and type(left[0][1]) is Periodic else None
    scale = left.pop(0)[0] if left and type(left[0][1]) is Scale else None
    linear, between = left[::2], {_NONLINEARITIES.get(type(layer)) for _, layer in left[1::2]} or {"relu"}
    if len(left) % 2 == 0 or any(type(layer) is not Linear for _, layer in linear) or len(between) > 1:
        return None
    (nonlinearity,) = between
    names = tuple(name for name, _ in linear)
    return None if nonlinearity is None else PlainForm(embedding, scale, names, nonlinearity)
