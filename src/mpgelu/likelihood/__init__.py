"""From the moments of a network's output to the distribution of the target."""

from mpgelu.likelihood.gaussian import Gaussian
from mpgelu.likelihood.heteroscedastic import HeteroscedasticGaussian

__all__ = ["Gaussian", "HeteroscedasticGaussian"]
