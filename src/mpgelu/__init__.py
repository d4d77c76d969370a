"""Neural networks that say how sure they are, in one deterministic forward pass."""

from mpgelu.attribution import attribute, plot_attribution
from mpgelu.convert import ConversionReport, from_torch
from mpgelu.ensemble import Ensemble
from mpgelu.errors import ConversionError, DataError, InputError, MissingRuleError, MPGELUError, TrainingError
from mpgelu.estimator import MPGELURegressor, load
from mpgelu.export import export_onnx
from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Linear, ReLU
from mpgelu.likelihood import Gaussian, HeteroscedasticGaussian
from mpgelu.model import TableModel
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.networks import Stack, network, paper_network
from mpgelu.predictive import Predictive
from mpgelu.propagation import propagate
from mpgelu.training import History, RecoveryWarning, fit
from mpgelu.verify import Audit, verify

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
