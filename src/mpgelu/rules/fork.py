"""A value that several branches will use: its randomness is given names, so that the branches can meet again."""

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
    r"""The same moments, held so that :func:`add` and :func:`concatenate` recognise what branches have in common.

    The independent residual of factored moments becomes a block with the identity as factor, whose variance tensor
    names its sources in every branch; full moments are factored by their eigenvectors. From then on the moments stay
    factored whatever that costs (``max_rank=math.inf``), because dense matrices would lose the names. Exact. Diagonal
    moments have no correlations to keep, and a tensor no randomness.

    Args:
        value: A tensor or moments with n features.
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
