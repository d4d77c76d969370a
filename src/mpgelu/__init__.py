"""Neural networks that say how sure they are, in one deterministic forward pass."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpgelu.convert import ConversionReport, from_torch
    from mpgelu.errors import ConversionError, DataError, InputError, MissingRuleError, MPGELUError, TrainingError
    from mpgelu.estimators import Ensemble, MPGELURegressor
    from mpgelu.export import export_onnx
    from mpgelu.inspect import Audit, attribute, plot_attribution, verify
    from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Linear, ReLU
    from mpgelu.likelihoods import Gaussian, HeteroscedasticGaussian
    from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
    from mpgelu.networks import Stack, network, paper_network, propagate
    from mpgelu.predictive import Predictive
    from mpgelu.tables import TableModel, load
    from mpgelu.training import History, RecoveryWarning, fit

__version__ = "0.1.0"

__all__ = [
    "MPGELU",
    "Audit",
    "ConversionError",
    "ConversionReport",
    "DataError",
    "DiagonalMoments",
    "Dropout",
    "Ensemble",
    "FactoredMoments",
    "FullMoments",
    "Gaussian",
    "GaussianLinear",
    "HeteroscedasticGaussian",
    "History",
    "InputError",
    "Linear",
    "MPGELUError",
    "MPGELURegressor",
    "MissingRuleError",
    "Predictive",
    "ReLU",
    "RecoveryWarning",
    "Stack",
    "TableModel",
    "TrainingError",
    "attribute",
    "export_onnx",
    "fit",
    "from_torch",
    "load",
    "network",
    "paper_network",
    "plot_attribution",
    "propagate",
    "verify",
]

_HOMES = {
    "convert": ("ConversionReport", "from_torch"),
    "errors": ("ConversionError", "DataError", "InputError", "MissingRuleError", "MPGELUError", "TrainingError"),
    "estimators": ("Ensemble", "MPGELURegressor"),
    "export": ("export_onnx",),
    "inspect": ("Audit", "attribute", "plot_attribution", "verify"),
    "layers": ("MPGELU", "Dropout", "GaussianLinear", "Linear", "ReLU"),
    "likelihoods": ("Gaussian", "HeteroscedasticGaussian"),
    "moments": ("DiagonalMoments", "FactoredMoments", "FullMoments"),
    "networks": ("Stack", "network", "paper_network", "propagate"),
    "predictive": ("Predictive",),
    "tables": ("TableModel", "load"),
    "training": ("History", "RecoveryWarning", "fit"),
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
