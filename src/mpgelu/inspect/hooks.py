"""A function that is called after every layer of a network, for audit and attribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def after_each_layer(network: nn.Module, call: Callable[[str, nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Return a context in which a function is called after every layer, a module without children.

    Args:
        network: The network whose layers are observed.
        call: Function of the name of the layer, the layer, its input and its output. The name of a layer that is
            called several times is followed by the number of the call, as in ``0 (2)``. A result other than ``None``
            replaces the output.
    """
    calls: Counter[str] = Counter()

    def hook(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        calls[name] += 1
        return call(name if calls[name] == 1 else f"{name} ({calls[name]})", module, inputs[0], output)

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(partial(hook, name)) for name, module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
