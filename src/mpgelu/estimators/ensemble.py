"""Weighted networks as one distribution: from raw features, standardised here, to a mixture in the target's unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mpgelu.estimators.recipe import Covariance, certain
from mpgelu.layers import GaussianLinear, Linear
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import FactoredMoments, Moments
from mpgelu.networks import Stack, network
from mpgelu.predictive import Predictive

_SCALES = ("weights", "feature_mean", "feature_scale", "target_mean", "target_scale")


class Ensemble(nn.Module):
    """Networks, the weight of each, and the scales of the data they were trained on.

    A static graph without sampling: it can be compiled and exported as a whole.

    Args:
        stack: M networks for standardised features and target.
        likelihood: what their outputs mean.
        weights: of the networks, ``(M,)``, summing to one.
        feature_mean: ``(n,)``.
        feature_scale: ``(n,)``, positive.
        target_mean: ``()``.
        target_scale: ``()``, positive.
        covariance: how moments are propagated.
    """

    weights: Tensor
    feature_mean: Tensor
    feature_scale: Tensor
    target_mean: Tensor
    target_scale: Tensor

    def __init__(
        self,
        stack: Stack,
        likelihood: HeteroscedasticGaussian,
        weights: Tensor,
        feature_mean: Tensor,
        feature_scale: Tensor,
        target_mean: Tensor,
        target_scale: Tensor,
        covariance: Covariance = "exact",
    ) -> None:
        super().__init__()
        self.stack, self.likelihood, self.covariance = stack, likelihood, covariance
        self.register_buffer("weights", weights)
        self.register_buffer("feature_mean", feature_mean)
        self.register_buffer("feature_scale", feature_scale)
        self.register_buffer("target_mean", target_mean)
        self.register_buffer("target_scale", target_scale)

    def forward(self, x: Tensor, input_std: Tensor | None = None, nodes: int = 32) -> Predictive:
        """Distribution of the target for each row of raw features, in the dtype of x.

        Args:
            x: ``(rows, n)``; float64 keeps the digits of features and targets far from zero.
            input_std: standard deviation of independent measurement errors of the features, ``(rows, n)``.
            nodes: components of each network's part of the mixture; the mean and the variances do not depend on it.
        """
        members = self.likelihood.predictive(self.moments(x, input_std), nodes).to(x.dtype)  # (M, rows)
        mixture = members.mixture_over(0, self.weights.to(x.dtype))
        return mixture.affine(self.target_scale.to(x.dtype), self.target_mean.to(x.dtype))

    def moments(self, x: Tensor, input_std: Tensor | None = None) -> Moments:
        """Moments of every network's outputs, standardised, ``(M, rows, outputs)``.

        Errors of the features reach all units of a layer together, so that they are always propagated exactly.
        """
        mean = self._for_all(self._standardised(x - self.feature_mean.to(x)))
        moments: Moments
        if input_std is None:
            moments = certain(mean, self.covariance)
        else:
            moments = FactoredMoments.of(mean, self._for_all(self._standardised(input_std).square()))
        outputs: Moments = self.stack(moments)
        return outputs

    def described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Arrays, and what else is needed to build the ensemble from them."""
        layers = [layer for layer in self.stack.unstack()[0].modules() if isinstance(layer, (Linear, GaussianLinear))]
        about = {
            "networks": len(self.stack),
            "hidden": [layer.out_features for layer in layers[:-1]],
            "gaussian_weights": isinstance(layers[0], GaussianLinear),
            "covariance": self.covariance,
        }
        return dict(self.state_dict()), about

    @classmethod
    def from_description(cls, arrays: Mapping[str, Tensor], about: Mapping[str, Any]) -> Ensemble:
        """The ensemble that :meth:`described` described."""
        features, settings = len(arrays["feature_mean"]), {"gaussian_weights": about["gaussian_weights"], "rate": 0.5}
        stack = Stack([network(features, about["hidden"], **settings) for _ in range(about["networks"])])
        scales = {name: arrays[name] for name in _SCALES}
        ensemble = cls(stack, HeteroscedasticGaussian(), **scales, covariance=about["covariance"])
        ensemble.load_state_dict(dict(arrays), assign=True)
        return ensemble.requires_grad_(False)

    def _standardised(self, x: Tensor) -> Tensor:
        """In units of the features' scales, in the precision of the networks."""
        return (x / self.feature_scale.to(x)).to(next(self.stack.parameters()).dtype)

    def _for_all(self, x: Tensor) -> Tensor:
        return x.expand(len(self.stack), *x.shape)
