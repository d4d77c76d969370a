"""How an ensemble is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from mpgelu.likelihoods import Likelihood
from mpgelu.moments import Moments

Noise = Literal["heteroscedastic", "homoscedastic"]


@dataclass(frozen=True)
class Kind:
    """Networks of one architecture, one for each fold.

    Args:
        hidden: Units of each hidden layer.
        rate: Dropout rate; 0 for none.
        sigma: Standard deviation of the starting frequencies of the periodic embedding; ``None`` for no embedding.
        effort: Share of the steps that these networks take: few rows full of noise are best fitted briefly.
    """

    hidden: tuple[int, ...]
    rate: float = 0.0
    sigma: float | None = None
    effort: float = 1.0

    def __str__(self) -> str:
        """Words for the progress bar and for the weights of the kinds."""
        embedding = "plain" if self.sigma is None else f"periodic {self.sigma:g}"
        rate = f", rate {self.rate:g}" if self.rate else ""
        return f"{embedding}{rate}, {self.effort:.2g} of the steps" if self.effort < 1 else f"{embedding}{rate}"


@dataclass(frozen=True)
class Settings:
    """How an ensemble is trained.

    Args:
        kinds: Architectures; the networks of each are trained as one program, and weighted as one.
        process: Whether a Gaussian process is among the members.
        folds: Parts of the rows; a network of each kind leaves out one of them, which it is judged by.
        steps: Number of steps of the optimiser.
        batch_size: Rows in a step.
        learning_rate: Its peak; it grows for 5 % of the steps, then falls to zero as a cosine.
        beta: Exponent of the weight of each row, its detached predictive variance; 0 for none.
        noise: Whether the noise depends on the features.
        network: Builds a network from the number of features, the kind and the number of outputs.
        likelihood: What the outputs mean; ``None`` for a mean with noise from held-out rows.
        moments: That random networks propagate in predictions.
        time_limit: Seconds after which training ends, with fewer steps if need be; ``None`` for no limit.
        seed: Seed of the folds, the starting weights and the order of the rows.
        device: Where the networks are trained.
    """

    kinds: tuple[Kind, ...]
    process: bool
    folds: int
    steps: int
    batch_size: int
    learning_rate: float
    beta: float
    noise: Noise
    network: Callable[[int, Kind, int], nn.Module]
    likelihood: Likelihood | None
    moments: type[Moments] | None
    time_limit: float | None
    seed: int
    device: torch.device
