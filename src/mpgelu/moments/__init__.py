"""Random vectors represented by mean and covariance, in three structures of the covariance.

:class:`DiagonalMoments` keep the marginal variances only, :class:`FullMoments` a dense matrix for each row, and
:class:`FactoredMoments` an exact sum of low-rank blocks and a diagonal. Operations on them are in :mod:`mpgelu.rules`.
"""

from mpgelu.moments.base import Moments, check_moment_type, moments_of
from mpgelu.moments.diagonal import DiagonalMoments
from mpgelu.moments.factored import Block, FactoredMoments
from mpgelu.moments.full import FullMoments
from mpgelu.moments.registry import moment_types

for _type in (DiagonalMoments, FactoredMoments, FullMoments):
    moment_types.register()(_type)

__all__ = [
    "Block",
    "DiagonalMoments",
    "FactoredMoments",
    "FullMoments",
    "Moments",
    "check_moment_type",
    "moment_types",
    "moments_of",
]
