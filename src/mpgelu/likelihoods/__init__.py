"""From the moments of a network's output to the distribution of the target."""

from mpgelu.likelihoods.gaussian import Gaussian
from mpgelu.likelihoods.heteroscedastic import HeteroscedasticGaussian

__all__ = ["Gaussian", "HeteroscedasticGaussian"]
