"""Models of tables of numbers, with scikit-learn's interface."""

from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe import InterruptedWarning
from mpgelu.estimators.regressor import FAST, MPGELURegressor

__all__ = ["FAST", "Ensemble", "InterruptedWarning", "MPGELURegressor"]
