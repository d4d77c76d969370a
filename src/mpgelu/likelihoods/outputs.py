"""Reading a network's output: its mean and covariance, checked against the number of outputs and the targets."""

from __future__ import annotations

import torch
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.moments import DiagonalMoments, Moments


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
