"""Moments whose covariance is an exact sum of a few products: the full covariance without the n x n matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.moments.base import Moments, Replacement
from mpgelu.moments.checks import check_mean, check_spread
from mpgelu.moments.diagonal import DiagonalMoments
from mpgelu.moments.products import contract, gram

_TABLE_LIMIT = 2**24  # entries of a product table kept to treat all rows in one matrix product


@dataclass(frozen=True, eq=False)
class Block:
    r"""What one set of independent sources contributes to a covariance.

    .. math:: C = \operatorname{diag}(g)\, F^\top \operatorname{diag}(d)\, F\, \operatorname{diag}(g)

    with :math:`F` the ``factor``, :math:`d` the ``variance`` of the sources and :math:`g` the ``gain``. The factor is
    shared by all rows until something row-wise scales it; the gain holds such a scale until the next linear map,
    which then needs one matrix product for the whole batch.

    The ``variance`` tensor itself is the identity of the sources: two blocks that hold the same tensor object
    speak of the same random numbers, and so may be added factor by factor. Sources that were merged into these, as a
    mask merges the residual it meets into a new one, are remembered: what shares them can be recognised, though no
    longer told apart.

    Args:
        factor: ``(rank, n)`` shared, or ``(*batch, rank, n)`` per row.
        variance: ``(*batch, rank)``.
        gain: ``(n,)`` or ``(*batch, n)``; ``None`` for one.
        row_wise: whether factor or gain belong to one row, which their shapes cannot tell where there is no batch.
        merged: variance tensors of the sources that were merged into these.
    """

    factor: Tensor
    variance: Tensor
    gain: Tensor | None = None
    row_wise: bool = False
    merged: tuple[Tensor, ...] = ()

    @property
    def rank(self) -> int:
        """Number of sources."""
        return self.factor.shape[-2]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The variance tensors of the sources in this block, that of the block itself first."""
        return (self.variance, *self.merged)

    @property
    def is_shared(self) -> bool:
        """Whether all rows have the same factor, the gain included."""
        return not self.row_wise and self.factor.dim() == 2 and (self.gain is None or self.gain.dim() == 1)

    @property
    def scaled_factor(self) -> Tensor:
        """The factor with the gain multiplied in, ``(rank, n)`` or ``(*batch, rank, n)``."""
        return self.factor if self.gain is None else self.factor * self.gain.unsqueeze(-2)

    @property
    def marginal_variance(self) -> Tensor:
        """This block's part of the marginal variances, ``(*batch, n)``."""
        shared = self.factor.dim() == 2
        marginal = self.variance @ self.factor.square() if shared else contract(self.variance, self.factor)
        return marginal if self.gain is None else marginal * self.gain.square()

    @property
    def dense(self) -> Tensor:
        """This block's part of the covariance, ``(*batch, n, n)``."""
        n = self.factor.shape[-1]
        if self.factor.dim() == 2 and self.factor.numel() * n <= _TABLE_LIMIT:
            products = (self.factor.unsqueeze(-1) * self.factor.unsqueeze(-2)).flatten(1)  # (rank, n * n)
            covariance = (self.variance @ products).view(*self.variance.shape[:-1], n, n)
        else:
            covariance = gram(self.variance, self.factor)
        return covariance if self.gain is None else covariance * self.gain.unsqueeze(-1) * self.gain.unsqueeze(-2)

    def scaled(self, gain: Tensor, row_wise: bool = False) -> Block:
        """The block after unit i has been multiplied by ``gain[..., i]``, which each row has its own of if row-wise."""
        product = gain if self.gain is None else self.gain * gain
        return replace(self, gain=product, row_wise=self.row_wise or row_wise)

    def replaced(self, function: Replacement) -> Block:
        """The block with every tensor replaced; see :meth:`Moments.replaced`."""
        alone = self.row_wise and self.variance.dim() == 1  # there is no batch, and the factor is that of its one row
        variance, gain = function(self.variance, 1, True), self.gain
        return Block(
            function(self.factor, 2, alone or self.factor.dim() > 2),
            variance,
            gain if gain is None else function(gain, 1, alone or gain.dim() > 1),
            not self.is_shared,
            _remembered(self.merged, self.variance, variance),
        )


