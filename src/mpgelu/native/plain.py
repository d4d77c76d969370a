"""Stacked networks on known inputs, forward only: the fast way to predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mpgelu.native import Integers, integers, number_of, run, size_of
from mpgelu.native.threads import run_all, spans

_WORTH_A_THREAD = 1_000_000  # multiplications


@dataclass(frozen=True)
class PlainNetworks:
    """M networks of one shape as plain arrays: an embedding, if there is one, then linear maps.

    Args:
        embedding: Frequencies and phases ``(M, n, cosines)``, in turns, and the weights of the cosines' combinations
            ``(M, n, cosines, combinations)``; empty for none.
        weights: Of each linear map, ``(M, after, before)``.
        biases: Of each linear map, ``(M, after)``.
        nonlinearity: Between the linear maps.
    """

    embedding: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    nonlinearity: Literal["silu", "relu"]

    @staticmethod
    def joined(parts: Sequence[PlainNetworks]) -> PlainNetworks:
        """The networks of several that have the same shapes."""

        def all_of(name: str) -> list[Tensor]:
            return [torch.cat(each) for each in zip(*(getattr(part, name) for part in parts), strict=True)]

        return PlainNetworks(all_of("embedding"), all_of("weights"), all_of("biases"), parts[0].nonlinearity)

    @cached_property
    def features(self) -> int:
        """Number of inputs n."""
        return self.embedding[0].shape[1] if self.embedding else self.weights[0].shape[2]

    @cached_property
    def cosines(self) -> int:
        """Of each feature; zero for no embedding."""
        return self.embedding[0].shape[2] if self.embedding else 0

    @cached_property
    def widths(self) -> Integers:
        """Number of features before the first linear map and after each."""
        return integers([self.weights[0].shape[2], *(weight.shape[1] for weight in self.weights)])

    @cached_property
    def flat(self) -> Tensor:
        """All parameters in the order in which the kernel reads them, ``(M, parameters)``."""
        pairs = zip(self.weights, self.biases, strict=True)
        parts = (*self.embedding, *(part for pair in pairs for part in pair))
        return torch.cat([part.detach().flatten(1) for part in parts], 1)


def outputs(networks: PlainNetworks, x: Tensor) -> Tensor:
    """Outputs of every network, ``(M, rows, outputs)``; float32 on the CPU, without gradients.

    A row's outputs have the same bits whatever the other rows are.

    Args:
        networks: M networks.
        x: ``(M, rows, n)``; expanded where the networks share their inputs.
    """
    models, rows, widths = *x.shape[:2], networks.widths
    step = 0 if x.stride(0) == 0 else rows * x.shape[2]
    held = (x[0] if step == 0 else x).contiguous()
    results = held.new_empty(models, rows, widths[-1])
    sizes = (rows, len(widths) - 1, widths, number_of(networks.nonlinearity), x.shape[2], networks.cosines, step)
    room = size_of("plain_workspace", rows, widths)

    def part(at: slice) -> Callable[[], None]:
        def run_part() -> None:
            given = (held[at] if step else held), networks.flat[at]
            made = results[at]
            run("plain_forward", (made.shape[0], *sizes), (*given, made, held.new_empty(room)))

        return run_part

    threads = min(torch.get_num_threads(), rows * networks.flat.numel() // _WORTH_A_THREAD)
    if threads <= 1:
        part(slice(None))()
    else:
        run_all([part(at) for at in spans(models, threads)], threads)
    return results
