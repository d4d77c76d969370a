"""How an ensemble is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments

Covariance = Literal["exact", "diagonal"]
Noise = Literal["heteroscedastic", "homoscedastic"]


@dataclass(frozen=True)
class Settings:
    """How an ensemble is trained.

    Args:
        hidden: units of each hidden layer.
        rates: dropout rates, one set of networks for each.
        members: networks for each rate, each of which leaves out another fold of the rows.
        steps: of the optimiser.
        batch_size: rows in a step.
        learning_rate: its peak; it grows for 5 % of the steps, then falls to zero as a cosine.
        beta: exponent of the weight of each row, its detached predictive variance; 0 for none.
        noise: whether the noise depends on the features.
        gaussian_weights: random weights, trained with their Kullback-Leibler term.
        train_covariance: moments during training.
        covariance: moments of the predictions by which networks are weighted; ``"auto"`` takes exact ones unless
            diagonal ones predict the held-out rows better.
        patience: stop after so many steps, at least one, without improvement on held-out rows; ``None`` never does.
        seed: of the folds, the starting weights and the order of the rows.
    """

    hidden: Sequence[int]
    rates: Sequence[float]
    members: int
    steps: int
    batch_size: int
    learning_rate: float
    beta: float
    noise: Noise
    gaussian_weights: bool
    train_covariance: Covariance
    covariance: Covariance | Literal["auto"]
    patience: int | None
    seed: int


def certain(x: Tensor, covariance: Covariance) -> Moments:
    """Known features, in the kind of moments of this name."""
    return (FactoredMoments if covariance == "exact" else DiagonalMoments).certain(x)
