"""The estimator in use: prediction of one row and of many, what a second thread brings, and the time of its import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpgelu import native
from mpgelu.estimators import MPGELURegressor
from mpgelu.moments import DiagonalMoments
from mpgelu.research.bench.measure import in_turns
from mpgelu.research.bench.sections import Rows, Settings

FEATURES = 8
_IMPORTS = {"torch and scikit-learn": "import torch, sklearn", "the estimator": "import mpgelu; mpgelu.MPGELURegressor"}

_TINY: dict[str, Any] = {"hidden": (8, 8), "steps": 5}
_ROUNDS_OF_FIT = 2

Array = NDArray[np.float64]


def prediction(settings: Settings) -> Rows:
    """Predictions of the default estimator, with diagonal moments, on one thread: with its kernels, and in torch alone.

    The distributions are those of trained networks in everything but quality: they take few steps. One model has a
    Gaussian process among its members, the other has more rows than that is for.
    """
    table: Rows = []
    for trained in (60, 80) if settings.quick else (1_500, 4_000):
        model, X = _model(settings, trained)
        model.ensemble_.moment_type = DiagonalMoments
        for count in (1, 50 if settings.quick else 8_192):
            some = np.resize(X, (count, FEATURES))
            calls: dict[str, Callable[[], object]] = {
                "mean": partial(model.predict, some),
                "mean and parts": partial(model.predict_parts, some),
                "interval": partial(model.predict_interval, some),
                "everything at once": partial(_everything, model, some),
            }
            slow: dict[str, Callable[[], object]] = {
                f"{name}, torch only": partial(_in_torch, call) for name, call in calls.items()
            }
            for name, timing in in_turns(calls | slow, settings.rounds * (1 if count > 1 else 10)).items():
                us = {"us a row": 1e6 * timing.best / count, "median us a row": 1e6 * timing.median / count}
                networks = len(model.ensemble_)
                table.append({"trained on": trained, "networks": networks, "rows": count, "method": name, **us})
    return table


def threads(settings: Settings) -> Rows:
    """Wall time of the default ``fit`` and of predictions on one thread and on two, of an idle machine."""
    table: Rows = []
    for trained in (60,) if settings.quick else (500, 4_000):
        model, X = _model(settings, trained)
        y, many = _target(X), np.resize(X, (50 if settings.quick else 20_000, FEATURES))
        size = _TINY if settings.quick else {}
        for name, call in (("fit", partial(_fit, size, X, y)), ("predict", partial(_predict, model, many))):
            rounds = min(settings.rounds, _ROUNDS_OF_FIT) if name == "fit" else settings.rounds
            times = in_turns({str(n): partial(call, n) for n in (1, 2)}, rounds)
            seconds = {f"seconds, {n} threads": times[str(n)].best for n in (1, 2)}
            ratio = times["1"].best / times["2"].best
            table.append({"trained on": trained, "method": name, **seconds, "times faster": ratio})
    return table


def imports(settings: Settings) -> Rows:
    """Seconds of the processor that new processes take for imports."""

    def cost(code: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    samples = [{name: cost(code) for name, code in _IMPORTS.items()} for _ in range(1 if settings.quick else 5)]
    best = {name: min(sample[name] for sample in samples) for name in _IMPORTS}
    first = next(iter(best.values()))
    return [{"what": name, "seconds": seconds, "over the first": seconds / first} for name, seconds in best.items()]


def _model(settings: Settings, rows: int) -> tuple[MPGELURegressor, Array]:
    X = np.random.default_rng(0).normal(size=(rows, FEATURES))
    return _fit(_TINY if settings.quick else {"steps": 100}, X, _target(X), 1), X


def _target(X: Array) -> Array:
    noise: Array = np.random.default_rng(1).normal(size=len(X))
    return np.asarray(np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * noise)


def _fit(size: dict[str, Any], X: Array, y: Array, n_jobs: int) -> MPGELURegressor:
    return MPGELURegressor(**size, random_state=0, n_jobs=n_jobs).fit(X, y)


def _predict(model: MPGELURegressor, X: Array, n_jobs: int) -> None:
    model.set_params(n_jobs=n_jobs).predict_interval(X)


def _everything(model: MPGELURegressor, X: Array) -> None:
    """Mean, standard deviation, its parts and an interval of every row, from one pass."""
    for _, p in model.distributions(X):
        _ = p.mean, p.stddev, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt(), model.interval_of(p, 0.9)


def _in_torch(call: Callable[[], object]) -> None:
    with native.disabled():
        call()
