"""Flattening of the event dimensions of random values."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments


@singledispatch
def flatten(value: Any, start_dim: int = 1, end_dim: int = -1) -> Any:
    """Return a value with the dimensions from ``start_dim`` to ``end_dim`` joined, as by :func:`torch.flatten`.

    Moments of vectors ``(rows, n)`` are returned unchanged, and diagonal moments of other shapes have their event
    dimensions joined; both are exact. Batch dimensions cannot be joined.

    Args:
        value: A tensor or moments.
        start_dim: First dimension to join.
        end_dim: Last dimension to join.

    Raises:
        InputError: A batch dimension of moments would be joined.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"flatten: no rule for {type(value).__name__}; register one with @flatten.register")


@flatten.register
def _(value: Tensor, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    return torch.flatten(value, start_dim, end_dim)


@flatten.register
def _(value: DiagonalMoments, start_dim: int = 1, end_dim: int = -1) -> DiagonalMoments:
    joined = _joined_dimensions(value, start_dim, end_dim)
    mean, variance = (
        torch.flatten(part, start_dim, end_dim) if joined else part for part in (value.mean, value.variance)
    )
    return DiagonalMoments(mean, variance, event_dims=value.event_dims - joined)


@flatten.register(FullMoments)
@flatten.register(FactoredMoments)
def _(value: Moments, start_dim: int = 1, end_dim: int = -1) -> Moments:
    _joined_dimensions(value, start_dim, end_dim)
    return value


def _joined_dimensions(value: Moments, start_dim: int, end_dim: int) -> int:
    """Return by how many dimensions flattening shortens the event shape.

    Raises:
        InputError: A batch dimension would be joined.
    """
    dimensions = value.mean.dim()
    first, last = (d + dimensions if d < 0 else d for d in (start_dim, end_dim))
    joined = max(min(last, dimensions - 1) - first, 0)
    if joined and first < len(value.batch_shape):
        raise InputError(
            f"flatten: a random value of this batch has the event shape {tuple(value.event_shape)}, and dimensions "
            f"{start_dim} to {end_dim} of a mean {tuple(value.mean.shape)} are more than that; flatten the input "
            "before it becomes moments, or give event_dims to DiagonalMoments"
        )
    return joined
