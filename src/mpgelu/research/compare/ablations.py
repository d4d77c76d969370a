"""What each part of our estimator buys: the estimator without it, under otherwise equal conditions.

`OURS` is data, constructor arguments of `MPGELURegressor`. `OneNetwork` and `SameSizeEnsemble` take their sizes from
the estimator's recipe and follow when it changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mpgelu.estimators import Ensemble, MPGELURegressor
from mpgelu.estimators.recipe import Kind, settings_of
from mpgelu.estimators.recipe.networks import default_network
from mpgelu.layers import ReLU
from mpgelu.moments import DiagonalMoments
from mpgelu.networks import Stack, network
from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Rows
from mpgelu.research.compare.neural_peers import DeepEnsemble


def without_dropout(features: int, kind: Kind, outputs: int) -> nn.Module:
    """The default's networks with all rates at zero."""
    return default_network(features, replace(kind, rate=0.0), outputs)


def without_embedding(features: int, kind: Kind, outputs: int) -> nn.Module:
    """The default's networks on the scaled features alone."""
    return default_network(features, replace(kind, sigma=None), outputs)


def with_relu(features: int, kind: Kind, outputs: int) -> nn.Module:
    """The default's networks with ReLU between their layers, and so with ReLU's moments where there is dropout."""
    return network(features, kind.hidden, outputs, nonlinearity=ReLU, rate=kind.rate, sigma=kind.sigma)


_ONE_KIND: dict[str, Any] = {"sigma": 0.4, "diverse": False}
_DROPOUT: dict[str, Any] = {"sigma": None, "rate": (0.001, 0.01, 0.1), "diverse": False, "moments": DiagonalMoments}

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "no-dropout": ("all rates zero", {"network": without_dropout}),
    "plain": ("no embedding", {"network": without_embedding}),
    "smooth": ("smooth networks alone, trained long", {"diverse": False}),
    "one-kind": ("networks of one kind", _ONE_KIND),
    "moments": ("dropout alone, MP-GELU moments", _DROPOUT),
    "relu-moments": ("dropout alone, ReLU moments", {**_DROPOUT, "network": with_relu}),
    "constant": ("constant noise", {"noise": "homoscedastic"}),
}


class OneNetwork:
    """One network of our estimator, the first of one kind, with the noise that held-out rows taught.

    The noise and its width are learned from rows that each network alone has not seen, so they are those of one.

    Args:
        seed: Seed of the estimator.
    """

    def __init__(self, seed: int) -> None:
        self.model = MPGELURegressor(**_ONE_KIND, random_state=seed)

    def fit(self, X: Rows, y: Rows) -> None:
        """Train all and keep the first."""
        whole = self.model.fit(X, y).ensemble_
        stack = Stack(whole.each_stack()[0].unstack()[:1])
        weight, target = torch.ones(1, dtype=torch.float64), (whole.target_mean, whole.target_scale)
        held = whole.likelihood, whole.scaling, *target, whole.moment_type, whole.noise
        self.ensemble = Ensemble([stack], weight, *held).requires_grad_(False)

    def predict_distribution(self, X: Rows) -> Predictive:
        """The network's distribution."""
        predicted: Predictive = self.ensemble(torch.from_numpy(X))
        return predicted


class SameSizeEnsemble:
    """A plain deep ensemble with as many networks, units and steps as those that the default trains longest.

    Scored as the mixture.

    Args:
        seed: Seed of weights, batches and held-out rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Train all networks side by side."""
        settings = settings_of(MPGELURegressor(random_state=self.seed), *X.shape)
        long = [kind for kind in settings.kinds if kind.effort == 1]
        budget = settings.batch_size, settings.steps
        self.ensemble = DeepEnsemble(long[0].hidden, self.seed, settings.folds * len(long), budget)
        self.ensemble.fit(X, y)

    def predict_distribution(self, X: Rows) -> Predictive:
        """The equal mixture of the members."""
        return self.ensemble.predict_distribution(X)
