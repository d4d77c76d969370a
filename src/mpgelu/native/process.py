"""The posterior mean of a Gaussian process by the compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from mpgelu.native import run, size_of_process


def process_mean(
    limited: Tensor, alpha: Tensor, points: Tensor, center: Tensor, scale: Tensor, limit: Tensor, kernel: Tensor
) -> Tensor:
    r"""Return the posterior mean of each row, :math:`m(x) = \sum_i \alpha_i\, k(x, x_i)`, ``(rows,)``.

    The kernel k is that of :class:`mpgelu.estimators.gaussian_process.GaussianProcess`. All tensors are float64 on the
    CPU, and no gradients are recorded. The mean of a row is bit-identical for any other rows in the batch.

    Args:
        limited: Features with a smooth limit, ``(rows, n)``.
        alpha: Weights of the points, ``(P,)``.
        points: Standardised features of the training rows, ``(P, n)``.
        center: Means of the features, ``(n,)``.
        scale: Standard deviations of the features, ``(n,)``.
        limit: The smooth limit, ``()``.
        kernel: Logarithms of length scales, amplitude, noise and slope, ``(n + 3,)``.
    """
    count, n = points.shape
    inputs = [tensor.detach().contiguous() for tensor in (limited, alpha, points, center, scale, limit, kernel)]
    mean = limited.new_empty(len(limited))
    workspace = torch.empty(size_of_process(count, n), dtype=torch.float32, device="cpu")
    run("process_forward", (len(limited), count, n), inputs, (mean, workspace), doubles=8)
    return mean
