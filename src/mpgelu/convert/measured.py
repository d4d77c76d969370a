"""Measurement of the errors of a converted network by sampling the original module."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpgelu.convert.tracing import in_mode
from mpgelu.moments import FactoredMoments

_DRAWS, _ROWS, _AT_ONCE = 2000, 32, 2**20  # draws of each row, rows at most, input numbers at a time


@dataclass(frozen=True)
class MeasuredError:
    """Errors of propagated means and standard deviations relative to samples of the module.

    Attributes:
        rows: Number of rows of the example that were used.
        draws: Number of samples of each row.
        mean: Root mean square error of the means, in standard deviations.
        stddev: Root mean square relative error of the standard deviations.
        worst_stddev: Largest relative error of a standard deviation.
    """

    rows: int
    draws: int
    mean: float
    stddev: float
    worst_stddev: float

    @property
    def sampling(self) -> float:
        """Relative standard error of one sampled standard deviation of a Gaussian output."""
        return 1 / math.sqrt(2 * self.draws)

    def __str__(self) -> str:
        """Return the errors as a sentence."""
        return (
            f"Measured on {self.rows} rows of the example with {self.draws} samples of the module: means are off by "
            f"{self.mean:.1%} of a standard deviation, standard deviations by {self.stddev:.1%} (root mean square; "
            f"{self.worst_stddev:.1%} at worst; the samples alone by {self.sampling:.1%})."
        )


def measure(module: nn.Module, network: nn.Module, example: Tensor) -> MeasuredError | None:
    """Compare a converted network on exact moments with samples of the module.

    Dropout is active and batch normalisation uses its running statistics, as in the network. The state of the global
    random number generator is restored.

    Args:
        module: The torch module.
        network: The network that it was converted to.
        example: Inputs, ``(rows, features)``, of which the first 32 are used.

    Returns:
        The errors, or ``None`` if no output is random.
    """
    x = example[:_ROWS].detach()
    with torch.no_grad():
        moments = network(FactoredMoments.certain(x.flatten(1)))
        samples = _samples(module, x)
    mean, stddev = samples.mean(0), samples.std(0)
    random = (stddev > 0) & (moments.stddev > 0)
    if not random.any():
        return None
    off = ((moments.mean - mean) / stddev)[random]
    ratio = (moments.stddev / stddev)[random] - 1
    size = off.square().mean().sqrt().item(), ratio.square().mean().sqrt().item()
    return MeasuredError(len(x), len(samples), *size, ratio.abs().max().item())


def _samples(module: nn.Module, x: Tensor) -> Tensor:
    """Return outputs of the random module, ``(draws, rows, outputs)``."""
    at_once = max(1, min(_DRAWS, _AT_ONCE // x.numel()))
    devices = [] if x.device.type == "cpu" else [x.device]
    with torch.random.fork_rng(devices), in_mode(module, training=True):
        torch.manual_seed(0)
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                part.training = False
        parts = []
        for first in range(0, _DRAWS, at_once):
            count = min(at_once, _DRAWS - first)
            parts.append(module(x.repeat(count, *[1] * (x.dim() - 1))).view(count, len(x), -1))
    return torch.cat(parts)
