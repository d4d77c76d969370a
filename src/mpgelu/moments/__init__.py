"""Random vectors by their mean and covariance, in three ways of holding the covariance."""

from mpgelu.moments.base import Moments
from mpgelu.moments.diagonal import DiagonalMoments
from mpgelu.moments.factored import Block, FactoredMoments
from mpgelu.moments.full import FullMoments

__all__ = ["Block", "DiagonalMoments", "FactoredMoments", "FullMoments", "Moments"]
