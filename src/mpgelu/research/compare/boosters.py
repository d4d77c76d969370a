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


class _XGBoost:
    """Boosting with the interface of xgboost, stopped early by held-out rows.

    Args:
        seed: Seed of the model and of the held-out rows.
    """

    model: Any

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def make(self, **options: Any) -> Any:
        """Return the untrained model with the given options of xgboost."""
        raise NotImplementedError

    def fit(self, X: Rows, y: Rows) -> None:
        """Train the model."""
        train, test = held_out(len(y), self.seed)
        self.model = self.make(n_jobs=1, random_state=self.seed)
        self.model.fit(X[train], y[train], eval_set=[(X[test], y[test])], verbose=False)


class XGBoostDistribution(_XGBoost):
    """Natural gradient boosting of mean and logarithm of the standard deviation with xgboost.

    There are at most 500 rounds; training stops after ten without an improvement.
    """

    def make(self, **options: Any) -> Any:
        """Return the untrained model with the given options of xgboost."""
        from xgboost_distribution import XGBDistribution

        return XGBDistribution(distribution="normal", n_estimators=500, early_stopping_rounds=10, **options)

    def predict_distribution(self, X: Rows) -> Predictive:
        """A Gaussian for each row."""
        parameters = self.model.predict(X)
        return _gaussian(parameters.loc, np.square(parameters.scale, dtype=np.float64))


class CatBoost:
    """At most 1000 trees of catboost for mean and variance, stopped after fifty without gain.

    Args:
        seed: Seed of the model and the held-out rows.
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
    """At most 1000 trees of catboost for the mean, stopped after fifty without an improvement.

    Args:
        seed: Seed of the model and the held-out rows.
    """

    loss = "RMSE"

    def predict_distribution(self, X: Rows) -> Points:
        """A mean for each row."""
        return Points(torch.tensor(self.model.predict(X, thread_count=1), dtype=torch.float64))


class XGBoostPoint(_XGBoost):
    """Boosting of the squared error with xgboost, with a learning rate of 0.05.

    There are at most 1000 trees; training stops after fifty without an improvement.
    """

    def make(self, **options: Any) -> Any:
        """Return the untrained model with the given options of xgboost."""
        from xgboost import XGBRegressor

        stop = {"n_estimators": _MOST_TREES, "early_stopping_rounds": _PATIENCE}
        return XGBRegressor(learning_rate=_LEARNING_RATE, **stop, **options)

    def predict_distribution(self, X: Rows) -> Points:
        """A mean for each row."""
        return Points(torch.tensor(self.model.predict(X), dtype=torch.float64))


class NGBoost:
    """500 rounds of natural gradient boosting with ngboost, its default.

    Args:
        seed: Seed of the model.
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
