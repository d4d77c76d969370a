"""The mean of a Gaussian process in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpgelu.native import bound, size_of_array


def process_mean(limited: Tensor, *state: Tensor) -> Tensor:
    """Posterior mean of each row, ``(rows,)``; see :func:`bound_process`."""
    mean = limited.new_empty(limited.shape[0])
    bound_process([tensor.detach().contiguous() for tensor in (limited, *state)], mean)()
    return mean


def bound_process(given: Sequence[Tensor], mean: Tensor) -> Callable[[], None]:
    """A call that computes the posterior mean of each row; all tensors are contiguous float64 on the CPU.

    A row's mean has the same bits whatever the other rows are. See :class:`mpgelu.estimators.GaussianProcess`.

    Args:
        given: Features inside the smooth limit ``(rows, n)``, weights of the points ``(P,)``, standardised training
            rows ``(P, n)``, center and scale ``(n,)``, limit ``()``, logarithms of lengths, amplitude, noise and slope
            ``(n + 3,)``.
        mean: Where the result goes, ``(rows,)``.
    """
    count, n = given[2].shape
    workspace = torch.empty(size_of_array("process_workspace", count, n), dtype=torch.float32, device="cpu")
    return bound("process_forward", (mean.shape[0], count, n), (*given, mean, workspace), doubles=8)
