"""Quantiles of Gaussian mixtures by the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpgelu.native import run, size_of_array
from mpgelu.native.threads import run_all, spans

_WORTH_A_THREAD = 100_000  # components times levels per thread from which on a thread pays off


def mixture_quantiles(mixture: Sequence[Tensor], q: Tensor, standard: Tensor) -> Tensor:
    """Return the quantiles of Gaussian mixtures to rounding, ``(rows, levels)``; NaN for those that were not found.

    Quantiles are not found for rows with values that are not finite, and between components so narrow that the cdf is
    almost a step. All tensors are float64 on the CPU. The quantiles of a row are bit-identical for any other rows in
    the batch.

    Args:
        mixture: Means and variances of the components, ``(rows, K)`` each; their weights, which sum to one, ``(1, K)``
            if all rows share them, else ``(rows, K)``; mean and standard deviation of each mixture, ``(rows, 1)``.
        q: Probabilities from 0.001 to 0.999, ``(levels,)``.
        standard: Quantiles of the standard normal distribution, ``(levels,)``.
    """
    held = [tensor.contiguous() for tensor in mixture]
    (rows, count), levels = held[0].shape, q.shape[0]
    roots, shared = held[0].new_empty(rows, levels), held[2].shape[0] == 1
    room = size_of_array("mixture_workspace", count, levels)

    def part(at: slice) -> Callable[[], None]:
        def run_part() -> None:
            whole = at.stop - at.start == rows  # slicing takes longer than the quantiles of one row
            given = held if whole else [t if shared and place == 2 else t[at] for place, t in enumerate(held)]
            made = roots if whole else roots[at]
            workspace = torch.empty(room, dtype=torch.float32, device="cpu")
            sizes = (made.shape[0], count, levels, 0 if shared else count)
            run("mixture_quantiles", sizes, (*given, q, standard, made, workspace), doubles=8)

        return run_part

    threads = min(torch.get_num_threads(), rows * count * levels // _WORTH_A_THREAD)
    run_all([part(at) for at in spans(rows, threads)], threads)
    return roots