@dataclass(frozen=True, eq=False, repr=False)
class FactoredMoments(Moments):
    r"""Mean and an exact covariance held as blocks of independent sources plus an independent residual.

    .. math:: C = \sum_s \operatorname{diag}(g_s) F_s^\top \operatorname{diag}(d_s) F_s \operatorname{diag}(g_s)
        + \operatorname{diag}(r)

    Closed under linear maps, Gaussian-weight linear maps and independent masks (Dropout, MP-GELU), so a whole
    MP-GELU network needs no n x n matrix per row. The numbers are those of :class:`FullMoments` to rounding.

    Args:
        mean: ``(*batch, n)``.
        blocks: the correlated part.
        residual: ``(*batch, n)``, variances of what is independent between units; ``None`` for none.
        max_rank: ``None`` stays exact and lets the rules change to :class:`FullMoments` where that is cheaper.
            A number bounds the rank carried per row: the least important sources of each row move into the
            residual, which keeps every variance and drops their correlation; 0 is the diagonal approximation.
            ``math.inf`` stays factored whatever it costs, which keeps every source apart.
        merged: variance tensors of the sources that were merged into the residual; see :class:`Block`.
    """

    mean: Tensor
    blocks: tuple[Block, ...] = ()
    residual: Tensor | None = None
    max_rank: float | None = None
    merged: tuple[Tensor, ...] = ()

    @classmethod
    def certain(cls, x: Tensor, max_rank: float | None = None) -> Self:
        """A known input: zero covariance."""
        check_mean(f"{cls.__name__}.certain", x)
        _check_max_rank(f"{cls.__name__}.certain", max_rank)
        return cls(x, max_rank=max_rank)

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor, max_rank: float | None = None) -> Self:
        """An uncertain input with a variance ``(*batch, n)`` or a covariance ``(*batch, n, n)``.

        A covariance is held by its eigenvectors. Gradients with respect to it are those of
        :func:`torch.linalg.eigh`, which needs distinct eigenvalues.
        """
        caller = f"{cls.__name__}.of"
        check_mean(caller, mean)
        _check_max_rank(caller, max_rank)
        spread = check_spread(caller, mean, spread)
        if spread.dim() == mean.dim():
            return cls(mean, residual=spread, max_rank=max_rank)
        return cls(mean, (_principal_block(spread),), max_rank=max_rank)

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        """The same moments, factored: from a diagonal as it is, from a dense covariance by its eigenvectors."""
        if isinstance(moments, cls):
            return moments
        if isinstance(moments, DiagonalMoments):
            return cls(moments.mean, residual=moments.variance)
        return cls(moments.mean, (_principal_block(moments.covariance),))

    @property
    def variance(self) -> Tensor:
        """Marginal variances ``(*batch, n)``, without forming the covariance."""
        parts = [block.marginal_variance for block in self.blocks]
        if self.residual is not None:
            parts.append(self.residual)
        return _sum(parts) if parts else torch.zeros_like(self.mean)

    @property
    def covariance(self) -> Tensor:
        """Dense view ``(*batch, n, n)``."""
        parts = [block.dense for block in self.blocks]
        if self.residual is not None:
            parts.append(torch.diag_embed(self.residual))
        return _sum(parts) if parts else self.mean.new_zeros(*self.mean.shape, self.features)

    @property
    def residual_sources(self) -> tuple[Tensor, ...]:
        """The variance tensors of the sources in the residual, that of the residual itself first."""
        return () if self.residual is None else (self.residual, *self.merged)

    def with_named_residual(self) -> Self:
        """The same moments with the residual as a block: the identity times sources that can be recognised."""
        if self.residual is None:
            return self
        identity = torch.eye(self.features, dtype=self.mean.dtype, device=self.mean.device)
        block = Block(identity, self.residual, merged=self.merged)
        return replace(self, blocks=(*self.blocks, block), residual=None, merged=())

    @property
    def row_rank(self) -> int:
        """Total rank of the blocks that differ from row to row: what the next linear map has to pay for."""
        return sum(block.rank for block in self.blocks if not block.is_shared)

    def map_blocks(self, function: Callable[[Block], Block]) -> tuple[Block, ...]:
        """Every block through ``function``."""
        return tuple(function(block) for block in self.blocks)

    def truncated(self, rank: int) -> FactoredMoments:
        """Keep the ``rank`` most important sources of each row and move the variance of the others into the residual.

        A source's importance is the variance it adds over all units. Marginal variances stay exact; the
        correlation that the moved sources caused is dropped.
        """
        per_row = [block for block in self.blocks if not block.is_shared]
        factors = torch.cat([b.scaled_factor.expand(*self.batch_shape, b.rank, self.features) for b in per_row], dim=-2)
        variances = torch.cat([b.variance.expand(*self.batch_shape, b.rank) for b in per_row], dim=-1)
        contributions = variances.unsqueeze(-1) * factors.square()  # (*batch, total rank, n)
        order = contributions.sum(-1).argsort(dim=-1, descending=True)
        kept, moved = order[..., :rank], order[..., rank:]
        block = Block(
            torch.take_along_dim(factors, kept.unsqueeze(-1), dim=-2),
            torch.take_along_dim(variances, kept, dim=-1),
            row_wise=True,
        )
        lost = torch.take_along_dim(contributions, moved.unsqueeze(-1), dim=-2).sum(-2)
        shared = tuple(block for block in self.blocks if block.is_shared)
        merged = tuple(source for block in per_row for source in block.sources)
        return replace(
            self,
            blocks=(*shared, replace(block, merged=merged)) if rank else shared,
            residual=lost if self.residual is None else self.residual + lost,
            merged=(*self.residual_sources, *merged),
        )

    def replaced(self, function: Replacement) -> Self:
        """See :meth:`Moments.replaced`."""
        residual = self.residual
        if residual is not None:
            residual = function(residual, 1, True)
        return type(self)(
            function(self.mean, 1, True),
            self.map_blocks(lambda block: block.replaced(function)),
            residual,
            self.max_rank,
            _remembered(self.merged, self.residual, residual),
        )

    def _describe(self) -> str:
        sources = sum(block.rank for block in self.blocks)
        words = f"{len(self.blocks)} blocks of {sources} sources ({self.row_rank} per row)"
        return words if self.residual is None else f"{words} + residual"


