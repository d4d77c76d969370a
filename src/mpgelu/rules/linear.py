"""Linear maps with known weights, exact for every type of moments that keeps correlations."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import Tensor

from mpgelu.errors import MissingRuleError
from mpgelu.moments import Block, DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments.checks import check_features
from mpgelu.moments.products import full_precision, linear_map, products

# Largest table (entries) of weight-times-factor products kept to carry a shared block through one matrix product.
_TABLE_LIMIT = 2**24


@singledispatch
def linear(value: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    r"""Return the moments of :math:`W h + b`.

    .. math:: W m + b, \qquad W C W^\top

    Exact for full and factored moments. Diagonal moments keep :math:`(W \circ W) v` and drop the correlations.
    Factored moments with ``max_rank=None`` become full ones where dense products are cheaper.

    Args:
        value: A tensor or moments with n features.
        weight: The matrix W, ``(outputs, n)``.
        bias: The vector b, ``(outputs,)``, or ``None``.

    Raises:
        InputError: The number of features or the dtype does not fit the weight.
        MissingRuleError: No rule is registered for the type of ``value``.
    """
    raise MissingRuleError(f"linear: no rule for {type(value).__name__}; register one with @linear.register")


@linear.register
def _(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_features("linear", weight, value)
    return linear_map(value, weight, bias)


@linear.register
def _(value: DiagonalMoments, weight: Tensor, bias: Tensor | None = None) -> DiagonalMoments:
    check_features("linear", weight, value.mean)
    mean, variance = linear_map(value.mean, weight, bias), linear_map(value.variance, weight.square())
    return DiagonalMoments(mean, variance, value.event_dims)


@linear.register
def _(value: FullMoments, weight: Tensor, bias: Tensor | None = None) -> FullMoments:
    check_features("linear", weight, value.mean)
    return FullMoments(linear_map(value.mean, weight, bias), _mapped_covariance(value.covariance, weight))


@linear.register
def _(value: FactoredMoments, weight: Tensor, bias: Tensor | None = None) -> FactoredMoments | FullMoments:
    check_features("linear", weight, value.mean)
    if value.max_rank is None and _dense_is_cheaper(value.row_rank, *weight.shape):
        full: FullMoments = linear(FullMoments.from_moments(value), weight, bias)
        return full
    if value.max_rank is not None and value.row_rank > value.max_rank:
        value = value.truncated(int(value.max_rank))
    blocks = value.map_blocks(lambda block: _carry(block, weight))
    if value.residual is not None:
        blocks = (*blocks, Block(weight.mT, value.residual, merged=value.merged))
    return FactoredMoments(linear_map(value.mean, weight, bias), blocks, max_rank=value.max_rank)


@full_precision  # whose terms have both signs
def _mapped_covariance(covariance: Tensor, weight: Tensor) -> Tensor:
    """Return ``W C W^T`` by two products with one matrix for all rows: faster than a product for every row."""
    half = linear_map(covariance, weight)  # (*batch, n, outputs)
    return linear_map(half.mT, weight)


def _carry(block: Block, weight: Tensor) -> Block:
    """Return the block of ``W h`` for a block of ``h``."""
    return Block(_mapped_factor(block, weight), block.variance, row_wise=not block.is_shared, merged=block.merged)


def _mapped_factor(block: Block, weight: Tensor) -> Tensor:
    """Return factor and gain multiplied by the weight, by the product with the smallest intermediate result."""
    factor, gain, outputs = block.factor, block.gain, weight.shape[0]
    if gain is None:
        return linear_map(factor, weight)
    if factor.dim() == 2 and factor.numel() * outputs <= _TABLE_LIMIT:
        # W diag(g) F for all rows at once: a matrix product of g with the table of W[o, j] F[r, j].
        table = (factor.unsqueeze(-2) * weight).flatten(0, 1)  # (rank * outputs, n)
        return linear_map(gain, table).view(*gain.shape[:-1], block.rank, outputs)
    if outputs < block.rank and outputs < weight.shape[1]:
        return products(factor, gain.unsqueeze(-2) * weight)
    return linear_map(block.scaled_factor, weight)


def _dense_is_cheaper(rank: int, outputs: int, inputs: int) -> bool:
    """Return whether to convert to dense covariance matrices.

    The factors cost ``rank * inputs * outputs`` multiplications for each row. The dense products cost ``inputs *
    outputs * (inputs + outputs)``, and about half as much again to write and mask the matrices. A layer that narrows
    stays factored: there, writing the covariance of its wide input would cost more than it saves.

    Args:
        rank: Total rank of the blocks that differ between rows.
        outputs: Number of outputs of the layer.
        inputs: Number of inputs of the layer.
    """
    return rank > inputs + 2 * outputs and inputs <= 2 * outputs
