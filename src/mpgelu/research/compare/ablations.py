"""What each part of our estimator buys: the estimator without it, under otherwise equal conditions.

`OURS` is data, constructor arguments of `MPGELURegressor`: it and `SameSizeEnsemble` are all that must follow when the
recipe of the estimator changes.
"""

from __future__ import annotations

from typing import Any

from mpgelu.layers import ReLU
from mpgelu.networks import network
from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Rows
from mpgelu.research.compare.neural_peers import DeepEnsemble

_NETWORKS = 10  # of the kinds that the default trains longest
_HIDDEN = (128, 128)


def _relu(features: int, kind: Any, outputs: int) -> Any:
    """The default's networks with ReLU between their layers, and so with ReLU's moments where there is dropout."""
    return network(features, kind.hidden, outputs, nonlinearity=ReLU, rate=kind.rate, embedding=kind.sigma)


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("no embedding", {"sigma": None}),
    "no-brief": ("no brief networks, no process", {"brief": False}),
    "one-kind": ("five networks of one kind", {"sigma": 0.4, "brief": False}),
    "mpgelu-moments": ("MP-GELU with dropout alone", {"sigma": None, "rate": (0.001, 0.01, 0.1), "brief": False}),
    "relu": ("ReLU", {"network": _relu}),
    "constant": ("constant noise", {"noise": "homoscedastic"}),
}


class SameSizeEnsemble:
    """A plain deep ensemble with as many networks, units and passes as the default, scored as the mixture.

    Args:
        seed: Of weights, batches and held-out rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Train all networks side by side."""
        rows = len(y)
        size = 32 if rows < 300 else 64 if rows < 1_500 else 128 if rows < 5_000 else 256
        passes = min(256.0, 280_000 * max(1.0, rows / 1_400) ** 0.67 / (0.8 * rows))
        self.ensemble = DeepEnsemble(_HIDDEN, self.seed, _NETWORKS, (size, max(50, round(passes * rows / size))))
        self.ensemble.fit(X, y)

    def predict_distribution(self, X: Rows) -> Predictive:
        """The equal mixture of the members."""
        return self.ensemble.predict_distribution(X)
