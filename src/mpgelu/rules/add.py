"""Sums of random vectors, exact where the randomness that the summands share is known."""

from __future__ import annotations

import itertools
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
    r"""Return the moments of :math:`h + \alpha h'`.

    A constant :math:`h'` shifts the mean, which is exact for every type. Two factored moments are added factor by
    factor, exactly, where their blocks hold the same variance tensor:

    .. math:: \sum_s (F_s + \alpha F'_s)^\top \operatorname{diag}(d_s) (F_s + \alpha F'_s)
        + \operatorname{diag}(r + \alpha^2 r')

    A residual that both values hold, or that is a block of the other value, is recognised as a common source too. If a
    mask or a scale has merged it into a new residual, the joint covariance is unknown and the sum is refused: pass a
    value through :func:`fork` before two branches use it. Diagonal moments add variances as if the summands were
    independent, which is an approximation for branches of one value. Two full moments are refused, because dense
    covariances do not contain the covariance between two vectors.

    Args:
        value: A tensor or moments with n features.
        other: A number, a tensor, or moments of the same type and shape.
        alpha: Factor of the second summand, as in :func:`torch.add`.

    Raises:
        InputError: Shapes differ, or the joint covariance of the two values is unknown.
        MissingRuleError: No rule is registered for the type of ``value``.

    Example:
        >>> import torch, mpgelu
        >>> h = mpgelu.rules.fork(mpgelu.FactoredMoments.of(torch.zeros(2), torch.ones(2)))
        >>> add(h, h).variance, add(h, h, -1.0).variance
        (tensor([4., 4.]), tensor([0., 0.]))
    """
    raise MissingRuleError(f"add: no rule for {type(value).__name__}; register one with @add.register")


def subtract_from(value: Any, constant: Tensor | float, alpha: float = 1.0) -> Any:
    r"""Return the moments of :math:`c - \alpha h` for a constant c; see :func:`add`.

    Args:
        value: A tensor or moments with n features.
        constant: The number or tensor c.
        alpha: Factor of the value.
    """
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
        return DiagonalMoments(torch.add(value.mean, other.mean, alpha=alpha), variance, value.event_dims)
    return replace(value, mean=_moved(value, other, alpha))


@add.register
def _(value: FullMoments, other: Any, alpha: float = 1.0) -> FullMoments:
    return replace(value, mean=_moved(value, other, alpha))


@add.register
def _(value: FactoredMoments, other: Any, alpha: float = 1.0) -> FactoredMoments:
    if not isinstance(other, FactoredMoments):
        return replace(value, mean=_moved(value, other, alpha))
    _check_shapes(value, other)
    value, other = with_shared_names("add", value, other)
    if alpha != 1:
        other = scale(other, alpha)
    both = (*value.blocks, *other.blocks)
    parts = [part for part in (value.residual, other.residual) if part is not None]
    return replace(
        value,
        mean=value.mean + other.mean,
        blocks=tuple(_summed([b for b in both if b.variance is source]) for source in _distinct_sources(both)),
        residual=sum(parts[1:], parts[0]) if parts else None,
        merged=(*value.residual_sources, *other.residual_sources) if len(parts) == 2 else value.merged + other.merged,
    )


def with_shared_names(caller: str, *values: FactoredMoments) -> list[FactoredMoments]:
    """Return the values with every residual that another value also holds turned into a block.

    Blocks carry the identity of their sources, so :func:`add` and :func:`concatenate` can match them.

    Args:
        caller: Name of the function that the error message starts with.
        *values: Factored moments that are about to be combined.

    Raises:
        InputError: Two values share sources that were merged into others, so their joint covariance is unknown.
    """
    sources = [[*(block.sources for block in value.blocks), value.residual_sources] for value in values]
    for first, second in itertools.combinations(sources, 2):
        for one, two in itertools.product(first, second):
            if one and two and one[0] is not two[0] and any(a is b for a in one for b in two):
                raise InputError(
                    f"{caller}: the values share randomness that a mask, a scale, an index or a bounded rank has "
                    "merged with other randomness on one of the ways here, so how they vary together is not known; "
                    "pass the value that both come from through mpgelu.rules.fork before its branches use it"
                )

    def is_shared(place: int, residual: Tensor | None) -> bool:
        others = (held for other, held in enumerate(sources) if other != place)
        return any(names and names[0] is residual for held in others for names in held)

    return [
        value.with_named_residual() if is_shared(place, value.residual) else value for place, value in enumerate(values)
    ]


def _distinct_sources(blocks: tuple[Block, ...]) -> list[Tensor]:
    """Return the variance tensors that identify the sources of some blocks, each once."""
    sources: list[Tensor] = []
    for block in blocks:
        if all(block.variance is not source for source in sources):
            sources.append(block.variance)
    return sources


def _summed(blocks: list[Block]) -> Block:
    """Return one block for several blocks of the same sources."""
    first, *others = blocks
    if not others:
        return first
    factor = sum((block.scaled_factor for block in others), first.scaled_factor)
    row_wise = not all(block.is_shared for block in blocks)
    return Block(factor, first.variance, row_wise=row_wise, merged=first.merged)


def _moved(value: Moments, constant: Any, alpha: float) -> Tensor:
    """Return the mean after adding ``alpha`` times a constant.

    Raises:
        InputError: The constant is random, or its shape does not fit.
    """
    if isinstance(constant, Moments):
        raise InputError(
            f"add: cannot add {type(value).__name__} and {type(constant).__name__}: how the two vary together is not "
            "known; start with FactoredMoments and pass a value through mpgelu.rules.fork before its branches use it, "
            "which keeps the sources of every branch apart"
        )
    constant = torch.as_tensor(constant, dtype=value.mean.dtype, device=value.mean.device)
    check_constant("add", value, constant)
    return torch.add(value.mean, constant, alpha=alpha)


def _check_shapes(value: Moments, other: Moments) -> None:
    """Raise if two moments have different shapes; sums do not broadcast."""
    if value.mean.shape != other.mean.shape:
        raise InputError(
            f"add: the two means have shapes {tuple(value.mean.shape)} and {tuple(other.mean.shape)}; "
            "moments are added without broadcasting, so both branches need the same number of features"
        )
