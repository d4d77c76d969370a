"""Tracing of torch modules to graphs of operations, without modifying the module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from mpgelu.errors import ConversionError

CALLS = ("call_module", "call_function", "call_method")
CONVERSIONS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {}  # the layer for a module of each type


def conversion(*types: type[nn.Module]) -> Callable[[Callable[[Any], nn.Module]], Callable[[Any], nn.Module]]:
    """Register a function that converts modules of the given types to layers that accept moments.

    Modules of registered types are converted as a whole; tracing does not enter them.

    Args:
        *types: Classes of modules; a subclass needs a registration of its own.

    Example:
        >>> import mpgelu
        >>> from torch import nn
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> @conversion(Doubled)
        ... def _(module):
        ...     layer = mpgelu.Linear(module.in_features, module.out_features)
        ...     layer.load_state_dict({name: 2 * tensor for name, tensor in module.state_dict().items()})
        ...     return layer
        >>> network, report = mpgelu.from_torch(nn.Sequential(Doubled(3, 2)))
    """

    def register(build: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
        CONVERSIONS.update(dict.fromkeys(types, build))
        return build

    return register


class Tracer(fx.Tracer):
    """A tracer that enters all modules except those of torch, of this library, and those with a conversion."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str = "") -> bool:
        """Return whether a module is a single operation."""
        return is_ours(m) or type(m) in CONVERSIONS or super().is_leaf_module(m, module_qualified_name)


def is_ours(module: nn.Module | None) -> bool:
    """Return whether a module is a layer of this library, which accepts moments without conversion."""
    return type(module).__module__.startswith("mpgelu.layers.")


def trace(module: nn.Module) -> tuple[list[fx.Node], dict[str, Tensor]]:
    """Return the nodes that the output depends on, input first, and the constants that they refer to by name.

    In each node, ``meta["random"]`` is whether its value depends on the input.

    Args:
        module: The module to trace.

    Raises:
        ConversionError: The module cannot be traced, or has not exactly one input and one output.
    """
    attributes = set(vars(module))
    try:
        with in_mode(module, training=True):
            graph = Tracer().trace(module)
        names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        constants = {name: operator.attrgetter(name)(module) for name in names}
    except Exception as error:
        raise ConversionError(
            f"from_torch: {type(module).__name__} cannot be traced by torch.fx ({error}); its forward must run the "
            "same operations whatever the numbers: no if and no loop over values or shapes"
        ) from error
    finally:
        for name in set(vars(module)) - attributes:  # constants that tracing has put there
            delattr(module, name)
    nodes = _needed(module, graph)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ConversionError(
            f"from_torch: the output of {type(module).__name__} must depend on one input, it depends on "
            f"{', '.join(node.name for node in inputs) or 'none'}; give it one tensor (rows, features)"
        )
    for node in nodes:
        node.meta["random"] = node in inputs or any(used.meta["random"] for used in node.all_input_nodes)
    return nodes, constants


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set all parts of a module to training or evaluation mode, and restore their modes at the end of the context."""
    before = {part: part.training for part in module.modules()}
    try:
        for part in before:
            part.training = training
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


def _needed(module: nn.Module, graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that the output depends on."""
    *nodes, output = graph.nodes
    (result,) = output.args
    if not isinstance(result, fx.Node):
        raise ConversionError(
            f"from_torch: {type(module).__name__} must give one tensor, it gives {result!r}; "
            "convert the part that leads to one output"
        )
    needed = {result}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
        elif node.op in CALLS and is_in_place(node, module):
            raise ConversionError(
                f"from_torch: node {node.name!r} ({operation_of(node, module)}) changes a value in place and its "
                "result is not used; write x = ... instead"
            )
    return [node for node in nodes if node in needed]


def operation_of(node: fx.Node, module: nn.Module) -> str:
    """Return the name of the operation of a node: a class, a function or a method."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__
    return node.target if isinstance(node.target, str) else node.target.__name__


def is_in_place(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a node overwrites its input."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    name = operation_of(node, module)
    return bool(node.kwargs.get("inplace")) or name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv")
