"""The layer that replaces each torch operation.

``CONVERSIONS`` maps types of modules to functions that build a layer, ``_FUNCTIONS`` maps torch functions and the
names of tensor methods to functions of their arguments. What is in neither is refused with a hint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from mpgelu.convert.tracing import CONVERSIONS, is_in_place, is_ours, operation_of
from mpgelu.errors import ConversionError, InputError
from mpgelu.layers import (
    GELU,
    BatchNorm1d,
    Dropout,
    LayerNorm,
    LeakyReLU,
    Linear,
    Operation,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
)
from mpgelu.rules import add, concatenate, flatten, layer_norm, linear, scale, subtract_from

Plan = tuple[nn.Module, tuple[Any, ...]]  # a layer and its operands: nodes, or None for an omitted argument


def plan(node: fx.Node, module: nn.Module) -> Plan:
    """Return the layer for a node of a traced module, and the nodes that it is applied to.

    Args:
        node: A call of a module, a function or a method.
        module: The traced module.

    Raises:
        ConversionError: The operation has no rule, computes a constant, or overwrites a value that is used again.
    """
    operation = operation_of(node, module)
    where = f"from_torch: node {node.name!r} ({operation})"
    if not node.meta["random"]:
        raise ConversionError(f"{where} computes a constant; compute it before and keep it as a parameter or buffer")
    if is_in_place(node, module) and any(user > node for user in node.all_input_nodes[0].users):
        raise ConversionError(f"{where} changes a value in place that is used again later; use inplace=False")
    called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    operands = (*node.args, *node.kwargs.values())
    if is_ours(called):
        return called, operands  # type: ignore[return-value]
    build: Any = _FUNCTIONS.get(node.target) if called is None else CONVERSIONS.get(type(called))
    if build is None:
        raise ConversionError(f"{where} has no rule; {_HINTS.get(operation.rstrip('_'), _HINT)}")
    try:
        return build(*node.args, **node.kwargs) if called is None else (build(called), operands)
    except (InputError, TypeError) as error:
        raise ConversionError(f"{where}: {error}") from error


# Layers


def _sharing(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Return the layer with the parameters and buffers of the module: the same objects, not copies."""
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        setattr(layer, name, tensor)
    return layer


def _linear(module: nn.Linear) -> nn.Module:
    """Return the layer for ``nn.Linear``."""
    return _sharing(Linear(module.in_features, module.out_features, module.bias is not None, device="meta"), module)


def _batch_norm(module: nn.BatchNorm1d) -> nn.Module:
    """Return the layer for ``nn.BatchNorm1d``, which must have running statistics."""
    if not module.track_running_stats:
        raise InputError("there are no running statistics to normalise with; use track_running_stats=True")
    return _sharing(BatchNorm1d(module.num_features, module.eps, affine=module.affine, device="meta"), module)


def _layer_norm(module: nn.LayerNorm) -> nn.Module:
    """Return the layer for ``nn.LayerNorm`` over the features."""
    _check_normalized_shape(module.normalized_shape)
    affine, bias = module.elementwise_affine, getattr(module, "bias", None) is not None
    return _sharing(LayerNorm(module.normalized_shape, module.eps, affine, bias, device="meta"), module)


def _check_normalized_shape(shape: Any) -> None:
    """Raise if a normalisation is over more dimensions than the features."""
    if len(shape) != 1:
        raise InputError(f"normalized_shape must be that of the features alone, got {tuple(shape)}")


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    """Return a dropout layer, or the identity where nothing is dropped."""
    return Dropout(p, dtype=torch.float64) if training and p != 0 else nn.Identity()


def _relu(inplace: bool = False) -> nn.Module:
    """Return a rectifier that, unlike :class:`ReLU`, leaves certain factored moments factored."""
    return LeakyReLU(0.0)


def _gelu(*, approximate: str = "none") -> nn.Module:
    """Return a GELU layer; the tanh approximation has no rule."""
    if approximate != "none":
        raise InputError(f"approximate={approximate!r} has no rule; use approximate='none'")
    return GELU()


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    """Return the operation of ``torch.flatten``."""
    return Operation(flatten, start_dim=start_dim, end_dim=end_dim)


CONVERSIONS |= {
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.Dropout: lambda module: _dropout(module.p),
    nn.Flatten: lambda module: _flatten(module.start_dim, module.end_dim),
    nn.Identity: lambda module: nn.Identity(),
    nn.ReLU: lambda module: _relu(),
    nn.LeakyReLU: lambda module: LeakyReLU(module.negative_slope),
    nn.GELU: lambda module: _gelu(approximate=module.approximate),
    nn.SiLU: lambda module: SiLU(),
    nn.Tanh: lambda module: Tanh(),
    nn.Sigmoid: lambda module: Sigmoid(),
    nn.Softplus: lambda module: Softplus(module.beta, module.threshold),
}

