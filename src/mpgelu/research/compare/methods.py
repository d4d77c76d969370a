"""The list of compared methods: what each is called, what it needs installed and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, cast

from mpgelu.research.compare.boosters import CatBoost, NGBoost, XGBoostDistribution
from mpgelu.research.compare.interface import Method, Standardised
from mpgelu.research.compare.networks import DeepEnsemble, LaplaceKron, MCDropout

_WIDE = {"protein": 100}


@dataclass(frozen=True)
class Recipe:
    """How a method enters the comparison.

    Args:
        title: For people.
        build: The method for a data set and a seed.
        module: What must be importable.
        package: The name that `pip` knows the module by; its version goes into the records.
        matched: Score the Gaussian with the mean and variance of the method's mixture, where that is customary.
        ours: Whether splits 0-9, which the method was developed on, are also shown apart.
    """

    title: str
    build: Callable[[str, int], Method]
    module: str = "torch"
    package: str = "torch"
    matched: bool = False
    ours: bool = False

    @property
    def missing(self) -> str:
        """Why the method cannot run here, in one line; empty if it can."""
        if find_spec(self.module) is not None:
            return ""
        return f"{self.title} skipped: {self.package} is not installed; pip install 'mpgelu[compare]' brings it"

    def versions(self) -> dict[str, str]:
        """The version of what the method needs."""
        return {self.package: metadata.version(self.package)}


def _ours(fast: bool) -> Callable[[str, int], Method]:
    def build(dataset: str, seed: int) -> Method:
        estimator = import_module("mpgelu.estimators.regressor")
        settings: dict[str, Any] = estimator.FAST if fast else {}
        return cast(Method, estimator.MPGELURegressor(**settings, random_state=seed))

    return build


def _network(kind: type[DeepEnsemble] | type[MCDropout] | type[LaplaceKron]) -> Callable[[str, int], Method]:
    return lambda dataset, seed: Standardised(kind(_WIDE.get(dataset, 50), seed))


def _trees(kind: type[XGBoostDistribution] | type[CatBoost] | type[NGBoost]) -> Callable[[str, int], Method]:
    return lambda dataset, seed: Standardised(kind(seed))


METHODS: dict[str, Recipe] = {
    "mpgelu": Recipe("MP-GELU", _ours(fast=False), "mpgelu.estimators.regressor", "mpgelu", ours=True),
    "mpgelu-fast": Recipe("MP-GELU fast", _ours(fast=True), "mpgelu.estimators.regressor", "mpgelu", ours=True),
    "deep-ensemble": Recipe("deep ensemble of 5", _network(DeepEnsemble), matched=True),
    "xgboost-distribution": Recipe(
        "xgboost-distribution", _trees(XGBoostDistribution), "xgboost_distribution", "xgboost-distribution"
    ),
    "catboost": Recipe("catboost", _trees(CatBoost), "catboost", "catboost"),
    "mc-dropout": Recipe("MC dropout, 50 samples", _network(MCDropout)),
    "laplace": Recipe("laplace-torch, all/kron", _network(LaplaceKron), "laplace", "laplace-torch"),
    "ngboost": Recipe("ngboost", _trees(NGBoost), "ngboost", "ngboost"),
}
