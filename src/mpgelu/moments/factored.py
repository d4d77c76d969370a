"""Moments whose covariance is an exact sum of low-rank products, without an n x n matrix for each row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.moments.base import Moments, Replacement
from mpgelu.moments.checks import check_mean, check_spread, check_vector
from mpgelu.moments.diagonal import DiagonalMoments
from mpgelu.moments.products import combine, contract, gram

_TABLE_LIMIT = 2**24  # entries of a product table kept to treat all rows in one matrix product


@dataclass(frozen=True, eq=False)
class Block:
    r"""The contribution of one set of independent sources to a covariance.

    .. math:: C = \operatorname{diag}(g)\, F^\top \operatorname{diag}(d)\, F\, \operatorname{diag}(g)

    with :math:`F` the ``factor``, :math:`d` the ``variance`` of the sources and :math:`g` the ``gain``. All rows share
    the factor until an operation scales each row differently. The gain stores this scale until the next linear map, so
    that the map needs a single matrix product for the whole batch.

    The ``variance`` tensor identifies the sources: two blocks that hold the same tensor object refer to the same
    random numbers, and may therefore be added factor by factor. ``merged`` lists the sources that were merged into
    these, for example by a mask that turned a residual into a new one. Values that share such sources can be detected,
    but their joint covariance is no longer known.

    Args:
        factor: ``(rank, n)`` if all rows share it, otherwise ``(*batch, rank, n)``.
        variance: Variances of the sources, ``(*batch, rank)``.
        gain: ``(n,)`` or ``(*batch, n)``; ``None`` stands for one.
        row_wise: Whether factor or gain belong to a single row. Without batch dimensions their shapes do not show it.
        merged: Variance tensors of the sources that were merged into these.
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
        """Variance tensors that identify the sources of this block: its own first, then those merged into it."""
        return (self.variance, *self.merged)

    @property
    def is_shared(self) -> bool:
        """Whether all rows have the same factor, including the gain."""
        return not self.row_wise and self.factor.dim() == 2 and (self.gain is None or self.gain.dim() == 1)

    @property
    def scaled_factor(self) -> Tensor:
        """Factor multiplied by the gain, ``(rank, n)`` or ``(*batch, rank, n)``."""
        return self.factor if self.gain is None else self.factor * self.gain.unsqueeze(-2)

    @property
    def marginal_variance(self) -> Tensor:
        """Contribution of this block to the marginal variances, ``(*batch, n)``."""
        shared = self.factor.dim() == 2
        marginal = combine(self.variance, self.factor.square()) if shared else contract(self.variance, self.factor)
        return marginal if self.gain is None else marginal * self.gain.square()

    @property
    def dense(self) -> Tensor:
        """Contribution of this block to the covariance, ``(*batch, n, n)``."""
        n = self.factor.shape[-1]
        if self.factor.dim() == 2 and self.factor.numel() * n <= _TABLE_LIMIT:
            products = (self.factor.unsqueeze(-1) * self.factor.unsqueeze(-2)).flatten(1)  # (rank, n * n)
            covariance = combine(self.variance, products).view(*self.variance.shape[:-1], n, n)
        else:
            covariance = gram(self.variance, self.factor)
        return covariance if self.gain is None else covariance * self.gain.unsqueeze(-1) * self.gain.unsqueeze(-2)

    def scaled(self, gain: Tensor, row_wise: bool = False) -> Block:
        """Return the block after unit i has been multiplied by ``gain[..., i]``.

        Args:
            gain: ``(n,)`` or ``(*batch, n)``.
            row_wise: Whether each row has its own gain.
        """
        product = gain if self.gain is None else self.gain * gain
        return replace(self, gain=product, row_wise=self.row_wise or row_wise)

    def replaced(self, function: Replacement) -> Block:
        """Return the block with every tensor replaced; see :meth:`Moments.replaced`."""
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
    r"""Mean and an exact covariance, stored as blocks of independent sources plus an independent residual.

    .. math:: C = \sum_s \operatorname{diag}(g_s) F_s^\top \operatorname{diag}(d_s) F_s \operatorname{diag}(g_s)
        + \operatorname{diag}(r)

    This form is closed under linear maps, linear maps with Gaussian weights, and independent masks (dropout, MP-GELU).
    A whole MP-GELU network therefore needs no n x n matrix for any row. Values equal those of :class:`FullMoments` to
    rounding.

    Args:
        mean: Expectation, ``(*batch, n)``.
        blocks: The correlated part of the covariance.
        residual: Variances of the part that is independent between units, ``(*batch, n)``; ``None`` for zero.
        max_rank: ``None`` keeps the covariance exact and lets rules convert to :class:`FullMoments` where that is
            cheaper. A number bounds the rank stored for each row: the least important sources move into the residual,
            which preserves every variance and drops their correlation; 0 is the diagonal approximation. ``math.inf``
            keeps the factored form at any cost, which preserves the identity of every source.
        merged: Variance tensors of the sources that were merged into the residual; see :class:`Block`.
    """

    mean: Tensor
    blocks: tuple[Block, ...] = ()
    residual: Tensor | None = None
    max_rank: float | None = None
    merged: tuple[Tensor, ...] = ()

    @classmethod
    def certain(cls, x: Tensor, max_rank: float | None = None) -> Self:
        """Return the moments of a known input, whose covariance is zero.

        Args:
            x: Values, ``(*batch, n)``.
            max_rank: Bound of the rank; see the class.
        """
        check_mean(f"{cls.__name__}.certain", x)
        _check_max_rank(f"{cls.__name__}.certain", max_rank)
        return cls(x, max_rank=max_rank)

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor, max_rank: float | None = None) -> Self:
        """Return the moments of an uncertain input.

        A covariance is factored by its eigenvectors. Gradients with respect to it are those of
        :func:`torch.linalg.eigh`, which are defined for distinct eigenvalues only.

        Args:
            mean: Expectation, ``(*batch, n)``.
            spread: Variance ``(*batch, n)`` of independent features, or covariance ``(*batch, n, n)``.
            max_rank: Bound of the rank; see the class.

        Raises:
            InputError: See :func:`mpgelu.moments.checks.check_spread`; or ``max_rank`` is negative.
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
        """Return the same moments in factored form, exactly.

        Diagonal variances become the residual; a dense covariance is factored by its eigenvectors.

        Raises:
            InputError: The random values are not vectors.
        """
        if isinstance(moments, cls):
            return moments
        check_vector(f"{cls.__name__}.from_moments", moments)
        if isinstance(moments, DiagonalMoments):
            return cls(moments.mean, residual=moments.variance)
        return cls(moments.mean, (_principal_block(moments.covariance),))

    @property
    def variance(self) -> Tensor:
        """Marginal variances, ``(*batch, n)``, computed without the dense covariance."""
        parts = [block.marginal_variance for block in self.blocks]
        if self.residual is not None:
            parts.append(self.residual)
        return _sum(parts) if parts else torch.zeros_like(self.mean)

    @property
    def covariance(self) -> Tensor:
        """Dense covariance, ``(*batch, n, n)``."""
        parts = [block.dense for block in self.blocks]
        if self.residual is not None:
            parts.append(torch.diag_embed(self.residual))
        return _sum(parts) if parts else self.mean.new_zeros(*self.mean.shape, self.features)

    @property
    def is_certain(self) -> bool:
        """Whether there are neither blocks nor a residual."""
        return len(self.blocks) == 0 and self.residual is None  # torch.compile cannot trace "not" of a tuple

    @property
    def residual_sources(self) -> tuple[Tensor, ...]:
        """Variance tensors that identify the sources of the residual: the residual first, then those merged into it."""
        return () if self.residual is None else (self.residual, *self.merged)

    def with_named_residual(self) -> Self:
        """Return the same moments with the residual as a block, whose sources can be identified later."""
        if self.residual is None:
            return self
        identity = torch.eye(self.features, dtype=self.mean.dtype, device=self.mean.device)
        block = Block(identity, self.residual, merged=self.merged)
        return replace(self, blocks=(*self.blocks, block), residual=None, merged=())

    @property
    def row_rank(self) -> int:
        """Total rank of the blocks that differ between rows, which determines the cost of the next linear map."""
        return sum(block.rank for block in self.blocks if not block.is_shared)

    def map_blocks(self, function: Callable[[Block], Block]) -> tuple[Block, ...]:
        """Return every block transformed by ``function``."""
        return tuple(function(block) for block in self.blocks)

    def truncated(self, rank: int) -> FactoredMoments:
        """Keep the most important sources of each row, and move the variance of the others into the residual.

        The importance of a source is the variance it contributes, summed over all units. Marginal variances stay
        exact; the correlation that the moved sources caused is dropped.

        Args:
            rank: Number of sources to keep for each row. Blocks that all rows share are kept in any case.
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
        """Return moments with every tensor replaced; see :meth:`Moments.replaced`."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with tensors of its own that remembers whose randomness it shares."""
        return self.replaced(lambda tensor, event, per_row: copy.deepcopy(tensor, memo))

    def _describe(self) -> str:
        sources = sum(block.rank for block in self.blocks)
        words = f"{len(self.blocks)} blocks of {sources} sources ({self.row_rank} per row)"
        return words if self.residual is None else f"{words} + residual"


