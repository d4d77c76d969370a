"""What a compared method is: it is fitted to rows in original units and predicts each new row."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpgelu.research.compare.predicted import Predicted

Rows = NDArray[np.float64]

_HELD_OUT = 0.1


class Method(Protocol):
    """One method among others; `MPGELURegressor` is one as it stands."""

    def fit(self, X: Rows, y: Rows) -> object:
        """Fit to features (rows, features) and targets (rows,)."""

    def predict_distribution(self, X: Rows) -> Predicted:
        """Predict the target of each row: a distribution, or as much of it as the method gives."""


class Standardised:
    """A method that sees features and target with mean 0 and variance 1 on the rows it is fitted to.

    A constant feature becomes 0. Predictions come back in original units.

    Args:
        method: Fitted to the standardised rows.
    """

    def __init__(self, method: Method) -> None:
        self.method = method

    def fit(self, X: Rows, y: Rows) -> Standardised:
        """Measure the rows and fit the method to them."""
        scale = X.std(0)
        self.X_mean, self.X_scale = X.mean(0), np.where(scale > 0, scale, 1)
        self.y_mean, self.y_scale = float(y.mean()), float(y.std())
        self.method.fit((X - self.X_mean) / self.X_scale, (y - self.y_mean) / self.y_scale)
        return self

    def predict_distribution(self, X: Rows) -> Predicted:
        """The method's predictions, in original units."""
        return self.method.predict_distribution((X - self.X_mean) / self.X_scale).affine(self.y_scale, self.y_mean)


def held_out(rows: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers to train on and, a tenth, to choose by."""
    order = np.random.default_rng(seed).permutation(rows)
    count = max(1, round(_HELD_OUT * rows))
    return order[count:], order[:count]
