"""The one place that decides whether code may depend on the values of tensors.

Data checks, row-by-row iterations and compiled kernels read values, which is impossible while a graph is recorded or
a function is transformed. Every such piece of code asks :func:`values_are_visible` and has a form without it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


def values_are_visible(*tensors: Tensor) -> bool:
    """Return whether the values of some tensors may be read by Python code or by a kernel.

    They may not be read while ``torch.compile`` or ``torch.export`` records a graph, inside the transforms of
    ``torch.func`` (``vmap``, ``grad``, ``jvp``), in forward-mode differentiation, or for subclasses of ``Tensor``,
    such as fake and functional tensors, that hold no values of their own; tensors on "meta" have none either.

    Args:
        *tensors: The tensors whose values would be read; with none, only the surrounding transforms are checked.

    Example:
        >>> values_are_visible(torch.ones(2))
        True
        >>> bool(torch.func.vmap(lambda x: x * values_are_visible(x))(torch.ones(2)).any())
        False
    """
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or transformed:
        return False
    return all(type(x) in (Tensor, Parameter) and not x.is_meta for x in tensors)


def is_known_zero(tensor: Tensor) -> bool:
    """Return whether a tensor with entries is seen to be zero everywhere, and no gradient will be computed through it.

    It is False where values may not be read, so that a caller must have a form for tensors that may be zero.

    Example:
        >>> is_known_zero(torch.zeros(2)), is_known_zero(torch.zeros(2, requires_grad=True))
        (True, False)
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return values_are_visible(tensor) and tensor.numel() > 0 and not bool(tensor.any())
