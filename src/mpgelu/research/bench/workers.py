"""Throughput of fit and prediction against the number of workers, beside xgboost on the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import joblib
import numpy as np
from numpy.typing import NDArray

from mpgelu.estimators import MPGELURegressor
from mpgelu.research.bench.sections import Rows, Settings
from mpgelu.research.datasets import load_diabetes, load_uci

DATASET, PREDICTED = "kin8nm", 20_000  # rows that are predicted: those of the set, again and again
_ROUNDS = 2  # of fits, which take long; a slow moment of the machine hits all methods of a round
_QUICK: dict[str, Any] = {"hidden": (4,), "steps": 10, "folds": 2, "diverse": False}

Array = NDArray[np.float64]


def workers(settings: Settings) -> Rows:
    """Fit with a fifth of the default steps and predict, with one worker, two, and so on up to the cores.

    Workers of our fit are processes of joblib's loky, started before the clock; those of predictions and of xgboost are
    threads. Methods take turns; the best round counts.
    """
    X, y = _data(settings.quick)
    rows = np.resize(X, (100 if settings.quick else PREDICTED, X.shape[1]))
    rounds = min(settings.rounds, _ROUNDS)
    table: Rows = []
    counts = _counts(1 if settings.quick else joblib.cpu_count())
    for name, fit in methods(settings.quick):
        fitted: dict[int, Any] = {}
        fits = {count: partial(_kept, fitted, count, fit, X, y) for count in counts}
        for count, seconds in _best(fits, rounds).items():
            table.append(_row("fit", name, count, len(X), seconds))
        predictions = {count: partial(fitted[count].predict, rows) for count in counts}
        for count, seconds in _best(predictions, rounds).items():
            table.append(_row("predict", name, count, len(rows), seconds))
    return table


def _data(quick: bool) -> tuple[Array, Array]:
    if quick:
        data = load_diabetes()
        return data.X[:60], data.y[:60]
    uci = load_uci(DATASET)
    return uci.X, uci.y


def methods(quick: bool) -> Iterator[tuple[str, Callable[[int, Array, Array], Any]]]:
    """Yield names, and functions from a number of workers, features and targets to a fitted model.

    Args:
        quick: Whether to train a tiny model, for a smoke run.
    """
    yield "MP-GELU", partial(_ours, _QUICK if quick else {"effort": 0.2})
    if find_spec("xgboost") is not None:
        yield "xgboost", _xgboost


def _ours(settings: dict[str, Any], count: int, X: Array, y: Array) -> MPGELURegressor:
    model = MPGELURegressor(**settings, random_state=0, n_jobs=count)
    if count == 1:
        return model.fit(X, y)
    with joblib.parallel_config("loky", n_jobs=count):
        return model.fit(X, y)


def _xgboost(count: int, X: Array, y: Array) -> Any:
    from xgboost import XGBRegressor

    return XGBRegressor(n_estimators=500, learning_rate=0.05, n_jobs=count, random_state=0).fit(X, y)


def _kept(fitted: dict[int, Any], count: int, fit: Callable[[int, Array, Array], Any], X: Array, y: Array) -> None:
    fitted[count] = fit(count, X, y)


def _counts(cores: int) -> list[int]:
    """One worker, two, four and so on up to so many."""
    return [2**power for power in range(cores.bit_length())]


def _best(functions: Mapping[int, Callable[[], object]], rounds: int) -> dict[int, float]:
    """Seconds of the best of some rounds, in turns; processes are started before."""
    for count in functions:
        joblib.Parallel(count)(joblib.delayed(_ready)() for _ in range(4 * count))
    found = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for count, function in functions.items():
            started = time.perf_counter()
            function()
            found[count] = min(found[count], time.perf_counter() - started)
    return found


def _ready() -> None:
    """Import what a worker needs, and be slow enough for each worker to get a turn."""
    import mpgelu.estimators  # noqa: F401

    time.sleep(0.2)


def _row(task: str, method: str, count: int, rows: int, seconds: float) -> dict[str, Any]:
    return {
        "task": task,
        "method": method,
        "workers": count,
        "rows": rows,
        "seconds": seconds,
        "rows per second": rows / seconds,
    }
