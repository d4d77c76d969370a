"""Checks of the tensors that a predictive distribution is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
