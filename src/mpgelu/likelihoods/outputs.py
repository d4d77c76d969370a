"""How likelihoods read the outputs of a network: their moments, checked, and the two of a heteroscedastic one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.moments import DiagonalMoments, Moments

MEAN, LOG_VARIANCE = 0, 1  # places of the two outputs of a heteroscedastic network


class MeanAndLogVariance(NamedTuple):
    """The two outputs of a heteroscedastic network by name; this module alone knows their order.

    Attributes:
        mean: Mean of the target, ``(*batch,)``.
        log_variance: Logarithm of the variance of its noise, ``(*batch,)``.
    """

    mean: Tensor
    log_variance: Tensor

    @staticmethod
    def of(outputs: Tensor) -> MeanAndLogVariance:
        """Take outputs ``(*batch, 2)`` apart, or the variances of these outputs."""
        return MeanAndLogVariance(*outputs.unbind(-1))

    def joined(self) -> Tensor:
        """Put the outputs together again, ``(*batch, 2)``."""
        return torch.stack(self, -1)


def as_moments(caller: str, outputs: Moments | Tensor, count: int) -> Moments:
    """The output as moments with ``count`` features; a plain tensor is known exactly."""
    moments = DiagonalMoments(outputs, torch.zeros_like(outputs)) if isinstance(outputs, Tensor) else outputs
    if moments.features != count:
        raise InputError(
            f"{caller}: needs a network with {count} output{'s' * (count > 1)}, got mean {tuple(moments.mean.shape)}"
        )
    return moments


def check_target(caller: str, moments: Moments, y: Tensor) -> None:
    """One target for each row."""
    if y.shape != moments.batch_shape:
        fix = "; use y.squeeze(-1)" if y.shape == (*moments.batch_shape, 1) else ""
        raise InputError(
            f"{caller}: y must have one target for each row, shape {tuple(moments.batch_shape)}, "
            f"got {tuple(y.shape)}{fix}"
        )
