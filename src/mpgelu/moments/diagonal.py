"""Moments that keep the marginal variances and no correlations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from mpgelu.moments.base import Moments, Replacement
from mpgelu.moments.checks import check_mean, check_spread, check_vector
from mpgelu.visibility import is_known_zero


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalMoments(Moments):
    """Mean and marginal variances; the covariance is ``diag(variance)``.

    This is the cheapest representation. It is an approximation wherever a linear layer would correlate its outputs.
    Because units are independent, a random value may have any shape: with ``event_dims=3`` it is an image
    ``(channels, height, width)``, which elementwise rules, masks, sums and :func:`mpgelu.rules.flatten` accept.

    Args:
        mean: Expectation, ``(*batch, *event)``.
        variance: Variance of each unit, ``(*batch, *event)``.
        event_dims: Number of trailing dimensions that form one random value.

    Example:
        >>> import torch, mpgelu
        >>> images = DiagonalMoments.certain(torch.randn(5, 3, 8, 8), event_dims=3)
        >>> mpgelu.rules.flatten(mpgelu.Dropout(0.1)(images))
        DiagonalMoments(mean (5, 192), float32)
    """

    mean: Tensor
    variance: Tensor
    event_dims: int = field(default=1, kw_only=True)  # so that subclasses may add fields of their own

    @classmethod
    def certain(cls, x: Tensor, event_dims: int = 1) -> Self:
        """Return the moments of a known input, whose variance is zero.

        Args:
            x: Values, ``(*batch, *event)``.
            event_dims: Number of trailing dimensions that form one random value.
        """
        check_mean(f"{cls.__name__}.certain", x, event_dims)
        return cls(x, torch.zeros_like(x), event_dims=event_dims)

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor, event_dims: int = 1) -> Self:
        """Return the moments of an uncertain input.

        Args:
            mean: Expectation, ``(*batch, *event)``.
            spread: Variance, broadcast to the shape of the mean; or, for vectors, a covariance ``(*batch, n, n)``, of
                which only the diagonal is kept.
            event_dims: Number of trailing dimensions that form one random value.

        Raises:
            InputError: See :func:`mpgelu.moments.checks.check_spread`.
        """
        caller = f"{cls.__name__}.of"
        check_mean(caller, mean, event_dims)
        spread = check_spread(caller, mean, spread, event_dims)
        variance = spread if spread.dim() == mean.dim() else spread.diagonal(dim1=-2, dim2=-1)
        return cls(mean, variance, event_dims=event_dims)

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        """Return the marginal moments of any moments; correlations are dropped."""
        return cls(moments.mean, moments.variance, event_dims=moments.event_dims)

    @property
    def covariance(self) -> Tensor:
        """Dense covariance, ``(*batch, n, n)``.

        Raises:
            InputError: The random values are not vectors.
        """
        check_vector("DiagonalMoments.covariance", self)
        return torch.diag_embed(self.variance)

    @property
    def is_certain(self) -> bool:
        """Whether all variances are seen to be zero; see :func:`mpgelu.visibility.is_known_zero`."""
        return is_known_zero(self.variance)

    def replaced(self, function: Replacement) -> Self:
        """Return moments with every tensor replaced; see :meth:`Moments.replaced`."""
        dims = self.event_dims
        return type(self)(function(self.mean, dims, True), function(self.variance, dims, True), event_dims=dims)

    def _describe(self) -> str:
        return "" if self.event_dims == 1 else f"events {tuple(self.event_shape)}"


def _unflatten(tensors: Iterable[Any], event_dims: int) -> DiagonalMoments:
    mean, variance = tensors
    return DiagonalMoments(mean, variance, event_dims=event_dims)


# The number of event dimensions is a setting: transforms such as vmap look for a batch dimension in the tensors alone.
torch.utils._pytree.register_pytree_node(
    DiagonalMoments,
    lambda value: ([value.mean, value.variance], value.event_dims),
    _unflatten,
    serialized_type_name="mpgelu.DiagonalMoments",
)
