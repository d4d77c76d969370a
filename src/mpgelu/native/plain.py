"""Outputs of stacked networks for deterministic inputs by the compiled kernel, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mpgelu.native import Integers, bound, integers, number_of, size_of
from mpgelu.native.threads import run_all, spans

_WORTH_A_THREAD = 1_000_000  # multiplications per thread from which on a thread pays off


@dataclass(frozen=True)
class PlainNetworks:
    r"""M networks of the same shape as arrays: an optional periodic embedding, then linear maps with a nonlinearity.

    The embedding of feature x is x itself and the combinations :math:`\sum_k w_{kd} \cos(2 \pi (f_k x + p_k))`.

    Args:
        embedding: Frequencies f and phases p, ``(M, n, cosines)``, and weights w, ``(M, n, cosines, combinations)``;
            empty without an embedding.
        weights: Weight matrix of each linear map, ``(M, after, before)``.
        biases: Bias of each linear map, ``(M, after)``.
        nonlinearity: Nonlinearity between linear maps.
    """

    embedding: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    nonlinearity: Literal["silu", "relu"]

    @staticmethod
    def joined(parts: Sequence[PlainNetworks]) -> PlainNetworks:
        """Return the networks of several objects with the same shapes as one object."""

        def all_of(name: str) -> list[Tensor]:
            return [torch.cat(each) for each in zip(*(getattr(part, name) for part in parts), strict=True)]

        return PlainNetworks(all_of("embedding"), all_of("weights"), all_of("biases"), parts[0].nonlinearity)

    @cached_property
    def features(self) -> int:
        """Number of inputs n."""
        return self.embedding[0].shape[1] if self.embedding else self.weights[0].shape[2]

    @cached_property
    def cosines(self) -> int:
        """Number of cosines of each feature; zero without an embedding."""
        return self.embedding[0].shape[2] if self.embedding else 0

    @cached_property
    def widths(self) -> Integers:
        """Number of features before the first linear map and after each linear map."""
        return integers([self.weights[0].shape[2], *(weight.shape[1] for weight in self.weights)])

    @cached_property
    def flat(self) -> Tensor:
        """All parameters in the order in which the kernel reads them, ``(M, parameters)``."""
        return self._joined(self.weights)

    @cached_property
    def transposed(self) -> Tensor:
        """All parameters with transposed weight matrices ``(before, after)``, for the kernel of a single row."""
        return self._joined([weight.mT for weight in self.weights])

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        """Return embedding, weights and biases as one vector for each network."""
        pairs = zip(weights, self.biases, strict=True)
        parts = (*self.embedding, *(part for pair in pairs for part in pair))
        return torch.cat([part.detach().flatten(1) for part in parts], 1)


def outputs(networks: PlainNetworks, x: Tensor) -> Tensor:
    """Return the outputs of each network, ``(M, rows, outputs)``; float32 on the CPU, without gradients.

    The outputs of a row are bit-identical for any other rows in the batch.

    Args:
        networks: M networks.
        x: Inputs, ``(M, rows, n)``; an expanded tensor if the networks share their inputs.
    """
    (models, rows, _), shared = x.shape, x.stride(0) == 0
    held = (x[0] if shared else x).contiguous()
    results = held.new_empty(models, rows, networks.widths[-1])

    def part(at: slice) -> Callable[[], None]:
        return lambda: bound_networks(networks, held if shared else held[at], results[at], at)()

    threads = min(torch.get_num_threads(), rows * networks.flat.numel() // _WORTH_A_THREAD)
    run_all([part(at) for at in spans(models, threads)], threads)
    return results


def bound_networks(networks: PlainNetworks, x: Tensor, results: Tensor, at: slice = slice(None)) -> Callable[[], None]:
    """Return a function that evaluates some of the networks on the calling thread.

    Args:
        networks: M networks.
        x: Inputs, ``(rows, n)`` if the chosen networks share them, otherwise ``(chosen, rows, n)``; contiguous.
        results: Tensor that receives the outputs, ``(chosen, rows, outputs)``.
        at: The chosen networks.
    """
    (rows, n), widths, step = x.shape[-2:], networks.widths, 0 if x.dim() == 2 else x.shape[1] * x.shape[2]
    sizes = (
        results.shape[0],
        rows,
        len(widths) - 1,
        widths,
        number_of(networks.nonlinearity),
        n,
        networks.cosines,
        step,
    )
    workspace = torch.empty(size_of("plain_workspace", rows, widths), dtype=torch.float32, device="cpu")
    if rows == 1:
        return bound("plain_single", sizes, (x, networks.transposed[at], results, workspace))
    return bound("plain_forward", sizes, (x, networks.flat[at], results, workspace))
