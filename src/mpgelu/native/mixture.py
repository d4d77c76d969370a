"""Quantiles of Gaussian mixtures by the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpgelu.native import run, size_of_array
from mpgelu.native.threads import run_all, spans

_WORTH_A_THREAD = 100_000  # components times levels


def mixture_quantiles(
    means: Tensor, variances: Tensor, weights: Tensor, mean: Tensor, stddev: Tensor, q: Tensor, standard: Tensor
) -> Tensor:
    """The y at which each mixture's cdf is q, to rounding, ``(rows, levels)``; NaN where it was not found.

    That is where a row is not finite, and among components so narrow that a cdf is almost a step. All tensors are
    float64 on the CPU. A row's quantiles have the same bits whatever the other rows are.

    Args:
        means: Means of the components, ``(rows, K)``.
        variances: Variances of the components, ``(rows, K)``.
        weights: Weights of the components, ``(1, K)`` if all rows share them, else ``(rows, K)``; they sum to one.
        mean: Mean of each mixture, ``(rows,)`` or ``(rows, 1)``.
        stddev: Standard deviation of each mixture, ``(rows,)`` or ``(rows, 1)``.
        q: Probabilities from 0.001 to 0.999, ``(levels,)``.
        standard: Quantiles of the standard normal distribution, ``(levels,)``.
    """
    (rows, count), levels = means.shape, q.shape[0]
    held = [tensor.contiguous() for tensor in (means, variances, weights, mean, stddev)]
    roots, shared = means.new_empty(rows, levels), weights.shape[0] == 1
    room = size_of_array("mixture_workspace", count, levels)

    def part(at: slice) -> Callable[[], None]:
        def run_part() -> None:
            given = [tensor if shared and place == 2 else tensor[at] for place, tensor in enumerate(held)]
            made, workspace = roots[at], torch.empty(room, dtype=torch.float32, device="cpu")
            sizes = (made.shape[0], count, levels, 0 if shared else count)
            run("mixture_quantiles", sizes, (*given, q, standard, made, workspace), doubles=8)

        return run_part

    threads = min(torch.get_num_threads(), rows * count * levels // _WORTH_A_THREAD)
    run_all([part(at) for at in spans(rows, threads)], threads)
    return roots
