"""The training of the estimator's ensemble.

    choices (settings) -> for each kind of networks: folds, networks, steps in a loop -> weights, head (noise)

The networks of a kind are trained together as one stack, each on all folds of the rows but one. Weights of the kinds,
noise and shape of the mixture are estimated from predictions of rows by networks that were not trained on them.
`training.train` is the entry point for rows in memory, `streaming.train_streamed` for a stream of rows.
"""

from mpgelu.estimators.recipe.choices import settings_of
from mpgelu.estimators.recipe.folds import Rows
from mpgelu.estimators.recipe.networks import default_network
from mpgelu.estimators.recipe.settings import Kind, Noise, Settings
from mpgelu.estimators.recipe.streaming import Block, Stream, train_streamed
from mpgelu.estimators.recipe.training import InterruptedWarning, Trained, train

__all__ = [
    "Block",
    "InterruptedWarning",
    "Kind",
    "Noise",
    "Rows",
    "Settings",
    "Stream",
    "Trained",
    "default_network",
    "settings_of",
    "train",
    "train_streamed",
]
