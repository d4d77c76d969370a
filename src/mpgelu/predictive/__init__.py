"""The predictive distribution: a Gaussian mixture for each row, its quantiles and scores."""

from mpgelu.predictive.distribution import Predictive

__all__ = ["Predictive"]
