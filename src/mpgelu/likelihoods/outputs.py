"""Validation of the outputs of a network, and the names of the two outputs of a heteroscedastic one."""

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
        log_variance: Logarithm of the variance of the noise, ``(*batch,)``.
    """

    mean: Tensor
    log_variance: Tensor

    @staticmethod
    def of(outputs: Tensor) -> MeanAndLogVariance:
        """Split outputs ``(*batch, 2)``, or their variances, into the two."""
        return MeanAndLogVariance(*outputs.unbind(-1))

    def joined(self) -> Tensor:
        """Return the outputs as one tensor, ``(*batch, 2)``."""
        return torch.stack(self, -1)


def as_moments(caller: str, outputs: Moments | Tensor, count: int) -> Moments:
    """Return the outputs of a network as moments of a vector; a plain tensor gets zero variance.

    Args:
        caller: Name of the function that the error message starts with.
        outputs: Moments or a tensor, mean ``(*batch, count)``.
        count: Number of outputs that the likelihood needs.

    Raises:
        InputError: An output is not a vector of this length.
    """
    moments = DiagonalMoments(outputs, torch.zeros_like(outputs)) if isinstance(outputs, Tensor) else outputs
    if tuple(moments.event_shape) != (count,):
        raise InputError(
            f"{caller}: needs a network with {count} output{'s' * (count > 1)} for each row, got mean "
            f"{tuple(moments.mean.shape)} of event shape {tuple(moments.event_shape)}"
        )
    return moments


def check_target(caller: str, moments: Moments, y: Tensor) -> None:
    """Check that there is one target for each row.

    Args:
        caller: Name of the function that the error message starts with.
        moments: Moments of the outputs.
        y: Targets, ``(*batch,)``.

    Raises:
        InputError: The shape of y is not the batch shape.
    """
    if y.shape != moments.batch_shape:
        fix = "; use y.squeeze(-1)" if y.shape == (*moments.batch_shape, 1) else ""
        raise InputError(
            f"{caller}: y must have one target for each row, shape {tuple(moments.batch_shape)}, "
            f"got {tuple(y.shape)}{fix}"
        )
