"""Moments with a dense covariance matrix for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mpgelu.moments.base import Moments, Replacement
from mpgelu.moments.checks import check_mean, check_spread
from mpgelu.visibility import is_known_zero


@dataclass(frozen=True, eq=False, repr=False)
class FullMoments(Moments):
    """Mean and dense covariance of a random vector.

    All rules are exact for this type where they are exact at all, at a cost of :math:`O(n^2)` memory for each row.

    Args:
        mean: Expectation, ``(*batch, n)``.
        covariance: Symmetric positive semidefinite matrices, ``(*batch, n, n)``. The constructor does not check them;
            :meth:`of` does.
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def certain(cls, x: Tensor) -> Self:
        """Return the moments of a known input, whose covariance is zero.

        Args:
            x: Values, ``(*batch, n)``.
        """
        check_mean(f"{cls.__name__}.certain", x)
        return cls(x, x.new_zeros(*x.shape, x.shape[-1]))

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor) -> Self:
        """Return the moments of an uncertain input.

        Args:
            mean: Expectation, ``(*batch, n)``.
            spread: Variance ``(*batch, n)`` of independent features, or covariance ``(*batch, n, n)``.

        Raises:
            InputError: See :func:`mpgelu.moments.checks.check_spread`.
        """
        caller = f"{cls.__name__}.of"
        check_mean(caller, mean)
        spread = check_spread(caller, mean, spread)
        return cls(mean, torch.diag_embed(spread) if spread.dim() == mean.dim() else spread)

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        """Return the same moments with a dense covariance; exact for every type."""
        return cls(moments.mean, moments.covariance)

    @property
    def variance(self) -> Tensor:
        """Marginal variances, ``(*batch, n)``."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def is_certain(self) -> bool:
        """Whether the whole covariance is seen to be zero; see :func:`mpgelu.visibility.is_known_zero`."""
        return is_known_zero(self.covariance)

    def replaced(self, function: Replacement) -> Self:
        """Return moments with every tensor replaced; see :meth:`Moments.replaced`."""
        return type(self)(function(self.mean, 1, True), function(self.covariance, 2, True))


torch.export.register_dataclass(FullMoments, serialized_type_name="mpgelu.FullMoments")
