"""The boosted trees: with a Gaussian for every row (xgboost-distribution, catboost, ngboost) and point models.

Where a method stops early it does so by a tenth of the rows held out. All run in one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Rows, held_out
from mpgelu.research.compare.predicted import Points

_MOST_TREES = 1000
_PATIENCE = 50
_LEARNING_RATE = 0.05  # on five sets, splits 0-2, level with xgboost's default of 0.3: 8 % better to 8 % worse


class XGBoostDistribution:
    """At most 500 rounds of natural gradient boosting with xgboost, stopped after ten without gain.

    Args:
        seed: Of the model and the held-out rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Boost mean and logarithm of the standard deviation."""
        from xgboost_distribution import XGBDistribution

        train, test = held_out(len(y), self.seed)
        options: dict[str, Any] = {"early_stopping_rounds": 10, "n_jobs": 1, "random_state": self.seed}
        self.model = XGBDistribution(distribution="normal", n_estimators=500, **options)
        self.model.fit(X[train], y[train], eval_set=[(X[test], y[test])], verbose=False)

    def predict_distribution(self, X: Rows) -> Predictive:
        """A Gaussian for each row."""
        parameters = self.model.predict(X)
        return _gaussian(parameters.loc, np.square(parameters.scale, dtype=np.float64))


class CatBoost:
    """At most 1000 trees of catboost for mean and variance, stopped after fifty without gain.

    Args:
        seed: Of the model and the held-out rows.
    """

    loss = "RMSEWithUncertainty"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Boost with the class's loss."""
        from catboost import CatBoostRegressor

        train, test = held_out(len(y), self.seed)
        quiet: dict[str, Any] = {"verbose": False, "allow_writing_files": False, "thread_count": 1}
        stop: dict[str, Any] = {"iterations": _MOST_TREES, "early_stopping_rounds": _PATIENCE}
        self.model = CatBoostRegressor(loss_function=self.loss, random_seed=self.seed, **stop, **quiet)
        self.model.fit(X[train], y[train], eval_set=(X[test], y[test]))

    def predict_distribution(self, X: Rows) -> Predictive | Points:
        """A Gaussian for each row."""
        return _gaussian(*self.model.predict(X, thread_count=1).T)


class CatBoostPoint(CatBoost):
    """The same trees for the mean alone.

    Args:
        seed: Of the model and the held-out rows.
    """

    loss = "RMSE"

    def predict_distribution(self, X: Rows) -> Points:
        """A mean for each row."""
        return Points(torch.tensor(self.model.predict(X, thread_count=1), dtype=torch.float64))


class XGBoostPoint:
    """At most 1000 trees of xgboost for the mean, learning rate 0.05, stopped after fifty without gain.

    Args:
        seed: Of the model and the held-out rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Boost the squared error."""
        from xgboost import XGBRegressor

        train, test = held_out(len(y), self.seed)
        options: dict[str, Any] = {"early_stopping_rounds": _PATIENCE, "n_jobs": 1, "random_state": self.seed}
        self.model = XGBRegressor(n_estimators=_MOST_TREES, learning_rate=_LEARNING_RATE, **options)
        self.model.fit(X[train], y[train], eval_set=[(X[test], y[test])], verbose=False)

    def predict_distribution(self, X: Rows) -> Points:
        """A mean for each row."""
        return Points(torch.tensor(self.model.predict(X), dtype=torch.float64))


class NGBoost:
    """500 rounds of natural gradient boosting with ngboost, its default.

    Args:
        seed: Of the model.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, X: Rows, y: Rows) -> None:
        """Boost mean and logarithm of the standard deviation."""
        from ngboost import NGBRegressor

        self.model = NGBRegressor(n_estimators=500, verbose=False, random_state=self.seed)
        self.model.fit(X, y)

    def predict_distribution(self, X: Rows) -> Predictive:
        """A Gaussian for each row."""
        parameters = self.model.pred_dist(X)
        return _gaussian(parameters.loc, np.square(parameters.scale))


def _gaussian(mean: Rows, variance: Rows) -> Predictive:
    """Gaussians whose variance is all counted as noise: trees say nothing about their own uncertainty."""
    noise = torch.tensor(variance, dtype=torch.float64)
    return Predictive.gaussian(torch.tensor(mean, dtype=torch.float64), torch.zeros_like(noise), noise)
