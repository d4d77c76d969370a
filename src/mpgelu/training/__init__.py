"""The training loop, for one network or a stack of networks, and its components."""

from mpgelu.training.best import Best
from mpgelu.training.interrupts import Interrupts
from mpgelu.training.loop import History, fit
from mpgelu.training.progress import training_progress
from mpgelu.training.trainer import Likelihood, RecoveryWarning, Trainer

__all__ = ["Best", "History", "Interrupts", "Likelihood", "RecoveryWarning", "Trainer", "fit", "training_progress"]
