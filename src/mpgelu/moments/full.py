"""Moments with a dense covariance matrix for every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mpgelu.moments.base import Moments, Replacement
from mpgelu.moments.checks import check_mean, check_spread


@dataclass(frozen=True, eq=False, repr=False)
class FullMoments(Moments):
    """Mean and dense covariance.

    Args:
        mean: ``(*batch, n)``.
        covariance: ``(*batch, n, n)``, symmetric positive semidefinite.
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def certain(cls, x: Tensor) -> Self:
        """A known input: zero covariance."""
        check_mean(f"{cls.__name__}.certain", x)
        return cls(x, x.new_zeros(*x.shape, x.shape[-1]))

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor) -> Self:
        """An uncertain input with a variance ``(*batch, n)`` or a covariance ``(*batch, n, n)``."""
        caller = f"{cls.__name__}.of"
        check_mean(caller, mean)
        spread = check_spread(caller, mean, spread)
        return cls(mean, torch.diag_embed(spread) if spread.dim() == mean.dim() else spread)

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        """The same moments with their covariance written out."""
        return cls(moments.mean, moments.covariance)

    @property
    def variance(self) -> Tensor:
        """Marginal variances ``(*batch, n)``."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def replaced(self, function: Replacement) -> Self:
        """See :meth:`Moments.replaced`."""
        return type(self)(function(self.mean, 1, True), function(self.covariance, 2, True))


torch.export.register_dataclass(FullMoments, serialized_type_name="mpgelu.FullMoments")
