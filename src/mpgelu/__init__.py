"""Neural networks that say how sure they are, without sampling."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpgelu.convert import ConvertedNetwork, from_torch
    from mpgelu.errors import DataError, InputError, MPGELUError
    from mpgelu.estimators import Ensemble, InterruptedWarning, MPGELURegressor
    from mpgelu.export import export_onnx
    from mpgelu.inspect import attribute, verify
    from mpgelu.layers import MPGELU, Dropout, Elementwise, GaussianLinear, Linear, Periodic, ReLU
    from mpgelu.likelihoods import Gaussian, GaussianMixture, HeteroscedasticGaussian, Likelihood
    from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments
    from mpgelu.networks import Stack, network, paper_network, propagate
    from mpgelu.predictive import Predictive
    from mpgelu.tables import TableModel, load
    from mpgelu.training import fit

__version__ = "0.2.0.dev0"  # the only place; pyproject.toml reads it from here

__all__ = [
    "MPGELU",
    "ConvertedNetwork",
    "DataError",
    "DiagonalMoments",
    "Dropout",
    "Elementwise",
    "Ensemble",
    "FactoredMoments",
    "FullMoments",
    "Gaussian",
    "GaussianLinear",
    "GaussianMixture",
    "HeteroscedasticGaussian",
    "InputError",
    "InterruptedWarning",
    "Likelihood",
    "Linear",
    "MPGELUError",
    "MPGELURegressor",
    "Moments",
    "Periodic",
    "Predictive",
    "ReLU",
    "Stack",
    "TableModel",
    "attribute",
    "export_onnx",
    "fit",
    "from_torch",
    "load",
    "network",
    "paper_network",
    "propagate",
    "verify",
]

_HOMES = {
    "convert": ("ConvertedNetwork", "from_torch"),
    "errors": ("DataError", "InputError", "MPGELUError"),
    "estimators": ("Ensemble", "InterruptedWarning", "MPGELURegressor"),
    "export": ("export_onnx",),
    "inspect": ("attribute", "verify"),
    "layers": ("MPGELU", "Dropout", "Elementwise", "GaussianLinear", "Linear", "Periodic", "ReLU"),
    "likelihoods": ("Gaussian", "GaussianMixture", "HeteroscedasticGaussian", "Likelihood"),
    "moments": ("DiagonalMoments", "FactoredMoments", "FullMoments", "Moments"),
    "networks": ("Stack", "network", "paper_network", "propagate"),
    "predictive": ("Predictive",),
    "tables": ("TableModel", "load"),
    "training": ("fit",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: torch takes seconds, which ``mpgelu --help`` need not wait for."""
    if name in _HOME:
        globals()[name] = value = getattr(import_module(f"mpgelu.{_HOME[name]}"), name)
        return value
    if find_spec(f"mpgelu.{name}") is not None:
        return import_module(f"mpgelu.{name}")
    raise AttributeError(f"module 'mpgelu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