# Functions and methods of one value, by the arguments that follow it
_OF_ONE: dict[Callable[..., nn.Module], tuple[Any, ...]] = {
    _dropout: (F.dropout, torch.dropout),
    _flatten: (torch.flatten, "flatten"),
    _gelu: (F.gelu,),
    _relu: (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
    lambda negative_slope=0.01, inplace=False: LeakyReLU(negative_slope): (F.leaky_relu, F.leaky_relu_),
    lambda inplace=False: SiLU(): (F.silu,),
    Softplus: (F.softplus,),
    Tanh: (F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"),
    Sigmoid: (F.sigmoid, torch.sigmoid, torch.sigmoid_, torch.special.expit, "sigmoid", "sigmoid_"),
    lambda: Operation(scale, gain=-1.0): (operator.neg, torch.neg, "neg"),
    lambda: nn.Identity(): ("contiguous", "clone"),
}


# Functions and methods of several values, with the arguments that they have in torch


def _call_linear(input: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> Plan:
    """Plan ``F.linear``, whose weight and bias must be constants."""
    _check_constants(weight, bias)
    return Operation(linear), (input, weight, bias)


def _call_layer_norm(
    input: fx.Node, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Plan:
    """Plan ``F.layer_norm``, whose weight and bias must be constants."""
    _check_normalized_shape(normalized_shape)
    _check_constants(weight, bias)
    return Operation(layer_norm, eps=eps), (input, weight, bias)


def _concatenate(tensors: Any, dim: int = 0) -> Plan:
    """Plan ``torch.cat`` of values that all depend on the input."""
    if dim == 0 or not all(_is_random(tensor) for tensor in tensors):
        raise InputError(f"must join values that depend on the input, along their features; got {tensors}, dim={dim}")
    return Operation(concatenate, dim=dim), tuple(tensors)


def _add(input: Any, other: Any, *, alpha: float = 1.0) -> Plan:
    """Plan a sum; if only the second summand depends on the input, the first is a constant."""
    if _is_random(input):
        return _with_operand(add, input, alpha=float(alpha), other=other)
    return _with_operand(subtract_from, other, alpha=-float(alpha), constant=input)


def _subtract(input: Any, other: Any, *, alpha: float = 1.0) -> Plan:
    """Plan a difference as a sum with a negative factor."""
    return _add(input, other, alpha=-alpha)


def _multiply(input: Any, other: Any) -> Plan:
    """Plan a product, one factor of which must be a constant."""
    value, gain = (input, other) if _is_random(input) else (other, input)
    _check_constants(gain)
    return _with_operand(scale, value, gain=gain)


def _divide(input: Any, other: Any) -> Plan:
    """Plan a division by a number."""
    if isinstance(other, fx.Node):
        raise InputError("only a division by a number has a rule; multiply by the reciprocal")
    return _multiply(input, 1 / other)


def _with_operand(rule: Callable[..., Any], value: fx.Node, **settings: Any) -> Plan:
    """Return a rule with settings; the last setting becomes an operand if it is a node and not a number."""
    name, operand = settings.popitem()
    if isinstance(operand, fx.Node):
        return Operation(rule, **settings), (value, operand)
    return Operation(rule, **{name: operand}, **settings), (value,)


def _is_random(argument: Any) -> bool:
    """Return whether an argument is a value that depends on the input."""
    return isinstance(argument, fx.Node) and bool(argument.meta["random"])


def _check_constants(*arguments: Any) -> None:
    """Raise if an argument that must be constant depends on the input."""
    if any(_is_random(argument) for argument in arguments):
        raise InputError("a product of two values that depend on the input has no rule; one must be constant")


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _call_linear,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _call_layer_norm),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _concatenate),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _add),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_"), _subtract),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"), _multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, torch.divide, "div", "div_"), _divide),
}


def _of_one(build: Callable[..., nn.Module]) -> Callable[..., Plan]:
    """Return the plan of an operation with one operand, from a function that builds its layer."""
    return lambda input, *args, **settings: (build(*args, **settings), (input,))


_FUNCTIONS |= {target: _of_one(build) for build, targets in _OF_ONE.items() for target in targets}

_HINT = "replace it, or convert the parts before and after it; docs/convert.md lists what is supported"
_HINTS = {
    **dict.fromkeys(("view", "reshape", "size", "getattr"), "use nn.Flatten(), or flatten the input"),
    **dict.fromkeys(
        ("squeeze", "unsqueeze", "getitem"), "leave it out, return (rows, features), and index the moments afterwards"
    ),
    **dict.fromkeys(("matmul", "mm", "addmm", "bmm"), "use nn.Linear or F.linear"),
    **dict.fromkeys(("softmax", "log_softmax", "Softmax", "LogSoftmax"), "convert the network up to its logits"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), "only fully connected layers have rules"),
}
