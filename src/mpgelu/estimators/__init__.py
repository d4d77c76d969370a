"""Models of tables of numbers, with scikit-learn's interface.

    rows -> scales -> recipe (training) -> ensemble, noise -> predicting

The estimator (``regressor``) takes its methods from ``predicting`` (distributions, intervals by ``conformal``),
``streaming`` (rows that do not fit into memory) and ``distillation`` (a ``pupil`` network learns the ``lesson`` that an
ensemble predicts). What is fitted is the ``ensemble`` of networks and a ``gaussian_process``, with the ``noise`` that
held-out rows show; ``measurement`` averages its predictions over errors of the features, and ``fast`` evaluates it by
compiled kernels. ``arguments`` and ``loading`` are the two directions of files, ``checks`` refuse invalid data, and
``hashing`` assigns rows to folds by their numbers.
"""

from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe import InterruptedWarning
from mpgelu.estimators.regressor import FAST, MPGELURegressor

__all__ = ["FAST", "Ensemble", "InterruptedWarning", "MPGELURegressor"]
