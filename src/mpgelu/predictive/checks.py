"""Checks of the tensors that a predictive distribution is made of, and of what may be done with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mpgelu.errors import InputError


def check_floats(caller: str, argument: str, value: object, like: Tensor | None = None, *shapes: Sequence[int]) -> None:
    """Require a float tensor of the dtype and device of ``like``, and of one of ``shapes`` if any are given."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{caller}: {argument} must be a float tensor, got {came}; use torch.as_tensor(x).float()")
    if like is not None and (value.dtype, value.device) != (like.dtype, like.device):
        wanted, came = f"{like.dtype} on {like.device}", f"{value.dtype} on {value.device}"
        raise InputError(f"{caller}: {argument} must be {wanted} like the rest, got {came}; convert it with .to(...)")
    if shapes and tuple(value.shape) not in [tuple(shape) for shape in shapes]:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise InputError(f"{caller}: {argument} must have shape {wanted}, got {tuple(value.shape)}; reshape it")


def values_are_visible(*tensors: Tensor) -> bool:
    """Whether code may depend on values: nothing is traced, nor transformed by torch.func or forward mode."""
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return not (torch.compiler.is_compiling() or transformed) and all(type(x) in (Tensor, Parameter) for x in tensors)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
