"""Settings of the training of an ensemble."""

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
    """A kind of networks: one architecture and training, with one network for each fold.

    Args:
        hidden: Number of units of each hidden layer.
        rate: Dropout rate; 0 for no dropout.
        sigma: Standard deviation of the initial frequencies of the periodic embedding; ``None`` for no embedding.
        effort: Number of steps relative to the settings; below one it is early stopping, which suits few and noisy
            rows.
        smooth: Whether networks without dropout are smooth functions, by SiLU. Otherwise they are piecewise linear
            functions of the embedded features, by MP-GELU, which is ReLU for known inputs; such networks can be
            constant over whole regions, which suits targets that often have the same value. Without effect on networks
            with dropout, which always have MP-GELU.
    """

    hidden: tuple[int, ...]
    rate: float = 0.0
    sigma: float | None = None
    effort: float = 1.0
    smooth: bool = True

    def __str__(self) -> str:
        """Return the name of the kind, for the progress bar and in ``kind_weights_``."""
        parts = ["plain" if self.sigma is None else f"periodic {self.sigma:g}"]
        if self.rate:
            parts.append(f"rate {self.rate:g}")
        elif not self.smooth:
            parts.append("piecewise linear")
        if self.effort < 1:
            parts.append(f"{self.effort:.2g} of the steps")
        return ", ".join(parts)


@dataclass(frozen=True)
class Settings:
    """Settings of the training of an ensemble; :func:`settings_of` derives them from an estimator.

    Args:
        kinds: Kinds of networks; those of a kind are trained as one stack, and share one weight.
        process: Whether a Gaussian process is a member.
        folds: Number of folds; each is held out from one network of each kind.
        steps: Number of optimiser steps.
        batch_size: Number of rows in a step.
        learning_rate: Largest learning rate; it is reached linearly in 5 % of the steps, then falls to zero as a
            cosine.
        beta: Exponent of the predictive variance in the weight of each row, see :class:`ExpectedLoss`; 0 for no
            weights.
        noise: Whether the noise depends on the features.
        network: Function from the number of features, the kind and the number of outputs to a network.
        likelihood: Likelihood of the outputs; ``None`` for a mean with noise that is estimated from held-out rows.
        moments: Type of moments that predictions propagate through networks with random layers; ``None`` to choose it
            by the log-likelihood of held-out rows.
        time_limit: Largest duration in seconds, to which the number of steps is adapted; ``None`` for no limit.
        seed: Seed of the folds, the initial weights and the order of the rows.
        device: Device on which the networks are trained.
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
