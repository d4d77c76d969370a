"""Our estimator distilled into one network, as a method of the comparison."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from mpgelu.predictive import Predictive
from mpgelu.research.compare.interface import Rows

_ESTIMATOR = "mpgelu.estimators.regressor"


class Compact:
    """The default estimator, and one network that learns from it; timed apart.

    Args:
        seed: Seed of the estimator and of the distillation.

    Attributes:
        record: Additional entries of the record: processor seconds of the two parts of ``fit``.
        brought: The estimator that it learned from, and the seconds of that fit, under the name of the default.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.record: dict[str, float] = {}
        self.brought: dict[str, tuple[Any, dict[str, float]]] = {}
        self.model: Any = None

    def fit(self, X: Rows, y: Rows) -> None:
        """Train the ensemble, then the network."""
        started, worked = time.perf_counter(), time.process_time()
        teacher = import_module(_ESTIMATOR).MPGELURegressor(random_state=self.seed).fit(X, y)
        took = {"fit_seconds": time.perf_counter() - started, "fit_cpu_seconds": time.process_time() - worked}
        taught = time.process_time()
        self.model = teacher.distill(random_state=self.seed)
        self.brought = {"mpgelu": (teacher, took)}
        self.record = {
            "teacher_cpu_seconds": took["fit_cpu_seconds"],
            "distill_cpu_seconds": time.process_time() - taught,
        }

    def predict_distribution(self, X: Rows) -> Predictive:
        """That of the network."""
        predicted: Predictive = self.model.predict_distribution(X)
        return predicted