def _remembered(merged: tuple[Tensor, ...], before: Tensor | None, after: Tensor | None) -> tuple[Tensor, ...]:
    """Return what counts as merged into some sources after ``after`` has replaced ``before`` as their identity.

    Tensors that would keep a graph of gradients alive are left out.
    """
    if before is None or after is None or after is before:
        return merged
    return tuple(name for name in (*merged, before) if after.requires_grad or not name.requires_grad)


def _check_max_rank(caller: str, max_rank: float | None) -> None:
    """Raise if the bound of the rank is negative."""
    if max_rank is not None and not max_rank >= 0:
        raise InputError(f"{caller}: max_rank must not be negative, got {max_rank}; None keeps everything")


def _principal_block(covariance: Tensor) -> Block:
    """Factor covariances ``(*batch, n, n)`` by their eigenvectors."""
    values, vectors = torch.linalg.eigh(covariance.to(torch.promote_types(covariance.dtype, torch.float32)))
    # Clamped because rounding makes zero eigenvalues slightly negative.
    return Block(vectors.mT.to(covariance.dtype), values.clamp_min(0).to(covariance.dtype), row_wise=True)


def _sum(parts: list[Tensor]) -> Tensor:
    """Add tensors pairwise, without the zero that the builtin ``sum`` starts with."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _flatten(value: Block | FactoredMoments) -> tuple[list[Any], tuple[Any, ...]]:
    """Separate tensors from settings, in which transforms such as ``vmap`` must not look for a batch dimension.

    The merged sources are dropped: a transform creates new tensors, and with them new sources.
    """
    *tensors, setting, _ = (getattr(value, field.name) for field in fields(value))
    return [tensor for tensor in tensors if tensor is not None], (type(value), setting)


def _unflatten(tensors: Iterable[Any], settings: tuple[Any, ...]) -> Block | FactoredMoments:
    """Rebuild the value that :func:`_flatten` took apart."""
    first, second, *optional = tensors
    kind, setting = settings
    value: Block | FactoredMoments = kind(first, second, optional[0] if optional else None, setting)
    return value


for _kind in (Block, FactoredMoments):
    torch.utils._pytree.register_pytree_node(
        _kind, _flatten, _unflatten, serialized_type_name=f"mpgelu.{_kind.__name__}"
    )
