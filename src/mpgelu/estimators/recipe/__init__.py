"""Training an ensemble as one program: rates times folds, each network scored on rows it has not seen, then weighted.

Every network leaves out one fold. It enters the ensemble twice, as it is at the end and as it was when it predicted its
held-out rows best; the weights of the rates and of the two kinds are those that predict the held-out rows best.

    settings -> folds -> networks -> steps (checkpoint) -> weights, all called by `training.train`
"""

from mpgelu.estimators.recipe.folds import FEWEST_FOLDS
from mpgelu.estimators.recipe.settings import Covariance, Noise, Settings, certain
from mpgelu.estimators.recipe.training import InterruptedWarning, Trained, train

__all__ = ["FEWEST_FOLDS", "Covariance", "InterruptedWarning", "Noise", "Settings", "Trained", "certain", "train"]
