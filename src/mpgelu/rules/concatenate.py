"""Concatenation of random vectors, exact where the randomness that they share is known."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from functools import singledispatch
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments
from mpgelu.rules.add import add, with_shared_names

_M = TypeVar("_M", bound=Moments)


@singledispatch
def concatenate(value: Any, *others: Any, dim: int = -1) -> Any:
    r"""Return the moments of :math:`(h, h', \dots)`, joined along an event dimension.

    Factored moments are exact: factors of the same sources are concatenated in the way that :func:`add` adds them, and
    values whose common sources were merged are refused in the same way. Diagonal moments stay diagonal. Full moments
    are refused, because they do not contain the covariance between two vectors.

    Args:
        value: A tensor or moments.
        *others: Further values of the same type and batch shape.
        dim: The dimension of the features, as its number or -1; for events of more dimensions, any of theirs.

    Raises:
        InputError: Types or batch shapes differ, the dimension is one of the batch, or the joint covariance is
            unknown.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"concatenate: no rule for {type(value).__name__}; register one with @concatenate.register")


@concatenate.register
def _(value: Tensor, *others: Tensor, dim: int = -1) -> Tensor:
    return torch.cat((value, *others), dim)


@concatenate.register
def _(value: DiagonalMoments, *others: DiagonalMoments, dim: int = -1) -> DiagonalMoments:
    values = _check_alike((value, *others), dim)
    mean, variance = (torch.cat(parts, dim) for parts in zip(*((v.mean, v.variance) for v in values), strict=True))
    return DiagonalMoments(mean, variance, event_dims=value.event_dims)


@concatenate.register
def _(value: FullMoments, *others: FullMoments, dim: int = -1) -> FullMoments:
    if others:
        raise InputError(
            "concatenate: FullMoments do not hold the covariance of one vector with another; "
            "start with FactoredMoments, which keep the sources of every branch apart"
        )
    _check_alike((value,), dim)
    return value


@concatenate.register
def _(value: FactoredMoments, *others: FactoredMoments, dim: int = -1) -> FactoredMoments:
    values = with_shared_names("concatenate", *_check_alike((value, *others), dim))
    ends = list(itertools.accumulate(v.features for v in values))
    padded = [_padded(v, end - v.features, ends[-1] - end) for v, end in zip(values, ends, strict=True)]
    return functools.reduce(add, padded)


def _padded(value: FactoredMoments, before: int, after: int) -> FactoredMoments:
    """Return the vector padded with zeros before and after it; a concatenation is the sum of such vectors."""

    def pad(x: Tensor | None) -> Any:
        return x if x is None else F.pad(x, (before, after))

    blocks = value.map_blocks(lambda block: replace(block, factor=pad(block.factor), gain=pad(block.gain)))
    merged = value.residual_sources
    return replace(value, mean=pad(value.mean), blocks=blocks, residual=pad(value.residual), merged=merged)


def _check_alike(values: tuple[_M, ...], dim: int) -> tuple[_M, ...]:
    """Return the values after checking that types and batch shapes agree and that ``dim`` is an event dimension."""
    first = values[0]
    for other in values:
        if type(other) is not type(first) or other.batch_shape != first.batch_shape:
            raise InputError(f"concatenate: the values must be of one kind and batch shape, got {first} and {other}")
    dimensions, events = first.mean.dim(), first.event_dims
    if not dimensions - events <= (dim + dimensions if dim < 0 else dim) < dimensions:
        along = "features, the last" if events == 1 else f"events, the last {events}"
        raise InputError(
            f"concatenate: moments are joined along their {along} of {dimensions} dimensions, got dim={dim}"
        )
    return values
