"""Prediction of many rows: a network applied to chunks of rows, in bounded memory and within the processor's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments, Moments, moments_of
from mpgelu.moments.checks import check_mean
from mpgelu.networks.perceptron import as_function, mean_and_spread

# Entries of the largest temporary: about the size of the cache, and enough work to hide the overhead of calls.
_CHUNK_ENTRIES = 2**20
_FEWEST_ROWS = 64


def propagate(
    network: nn.Module,
    x: Tensor,
    *,
    moments: type[Moments] | Callable[[Tensor], Moments] = FactoredMoments,
    rows_at_once: int | None = None,
) -> DiagonalMoments | FullMoments:
    """Return the moments of the output of a network for every row of ``x``, without gradients.

    The result equals that of the network for the moments of all rows, with temporaries of one chunk of rows at a time.
    Ten million rows need the memory of their output and no more, and large batches run faster because the chunks fit
    the cache.

    Args:
        network: Any module from moments to moments.
        x: Inputs, ``(rows, features)``.
        moments: Type of moments, for example ``DiagonalMoments``, or function from a chunk of inputs to moments.
        rows_at_once: Number of rows in a chunk; by default chosen from the widths of the layers.

    Returns:
        Diagonal moments if the network returns such, otherwise full ones, since outputs are few.

    Raises:
        InputError: The inputs are not vectors, or ``rows_at_once`` is smaller than one.

    Example:
        >>> import torch, mpgelu
        >>> mpgelu.propagate(mpgelu.network(4), torch.randn(10_000, 4))
        FullMoments(mean (10000, 2), float32)
    """
    check_mean("propagate", x)
    if x.dim() != 2:
        raise InputError(f"propagate: x must have shape (rows, features), got {tuple(x.shape)}")
    start = moments_of("propagate", moments)
    size = rows_at_once or _default_rows(network, start(x[:1]))
    if size < 1:
        raise InputError(f"propagate: rows_at_once must be at least 1, got {rows_at_once}")
    run = as_function(network)
    with torch.no_grad():
        mean, spread = mean_and_spread(run(start(x[:size])))
        mean_all, spread_all = (part.new_empty(len(x), *part.shape[1:]) for part in (mean, spread))
        mean_all[:size], spread_all[:size] = mean, spread
        for first in range(size, len(x), size):
            rows = slice(first, first + size)
            mean_all[rows], spread_all[rows] = mean_and_spread(run(start(x[rows])))
    return (DiagonalMoments if spread.dim() == 2 else FullMoments)(mean_all, spread_all)


def _default_rows(network: nn.Module, start: Moments) -> int:
    """Return the rows whose largest temporary (variances, matrices or factors of the widest layer) fits the cache."""
    widths = [p.shape[0] for p in network.parameters() if p.dim() == 2] or [1]
    sources = {DiagonalMoments: 8, FullMoments: max(widths)}.get(type(start), start.features + sum(widths[:-3]))
    return max(_FEWEST_ROWS, _CHUNK_ENTRIES // (max(widths) * sources))
