"""Likelihoods: from the moments of the outputs of a network to the distribution of the target."""

from mpgelu.likelihoods.base import Likelihood, NoisePart, check_likelihood, likelihoods
from mpgelu.likelihoods.gaussian import Gaussian
from mpgelu.likelihoods.heavy_tailed import HeavyTailedGaussian
from mpgelu.likelihoods.heteroscedastic import HeteroscedasticGaussian
from mpgelu.likelihoods.mixture import GaussianMixture
from mpgelu.likelihoods.outputs import MeanAndLogVariance

__all__ = [
    "Gaussian",
    "GaussianMixture",
    "HeavyTailedGaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "MeanAndLogVariance",
    "NoisePart",
    "check_likelihood",
    "likelihoods",
]
