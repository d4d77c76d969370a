"""Sums of random vectors: exact where it is known which randomness they share."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import Block, DiagonalMoments, FactoredMoments, FullMoments, Moments
from mpgelu.rules.scale import check_constant, scale


@singledispatch
def add(value: Any, other: Any, alpha: float = 1.0) -> Any:
    r"""Moments of :math:`h + \alpha h'`; a constant :math:`h'` moves the mean alone, which is always exact.

    Two factored moments add factor by factor, and exactly, where their blocks hold the same variance tensor:

    .. math:: \sum_s (F_s + \alpha F'_s)^\top \operatorname{diag}(d_s) (F_s + \alpha F'_s)
        + \operatorname{diag}(r + \alpha^2 r')

    Their residuals count as independent: pass a value through :func:`fork` before two branches use it. Diagonal
    moments add variances as if independent; they drop every correlation, that of two branches too. Dense
    covariances do not say how two vectors vary together, so two full moments are refused.

    Args:
        value: a tensor or moments with n features.
        other: a number, a tensor, or moments of the same kind.
        alpha: factor of the second, as in :func:`torch.add`.
    """
    raise MissingRuleError(f"add: no rule for {type(value).__name__}; register one with @add.register")


def subtract_from(value: Any, constant: Tensor | float, alpha: float = 1.0) -> Any:
    r"""Moments of :math:`c - \alpha h` for a constant c; see :func:`add`."""
    return add(scale(value, -alpha), constant)


@add.register
def _(value: Tensor, other: Any, alpha: float = 1.0) -> Any:
    if isinstance(other, Tensor | float | int):
        return torch.add(value, other, alpha=alpha)
    return add(scale(other, alpha), value)


@add.register
def _(value: DiagonalMoments, other: Any, alpha: float = 1.0) -> DiagonalMoments:
    if isinstance(other, DiagonalMoments):
        _check_shapes(value, other)
        variance = torch.add(value.variance, other.variance, alpha=alpha * alpha)
        return DiagonalMoments(torch.add(value.mean, other.mean, alpha=alpha), variance)
    return replace(value, mean=_moved(value, other, alpha))


@add.register
def _(value: FullMoments, other: Any, alpha: float = 1.0) -> FullMoments:
    return replace(value, mean=_moved(value, other, alpha))


@add.register
def _(value: FactoredMoments, other: Any, alpha: float = 1.0) -> FactoredMoments:
    if not isinstance(other, FactoredMoments):
        return replace(value, mean=_moved(value, other, alpha))
    _check_shapes(value, other)
    if alpha != 1:
        other = scale(other, alpha)
    both = (*value.blocks, *other.blocks)
    parts = [part for part in (value.residual, other.residual) if part is not None]
    return replace(
        value,
        mean=value.mean + other.mean,
        blocks=tuple(_summed([b for b in both if b.variance is source]) for source in _distinct_sources(both)),
        residual=sum(parts[1:], parts[0]) if parts else None,
    )


def _distinct_sources(blocks: tuple[Block, ...]) -> list[Tensor]:
    """The variance tensors that name the sources of some blocks, each once."""
    sources: list[Tensor] = []
    for block in blocks:
        if all(block.variance is not source for source in sources):
            sources.append(block.variance)
    return sources


def _summed(blocks: list[Block]) -> Block:
    """One block for several of the same sources."""
    first, *others = blocks
    if not others:
        return first
    factor = sum((block.scaled_factor for block in others), first.scaled_factor)
    return Block(factor, first.variance, row_wise=not all(block.is_shared for block in blocks))


def _moved(value: Moments, constant: Any, alpha: float) -> Tensor:
    """The mean after a constant was added."""
    if isinstance(constant, Moments):
        raise InputError(
            f"add: cannot add {type(value).__name__} and {type(constant).__name__}: how the two vary together is not "
            "known; start with FactoredMoments, which keep the sources of every branch apart"
        )
    constant = torch.as_tensor(constant, dtype=value.mean.dtype, device=value.mean.device)
    check_constant("add", value, constant)
    return torch.add(value.mean, constant, alpha=alpha)


def _check_shapes(value: Moments, other: Moments) -> None:
    if value.mean.shape != other.mean.shape:
        raise InputError(
            f"add: the two means have shapes {tuple(value.mean.shape)} and {tuple(other.mean.shape)}; "
            "moments are added without broadcasting, so both branches need the same number of features"
        )
