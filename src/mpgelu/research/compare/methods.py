"""The list of compared methods: what each is called, what it needs installed and how it is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, cast

from mpgelu.predictive import Predictive
from mpgelu.research.compare import ablations
from mpgelu.research.compare.boosters import CatBoost, CatBoostPoint, NGBoost, XGBoostDistribution, XGBoostPoint
from mpgelu.research.compare.compact import Compact
from mpgelu.research.compare.gaussian_process import GaussianProcess
from mpgelu.research.compare.interface import Method, Standardised
from mpgelu.research.compare.neural_peers import DeepEnsemble, LaplaceKron, MCDropout
from mpgelu.research.compare.predicted import SCORES, Points, Predicted, Quantiles
from mpgelu.research.compare.realmlp import RealMLP, RealMLPPoint

_WIDE = {"protein": 100}
_ESTIMATOR = "mpgelu.estimators.regressor"
_EVERY_SCORE = SCORES[Predictive]


@dataclass(frozen=True)
class Recipe:
    """A method of the comparison.

    Args:
        title: Name in tables and figures.
        build: The method for a data set and a seed.
        module: Module that must be importable.
        package: The name that `pip` knows the module by; its version goes into the records.
        gives: Form of its predictions; scores that this does not allow are dashes in the tables.
        matched: Score the Gaussian with the mean and variance of the method's mixture, where that is customary.
        ours: Whether it is our estimator with settings meant for use.
        part_of_ours: Whether it is our estimator without one of its parts, see `ablations`.
        most_rows: Largest data set it is run on.
        arguments: Constructor arguments of our estimator that `build` passes.
        brings: Methods that it fits on the way; their fitted models and the times of their fits are in an attribute
            `brought`, by name. They get records of their own and are not fitted again.
    """

    title: str
    build: Callable[[str, int], Method]
    module: str = "torch"
    package: str = "torch"
    gives: type[Predicted] = Predictive
    matched: bool = False
    ours: bool = False
    part_of_ours: bool = False
    most_rows: float = math.inf
    arguments: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()

    @property
    def missing(self) -> str:
        """Why the method cannot run here, in one line; empty if it can."""
        if find_spec(self.module) is None:
            return f"{self.title} skipped: {self.package} is not installed; pip install 'mpgelu[compare]' brings it"
        lacking = set(self.arguments) - set(_estimator()._get_param_names()) if self.arguments else ()
        return f"{self.title} skipped: MPGELURegressor has no argument {', '.join(sorted(lacking))}" if lacking else ""

    def lacks(self, score: str) -> bool:
        """Return whether the form of the predictions does not allow this score."""
        return score in _EVERY_SCORE and score not in SCORES[self.gives]

    def versions(self) -> dict[str, str]:
        """The version of what the method needs."""
        return {self.package: metadata.version(self.package)}


def _estimator() -> Any:
    return import_module(_ESTIMATOR).MPGELURegressor


def _ours(title: str, settings: dict[str, Any] | None = None, *, part: bool = False) -> Recipe:
    """Our estimator with given constructor arguments; `None` stands for its fast settings."""

    def build(dataset: str, seed: int) -> Method:
        chosen = import_module(_ESTIMATOR).FAST if settings is None else settings
        return cast(Method, _estimator()(**chosen, random_state=seed))

    return Recipe(title, build, _ESTIMATOR, "mpgelu", ours=not part, part_of_ours=part, arguments=tuple(settings or ()))


def _network(kind: type[DeepEnsemble] | type[MCDropout] | type[LaplaceKron]) -> Callable[[str, int], Method]:
    return lambda dataset, seed: Standardised(kind(_WIDE.get(dataset, 50), seed))


def _seeded(kind: Callable[[int], Method]) -> Callable[[str, int], Method]:
    return lambda dataset, seed: Standardised(kind(seed))


def _realmlp(title: str, kind: type[RealMLP], folds: int, gives: type[Predicted]) -> Recipe:
    """One model, or bagged ones up to 10,000 rows."""
    most = math.inf if folds == 1 else 10_000
    return Recipe(title, lambda dataset, seed: kind(seed, folds=folds), "pytabkit", "pytabkit", gives, most_rows=most)


METHODS: dict[str, Recipe] = {
    "mpgelu": _ours("MP-GELU", {}),
    "mpgelu-fast": _ours("MP-GELU fast"),
    "mpgelu-compact": Recipe(
        "MP-GELU compact",
        lambda dataset, seed: Compact(seed),
        _ESTIMATOR,
        "mpgelu",
        ours=True,
        brings=("mpgelu",),
    ),
    "realmlp-x5": _realmlp("RealMLP x5", RealMLP, 5, Quantiles),
    "realmlp": _realmlp("RealMLP", RealMLP, 1, Quantiles),
    "gaussian-process": Recipe(
        "Gaussian process", lambda dataset, seed: Standardised(GaussianProcess()), "scipy", "scipy", most_rows=2_000
    ),
    "deep-ensemble": Recipe("deep ensemble of 5", _network(DeepEnsemble), matched=True),
    "xgboost-distribution": Recipe(
        "xgboost-distribution", _seeded(XGBoostDistribution), "xgboost_distribution", "xgboost-distribution"
    ),
    "catboost": Recipe("catboost", _seeded(CatBoost), "catboost", "catboost"),
    "xgboost-point": Recipe("xgboost, mean only", _seeded(XGBoostPoint), "xgboost", "xgboost-cpu", Points),
    "catboost-point": Recipe("catboost, mean only", _seeded(CatBoostPoint), "catboost", "catboost", Points),
    "realmlp-x5-point": _realmlp("RealMLP x5, mean only", RealMLPPoint, 5, Points),
    "realmlp-point": _realmlp("RealMLP, mean only", RealMLPPoint, 1, Points),
    "mc-dropout": Recipe("MC dropout, 50 samples", _network(MCDropout)),
    "laplace": Recipe("laplace-torch, all/kron", _network(LaplaceKron), "laplace", "laplace-torch"),
    "ngboost": Recipe("ngboost", _seeded(NGBoost), "ngboost", "ngboost"),
    **{
        f"mpgelu-{name}": _ours(f"MP-GELU, {title}", settings, part=True)
        for name, (title, settings) in ablations.OURS.items()
    },
    "mpgelu-one": Recipe(
        "MP-GELU, one network",
        lambda dataset, seed: ablations.OneNetwork(seed),
        _ESTIMATOR,
        "mpgelu",
        part_of_ours=True,
    ),
    "deep-ensemble-same-size": Recipe(
        "deep ensemble of our size, mixture", _seeded(ablations.SameSizeEnsemble), part_of_ours=True
    ),
}
GROUPS = {
    "ours": [name for name, recipe in METHODS.items() if recipe.ours],
    "peers": [name for name, recipe in METHODS.items() if not recipe.ours and not recipe.part_of_ours],
    "ablations": [name for name, recipe in METHODS.items() if recipe.part_of_ours],
}