def _remembered(merged: tuple[Tensor, ...], before: Tensor | None, after: Tensor | None) -> tuple[Tensor, ...]:
    """What was merged into some sources once another tensor names them; nothing that would keep a graph alive."""
    if before is None or after is None or after is before:
        return merged
    return tuple(name for name in (*merged, before) if after.requires_grad or not name.requires_grad)


def _check_max_rank(caller: str, max_rank: float | None) -> None:
    if max_rank is not None and not max_rank >= 0:
        raise InputError(f"{caller}: max_rank must not be negative, got {max_rank}; None keeps everything")


def _principal_block(covariance: Tensor) -> Block:
    values, vectors = torch.linalg.eigh(covariance.to(torch.promote_types(covariance.dtype, torch.float32)))
    # Clamped because rounding makes zero eigenvalues slightly negative.
    return Block(vectors.mT.to(covariance.dtype), values.clamp_min(0).to(covariance.dtype), row_wise=True)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _flatten(value: Block | FactoredMoments) -> tuple[list[Any], tuple[Any, ...]]:
    """Tensors apart from settings, in which transforms such as vmap must not look for a batch dimension.

    What was merged is left behind: a transform makes new tensors, and with them new sources.
    """
    *tensors, setting, _ = (getattr(value, field.name) for field in fields(value))
    return [tensor for tensor in tensors if tensor is not None], (type(value), setting)


def _unflatten(tensors: Iterable[Any], settings: tuple[Any, ...]) -> Block | FactoredMoments:
    first, second, *optional = tensors
    kind, setting = settings
    value: Block | FactoredMoments = kind(first, second, optional[0] if optional else None, setting)
    return value


for _kind in (Block, FactoredMoments):
    torch.utils._pytree.register_pytree_node(
        _kind, _flatten, _unflatten, serialized_type_name=f"mpgelu.{_kind.__name__}"
    )
