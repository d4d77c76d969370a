"""The mean of a Gaussian process in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from mpgelu.native import run, size_of_array


def process_mean(
    limited: Tensor, alpha: Tensor, points: Tensor, center: Tensor, scale: Tensor, limit: Tensor, kernel: Tensor
) -> Tensor:
    """Posterior mean of each row, ``(rows,)``; all tensors are float64 on the CPU, nothing has gradients.

    A row's mean has the same bits whatever the other rows are. See :class:`mpgelu.estimators.GaussianProcess`.

    Args:
        limited: Features inside the smooth limit, ``(rows, n)``.
        alpha: Weights of the points, ``(P,)``.
        points: Standardised training rows, ``(P, n)``.
        center: ``(n,)``.
        scale: ``(n,)``.
        limit: ``()``.
        kernel: Logarithms of lengths, amplitude, noise and slope, ``(n + 3,)``.
    """
    count, n = points.shape
    inputs = [tensor.detach().contiguous() for tensor in (limited, alpha, points, center, scale, limit, kernel)]
    rows = limited.shape[0]
    mean = limited.new_empty(rows)
    workspace = torch.empty(size_of_array("process_workspace", count, n), dtype=torch.float32, device="cpu")
    run("process_forward", (rows, count, n), (*inputs, mean, workspace), doubles=8)
    return mean
