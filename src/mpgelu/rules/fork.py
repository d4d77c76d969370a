"""Preparation of a value that several branches of a network use, so that the branches can be combined exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch
from typing import Any

from torch import Tensor

from mpgelu.errors import InputError, MissingRuleError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments


@singledispatch
def fork(value: Any) -> Any:
    """Return the same moments in a form in which :func:`add` and :func:`concatenate` recognise what branches share.

    The residual of factored moments becomes a block with an identity factor, whose variance tensor identifies the
    sources in every branch; full moments are factored by their eigenvectors. From then on the moments stay factored at
    any cost (``max_rank=math.inf``), because dense matrices would lose the identity of the sources. The operation is
    exact. Diagonal moments and tensors are returned unchanged: they have no correlations and no randomness,
    respectively.

    Args:
        value: A tensor or moments with n features.

    Raises:
        InputError: The moments have a bounded rank, which would merge sources that branches share.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"fork: no rule for {type(value).__name__}; register one with @fork.register")


@fork.register
def _(value: Tensor) -> Tensor:
    return value


@fork.register
def _(value: DiagonalMoments) -> DiagonalMoments:
    return value


@fork.register
def _(value: FullMoments) -> FactoredMoments:
    return replace(FactoredMoments.from_moments(value), max_rank=math.inf)


@fork.register
def _(value: FactoredMoments) -> FactoredMoments:
    if value.max_rank not in (None, math.inf):
        raise InputError(
            f"fork: max_rank={value.max_rank} would merge sources that two branches share and make them look "
            "independent; a network with branches needs max_rank=None or math.inf"
        )
    return replace(value.with_named_residual(), max_rank=math.inf)
