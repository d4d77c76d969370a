"""The posterior mean of a Gaussian process by the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpgelu.native import bound, size_of_array


def process_mean(limited: Tensor, *state: Tensor) -> Tensor:
    """Return the posterior mean of each row, ``(rows,)``; no gradients are recorded.

    Args:
        limited: Features with a smooth limit, ``(rows, n)``.
        *state: The other tensors of :func:`bound_process`, in its order.
    """
    mean = limited.new_empty(limited.shape[0])
    bound_process([tensor.detach().contiguous() for tensor in (limited, *state)], mean)()
    return mean


def bound_process(given: Sequence[Tensor], mean: Tensor) -> Callable[[], None]:
    r"""Return a function that computes the posterior mean of each row, :math:`m(x) = \sum_i \alpha_i\, k(x, x_i)`.

    The kernel k is that of :class:`mpgelu.estimators.gaussian_process.GaussianProcess`. All tensors are contiguous
    float64 on the CPU. The mean of a row is bit-identical for any other rows in the batch.

    Args:
        given: Features with a smooth limit ``(rows, n)``; weights of the points ``(P,)``; standardised features of the
            training rows ``(P, n)``; means and standard deviations of the features ``(n,)``; the smooth limit ``()``;
            logarithms of length scales, amplitude, noise and slope ``(n + 3,)``.
        mean: Tensor that receives the result, ``(rows,)``.
    """
    count, n = given[2].shape
    workspace = torch.empty(size_of_array("process_workspace", count, n), dtype=torch.float32, device="cpu")
    return bound("process_forward", (mean.shape[0], count, n), (*given, mean, workspace), doubles=8)
