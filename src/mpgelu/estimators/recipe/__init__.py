"""How the ensemble of the estimator is trained.

    choices (settings) -> for each kind of networks: folds, networks, steps in a loop -> weights, head (noise)

Networks of one kind are trained as one program, each on all folds of the rows but one. Everything that decides how much
they count and how sure they are is learned from rows that they have not seen. `training.train` calls the rest;
`streaming.train_streamed` does so for rows that pass by.
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
