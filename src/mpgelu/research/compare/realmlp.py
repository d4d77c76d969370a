"""RealMLP, the strongest tabular network with defaults (Holzmueller et al., 2024, "Better by default"), by pytabkit."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpgelu.research.compare.interface import Rows
from mpgelu.research.compare.predicted import Points, Quantiles

_LEVELS = 50


class RealMLP:
    """RealMLP with its tuned defaults, trained on the mean pinball loss of fifty quantiles.

    It scales features and target itself. The epoch is chosen by the same loss on rows held out: a fifth of them for
    one model; the fold each model did not see if there are several, whose quantiles are averaged.

    Args:
        seed: Seed of weights, batches and held-out rows.
        folds: 1 for one model, else a model for each fold.
    """

    def __init__(self, seed: int, folds: int) -> None:
        self.seed, self.folds = seed, folds

    def fit(self, X: Rows, y: Rows) -> None:
        """Train the model or models."""
        levels = ",".join(f"{level:.2f}" for level in Quantiles.levels(_LEVELS).tolist())
        loss = f"multi_pinball({levels})"
        self._fit(X, y, train_metric_name=loss, val_metric_name=loss)

    def _fit(self, X: Rows, y: Rows, **loss: str) -> None:
        from pytabkit import RealMLP_TD_Regressor

        options: dict[str, Any] = {"device": "cpu", "n_threads": 1, "verbosity": 0}
        self.model = RealMLP_TD_Regressor(random_state=self.seed, n_cv=self.folds, **options, **loss)
        with _quiet():
            self.model.fit(X, y)

    def _predict(self, X: Rows) -> Tensor:
        """Return the outputs of the model, (rows, outputs)."""
        with _quiet():
            predicted = np.asarray(self.model.predict(X), dtype=np.float64)
        return torch.from_numpy(predicted.reshape(len(X), -1))

    def predict_distribution(self, X: Rows) -> Quantiles | Points:
        """Fifty quantiles of each row."""
        return Quantiles(self._predict(X))


class RealMLPPoint(RealMLP):
    """RealMLP as its authors meant it for regression, trained on the squared error: a mean for each row.

    Args:
        seed: Seed of weights, batches and held-out rows.
        folds: 1 for one model, else a model for each fold, whose means are averaged.
    """

    def fit(self, X: Rows, y: Rows) -> None:
        """Train the model or models."""
        self._fit(X, y)

    def predict_distribution(self, X: Rows) -> Points:
        """A mean for each row."""
        return Points(self._predict(X)[:, 0])


class _quiet(warnings.catch_warnings):  # noqa: N801
    """Keep pytorch-lightning from telling about processors and workers at every call."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
