"""Random vectors by their mean and covariance, in three ways of holding the covariance."""

from mpgelu.moments.base import Moments
from mpgelu.moments.diagonal import DiagonalMoments
from mpgelu.moments.factored import Block, FactoredMoments
from mpgelu.moments.full import FullMoments
from mpgelu.moments.registry import moment_types

for _type in (DiagonalMoments, FactoredMoments, FullMoments):
    moment_types.register()(_type)

__all__ = ["Block", "DiagonalMoments", "FactoredMoments", "FullMoments", "Moments", "moment_types"]
