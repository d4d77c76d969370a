"""Throughput of fit and prediction against the number of rows, beside xgboost on the same rows."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from mpgelu.research.bench.sections import Rows, Settings
from mpgelu.research.bench.workers import methods
from mpgelu.research.scale import NAMES, function, rows_of

_NEW_SEED, _NEW = 10**6, 20_000  # rows that are predicted

Array = NDArray[np.float64]


def many_rows(settings: Settings) -> Rows:
    """Fit with a fifth of the default steps, and predict, on one thread, in processor time.

    The rows are those of :mod:`mpgelu.research.scale`, whose true mean is known: the error of the predicted mean is
    beside the speed.
    """
    new = rows_of(_NEW_SEED, 100 if settings.quick else _NEW)[NAMES].to_numpy()
    table: Rows = []
    for count in (60,) if settings.quick else (1_000, 10_000, 100_000):
        X, y = _arrays(rows_of(0, count))
        for name, fit in methods(settings.quick):
            started = time.process_time()
            model = fit(1, X, y)
            fitted = time.process_time()
            error = float(np.sqrt(np.mean((model.predict(new) - function(new)) ** 2)))
            predicted = time.process_time()
            table.append(
                {
                    "rows": count,
                    "method": name,
                    "fit, s": fitted - started,
                    "fit, rows per second": count / (fitted - started),
                    "predict, rows per second": len(new) / (predicted - fitted),
                    "error of the mean": error,
                }
            )
    return table


def _arrays(frame: pd.DataFrame) -> tuple[Array, Array]:
    return frame[NAMES].to_numpy(), frame["y"].to_numpy()
