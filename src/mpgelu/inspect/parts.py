"""What a model is made of, be it an estimator, an ensemble or one network: the same view for whoever takes it apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe import Covariance
from mpgelu.likelihoods import Gaussian, HeteroscedasticGaussian


@dataclass(frozen=True)
class Parts:
    """Networks for standardised data, their weights, and the scales of the data.

    Attributes:
        networks: M modules.
        weights: of the networks, ``(M,)``, float64, summing to one.
        likelihood: what their outputs mean.
        feature_names: of the n raw features.
        feature_mean: ``(n,)``, float64.
        feature_scale: ``(n,)``, float64.
        target_mean: in the unit of the target.
        target_scale: in the unit of the target.
        covariance: how predictions propagate moments.
    """

    networks: Sequence[nn.Module]
    weights: Tensor
    likelihood: Gaussian | HeteroscedasticGaussian
    feature_names: Sequence[str]
    feature_mean: Tensor
    feature_scale: Tensor
    target_mean: float
    target_scale: float
    covariance: Covariance

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the networks."""
        parameters = (parameter.dtype for network in self.networks for parameter in network.parameters())
        return next(parameters, torch.float32)

    def standardised(self, caller: str, X: ArrayLike | Tensor) -> Tensor:
        """Raw features ``(rows, n)`` in units of their scales, in the precision of the networks."""
        x = torch.tensor(np.asarray(X, dtype=np.float64))
        if x.dim() != 2 or x.shape[1] != len(self.feature_names):
            raise InputError(f"{caller}: X must have shape (rows, {len(self.feature_names)}), got {tuple(x.shape)}")
        return ((x - self.feature_mean) / self.feature_scale).to(self.dtype)


def without_table(model: Any, X: Any) -> tuple[Any, Any, Sequence[str] | None]:
    """The regressor of a model of a table, its table encoded, and the features' names; others as they are."""
    if isinstance(model, nn.Module) or not hasattr(model, "encoder"):  # networks may have a part of that name
        return model, X, None
    return model.regressor, model.encoder.encode(X).X, model.encoder.features


def is_composed(model: object) -> bool:
    """Whether a model has its own scales: an ensemble, or a fitted estimator that holds one."""
    return isinstance(model, Ensemble) or hasattr(model, "ensemble_")


def parts_of(
    caller: str,
    model: Any,
    *,
    features: int | Sequence[str] | None = None,
    likelihood: Gaussian | HeteroscedasticGaussian | None = None,
    covariance: Covariance = "exact",
) -> Parts:
    """Take a model apart.

    Args:
        caller: named in errors.
        model: a fitted estimator, an :class:`Ensemble`, or any module from moments to moments.
        features: names of the features, or how many; needed of a network that does not start with a linear layer.
        likelihood: of a network; by default heteroscedastic for two outputs, Gaussian of unit noise for one.
        covariance: of a network.
    """
    if hasattr(model, "ensemble_"):
        names = getattr(model, "feature_names_in_", None)
        return parts_of(caller, model.ensemble_, features=features if names is None else list(map(str, names)))
    if isinstance(model, Ensemble):
        return Parts(
            networks=model.stack.unstack(),
            weights=model.weights.double() / model.weights.double().sum(),
            likelihood=model.likelihood,
            feature_names=_names(caller, features, len(model.feature_mean)),
            feature_mean=model.feature_mean.double(),
            feature_scale=model.feature_scale.double(),
            target_mean=float(model.target_mean),
            target_scale=float(model.target_scale),
            covariance=model.covariance,
        )
    if not isinstance(model, nn.Module):
        what = f"{type(model).__name__}; call fit first" if hasattr(model, "fit") else type(model).__name__
        raise InputError(f"{caller}: wants a fitted estimator, an Ensemble or a network, got {what}")
    given = None if features is None else features if isinstance(features, int) else len(features)
    count = given or _first_size(caller, model)
    return Parts(
        networks=[model],
        weights=torch.ones(1, dtype=torch.float64),
        likelihood=likelihood or _likelihood(caller, model, count),
        feature_names=_names(caller, features, count),
        feature_mean=torch.zeros(count, dtype=torch.float64),
        feature_scale=torch.ones(count, dtype=torch.float64),
        target_mean=0.0,
        target_scale=1.0,
        covariance=covariance,
    )


def _names(caller: str, features: int | Sequence[str] | None, count: int) -> list[str]:
    names = [f"x{i}" for i in range(count)] if features is None or isinstance(features, int) else list(features)
    if len(names) != count:
        raise InputError(f"{caller}: the model takes {count} features, got the names of {len(names)}")
    return names


def _first_size(caller: str, network: nn.Module) -> int:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
    raise InputError(f"{caller}: the network has no linear layer that tells its number of features; give features=")


def _likelihood(caller: str, network: nn.Module, features: int) -> Gaussian | HeteroscedasticGaussian:
    like = next(network.parameters(), torch.empty(0))
    with torch.no_grad():
        outputs = network(like.new_zeros(1, features)).shape[-1]
    if outputs not in (1, 2):
        raise InputError(f"{caller}: the network must have one output or two (mean, log-variance), got {outputs}")
    return HeteroscedasticGaussian() if outputs == 2 else Gaussian()
