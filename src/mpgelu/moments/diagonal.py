"""Moments that keep the marginal variances and drop every correlation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mpgelu.moments.base import Moments, Replacement
from mpgelu.moments.checks import check_mean, check_spread


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalMoments(Moments):
    """Mean and marginal variances; the covariance is ``diag(variance)``.

    Cheap, and approximate wherever a linear layer would correlate its outputs.

    Args:
        mean: ``(*batch, n)``.
        variance: ``(*batch, n)``.
    """

    mean: Tensor
    variance: Tensor

    @classmethod
    def certain(cls, x: Tensor) -> Self:
        """A known input: zero covariance."""
        check_mean(f"{cls.__name__}.certain", x)
        return cls(x, torch.zeros_like(x))

    @classmethod
    def of(cls, mean: Tensor, spread: Tensor) -> Self:
        """An uncertain input with a variance ``(*batch, n)``, or the diagonal of a covariance ``(*batch, n, n)``."""
        caller = f"{cls.__name__}.of"
        check_mean(caller, mean)
        spread = check_spread(caller, mean, spread)
        return cls(mean, spread if spread.dim() == mean.dim() else spread.diagonal(dim1=-2, dim2=-1))

    @classmethod
    def from_moments(cls, moments: Moments) -> Self:
        """Drop the correlations of any moments."""
        return cls(moments.mean, moments.variance)

    @property
    def covariance(self) -> Tensor:
        """Dense view ``(*batch, n, n)``."""
        return torch.diag_embed(self.variance)

    def replaced(self, function: Replacement) -> Self:
        """See :meth:`Moments.replaced`."""
        return type(self)(function(self.mean, 1, True), function(self.variance, 1, True))


torch.export.register_dataclass(DiagonalMoments, serialized_type_name="mpgelu.DiagonalMoments")
