"""Checks of the tensors that a predictive distribution is made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mpgelu.errors import InputError


def check_floats(caller: str, argument: str, value: object, like: Tensor | None = None, *shapes: Sequence[int]) -> None:
    """Require a float tensor of the dtype and device of ``like``, and of one of ``shapes`` if any are given.

    Args:
        caller: Name of the function that the error message starts with.
        argument: Name of the argument in the error message.
        value: The value to check.
        like: Tensor of the wanted dtype and device; ``None`` for any.
        *shapes: Allowed shapes; any shape if there are none.

    Raises:
        InputError: The value is not such a tensor.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{caller}: {argument} must be a float tensor, got {came}; use torch.as_tensor(x).float()")
    if like is not None and (value.dtype != like.dtype or value.device != like.device):
        wanted, came = f"{like.dtype} on {like.device}", f"{value.dtype} on {value.device}"
        raise InputError(f"{caller}: {argument} must be {wanted} like the rest, got {came}; convert it with .to(...)")
    if shapes and tuple(value.shape) not in [tuple(shape) for shape in shapes]:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise InputError(f"{caller}: {argument} must have shape {wanted}, got {tuple(value.shape)}; reshape it")


def check_mixture(means: Tensor, variances: Tensor, log_weights: Tensor, **of_rows: Tensor) -> None:
    """Raise if the parts of a mixture do not fit together.

    Args:
        means: Means of the components, ``(*batch, K)``.
        variances: Variances of the components, in the same shape.
        log_weights: Logarithms of their weights, ``(K,)`` or ``(*batch, K)``.
        **of_rows: Numbers of each row, ``(*batch,)``.

    Raises:
        InputError: Something is not a tensor of floats, or has another shape, dtype or device than the means.
    """
    if _is_mixture(means, variances, log_weights, *of_rows.values()):  # in a fraction of the time of what follows
        return
    check_floats("Predictive", "means", means)
    if means.dim() == 0:
        raise InputError("Predictive: means must be (*batch, K), got a scalar; use means.reshape(1)")
    check_floats("Predictive", "variances", variances, means, means.shape)
    check_floats("Predictive", "log_weights", log_weights, means, means.shape[-1:], means.shape)
    for name, part in of_rows.items():
        check_floats("Predictive", name, part, means, means.shape[:-1])


def _is_mixture(means: object, variances: Tensor, log_weights: Tensor, *of_rows: Tensor) -> bool:
    """Return whether :func:`check_mixture` accepts the parts."""
    if not isinstance(means, Tensor) or not means.is_floating_point() or not means.dim():
        return False
    shape, dtype, device = means.shape, means.dtype, means.device
    others = (variances, log_weights, *of_rows)
    if not all(isinstance(part, Tensor) and part.dtype is dtype and part.device == device for part in others):
        return False
    batch, shared = shape[:-1], log_weights.shape == shape[-1:] or log_weights.shape == shape
    return shared and variances.shape == shape and all(part.shape == batch for part in of_rows)


def as_tensor(caller: str, argument: str, value: Tensor | ArrayLike, like: Tensor, *shapes: Sequence[int]) -> Tensor:
    """Return a value as a float tensor of the dtype and device of ``like``.

    Numbers, sequences, arrays and columns of data frames are converted; a tensor must have dtype and device already.

    Args:
        caller: Name of the function that the error message starts with.
        argument: Name of the argument in the error message.
        value: The value.
        like: Tensor of the wanted dtype and device.
        *shapes: Allowed shapes; any shape if there are none.

    Raises:
        InputError: The tensor has another dtype, device or shape.
    """
    if not isinstance(value, Tensor):
        value = np.array(value) if hasattr(value, "__array__") else value  # such as a column of a data frame
        value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    check_floats(caller, argument, value, like, *shapes)
    return value


def check_broadcast(caller: str, argument: str, shape: Sequence[int], batch: Sequence[int]) -> None:
    """Require a shape that broadcasts against the batch of a distribution.

    A column ``(*batch, 1)`` is refused, because broadcasting would compare every row with every other.

    Args:
        caller: Name of the function that the error message starts with.
        argument: Name of the argument in the error message.
        shape: Shape of the argument.
        batch: Batch shape of the distribution.

    Raises:
        InputError: The shape does not broadcast, or is a column.
    """
    shape, batch = tuple(shape), tuple(batch)
    sizes = zip(shape[::-1], batch[::-1], strict=False)
    column = shape == (*batch, 1) and batch[-1:] > (1,)
    if column or not all(size == rows or 1 in (size, rows) for size, rows in sizes):
        fix = f"use {argument}.squeeze(-1)" if column else f"give one {argument} for each row, or a scalar"
        raise InputError(f"{caller}: {argument} must broadcast against the rows {batch}, got {shape}; {fix}")


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
