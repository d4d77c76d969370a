"""Layers of many networks at once on plain tensors: one batched operation each, without the overhead of ``vmap``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import singledispatch

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.layers import MPGELU, Elementwise, Linear, Periodic, ReLU, Scale
from mpgelu.networks.description import shares_tensors


@singledispatch
def batched(layer: nn.Module, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs of one layer of M networks, each on its own input.

    A :class:`Stack` whose layers all have such a form runs plain tensors through them; other stacks use ``vmap``.

    Args:
        layer: The layer of one of the networks, for its settings; its parameters are not used.
        x: Inputs, ``(M, rows, n)``.
        state: Parameters and buffers of the layer by name, each ``(M, ...)``.

    Returns:
        Outputs, ``(M, rows, outputs)``.

    Raises:
        MissingRuleError: The type of the layer has no registered form.
    """
    raise MissingRuleError(f"batched: no form of {type(layer).__name__}; register one with @batched.register")


def has_batched_form(network: nn.Module) -> bool:
    """Return whether a network is a sequence of layers that all have a form here, and share no tensors."""
    missing = batched.dispatch(object)
    if type(network) is not nn.Sequential or any(batched.dispatch(type(layer)) is missing for layer in network):
        return False
    return not shares_tensors(network)


def run(network: nn.Module, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs of M networks, ``(M, rows, outputs)``.

    Args:
        network: One of the networks, for which :func:`has_batched_form` is true.
        x: Inputs, ``(M, rows, n)``.
        state: Parameters and buffers by their names in the network, each ``(M, ...)``.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        layer, _, part = name.partition(".")
        parts.setdefault(layer, {})[part] = tensor
    for name, layer_ in network._modules.items():  # named_children leaves out the second place of a layer
        assert layer_ is not None
        x = batched(layer_, x, parts.get(name, {}))
    return x


@batched.register
def _(layer: Linear, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    _check(layer, x, state["weight"], layer.in_features)
    weight = state["weight"].mT
    result = torch.baddbmm(state["bias"].unsqueeze(1), x, weight) if "bias" in state else torch.bmm(x, weight)
    return result if result.dtype == x.dtype else result.to(x.dtype)  # inside torch.autocast


@batched.register
def _(layer: Scale, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    _check(layer, x, state["weight"], layer.in_features)
    return x * state["weight"].unsqueeze(1)


@batched.register
def _(layer: Periodic, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    _check(layer, x, state["frequency"], layer.frequency.shape[0])
    frequency, phase = (2 * math.pi * state[name].unsqueeze(2) for name in ("frequency", "phase"))  # (M, n, 1, k)
    cosines = torch.cos(torch.addcmul(phase, x.mT.unsqueeze(-1), frequency))  # (M, n, rows, k)
    combined = torch.matmul(cosines, state["weight"]).transpose(1, 2)  # (M, rows, n, d)
    return torch.cat([x.unsqueeze(-1), combined], -1).flatten(-2)


@batched.register
def _(layer: Elementwise, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    return layer.activation(x)


@batched.register(MPGELU)
@batched.register(ReLU)
def _(layer: MPGELU | ReLU, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    return torch.relu(x)


def _check(layer: nn.Module, x: Tensor, held: Tensor, features: int) -> None:
    """Raise if the number of networks or of features, or the dtype, does not fit the parameters of a layer."""
    wanted, name = (held.shape[0], features), type(layer).__name__
    if (x.shape[0], x.shape[2]) != wanted:
        raise InputError(
            f"Stack: {name} of {wanted[0]} networks takes an input ({wanted[0]}, rows, {features}), got "
            f"{tuple(x.shape)}; rows that all networks share are x.expand({wanted[0]}, -1, -1)"
        )
    if x.dtype != held.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InputError(
            f"Stack: {name} has parameters of {held.dtype} but the input is {x.dtype}; use x.to({held.dtype}) or "
            f"stack.to({x.dtype})"
        )
