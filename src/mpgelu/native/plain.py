"""Outputs of stacked networks for deterministic inputs by the compiled kernel.

They are differentiable with respect to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

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

    @property
    def parameters(self) -> list[Tensor]:
        """Embedding, then weights and bias of each linear map, in the order of :attr:`flat`."""
        return self._ordered(self.weights)

    def _ordered(self, weights: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(weights, self.biases, strict=True)
        return [*self.embedding, *(part for pair in pairs for part in pair)]

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        """Return embedding, weights and biases as one vector for each network."""
        return torch.cat([part.detach().flatten(1) for part in self._ordered(weights)], 1)


def outputs(networks: PlainNetworks, x: Tensor) -> Tensor:
    """Return the outputs of each network, ``(M, rows, outputs)``; float32 on the CPU.

    The outputs of a row are bit-identical for any other rows in the batch. Gradients are computed for the parameters
    only.

    Args:
        networks: M networks.
        x: Inputs, ``(M, rows, n)``; an expanded tensor if the networks share their inputs.
    """
    parameters = networks.parameters
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        recorded: Tensor = _Outputs.apply(networks, x, *parameters)  # type: ignore[no-untyped-call]
        return recorded
    return _Call(networks, x).forward(keep=False)[0]


def bound_networks(networks: PlainNetworks, x: Tensor, results: Tensor, at: slice = slice(None)) -> Callable[[], None]:
    """Return a function that evaluates some of the networks on the calling thread.

    Args:
        networks: M networks.
        x: Inputs, ``(rows, n)`` if the chosen networks share them, otherwise ``(chosen, rows, n)``; contiguous.
        results: Tensor that receives the outputs, ``(chosen, rows, outputs)``.
        at: The chosen networks.
    """
    name, parameters = ("single", networks.transposed) if x.shape[-2] == 1 else ("forward", networks.flat)
    return _bound(name, networks, x, (0,), (x, parameters[at], results, results.new_empty(0)))


def _bound(
    name: str, networks: PlainNetworks, x: Tensor, flags: tuple[int, ...], arrays: Sequence[Tensor]
) -> Callable[[], None]:
    """Return a kernel with its arguments; the second of the arrays is one of all parameters, ``(chosen, ...)``."""
    (rows, n), widths, step = x.shape[-2:], networks.widths, 0 if x.dim() == 2 else x.shape[1] * x.shape[2]
    sizes = (len(arrays[1]), rows, len(widths) - 1, widths, number_of(networks.nonlinearity), n, networks.cosines, step)
    workspace = torch.empty(size_of("plain_workspace", rows, widths), dtype=torch.float32, device="cpu")
    return bound(f"plain_{name}", (*sizes, *flags), (*arrays, workspace))


class _Call:
    """A call of the kernel, with the arrays that its forward and backward pass share.

    Args:
        networks: M networks.
        x: Inputs, ``(M, rows, n)``.
    """

    def __init__(self, networks: PlainNetworks, x: Tensor) -> None:
        self.networks, (self.models, self.rows, _) = networks, x.shape
        self.is_shared = x.stride(0) == 0
        self.x = (x.detach()[0] if self.is_shared else x.detach()).contiguous()

    def forward(self, keep: bool) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the intermediate results for the backward pass, ``(M, kept)``."""
        size = size_of("plain_kept", self.rows, self.networks.widths) if keep else 0
        results = self.x.new_empty(self.models, self.rows, self.networks.widths[-1])
        kept = self.x.new_empty(self.models, size)

        def part(at: slice) -> None:
            x = self._inputs(at)
            if keep:
                arrays = (x, self.networks.flat[at], results[at], kept[at])
                _bound("forward", self.networks, x, (1,), arrays)()
            else:
                bound_networks(self.networks, x, results[at], at)()

        self._run(part)
        return results, kept

    def backward(self, kept: Tensor, grad: Tensor) -> list[Tensor]:
        """Return the gradients of :attr:`PlainNetworks.parameters`.

        Args:
            kept: Intermediate results of :meth:`forward`.
            grad: Gradient with respect to the outputs.
        """
        flat, grad = self.networks.flat, grad.contiguous()
        by_flat = torch.empty_like(flat)

        def part(at: slice) -> None:
            x = self._inputs(at)
            _bound("backward", self.networks, x, (), (x, flat[at], kept[at], grad[at], by_flat[at]))()

        self._run(part)
        parameters = self.networks.parameters
        parts = torch.split(by_flat, [parameter[0].numel() for parameter in parameters], dim=1)
        return [part.reshape(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    def _inputs(self, at: slice) -> Tensor:
        return self.x if self.is_shared else self.x[at]

    def _run(self, part: Callable[[slice], None]) -> None:
        """Run the kernel on several threads, each with a part of the networks; results do not depend on the threads."""
        threads = min(torch.get_num_threads(), self.rows * self.networks.flat.numel() // _WORTH_A_THREAD)
        run_all([partial(part, at) for at in spans(self.models, threads)], threads)


class _Outputs(torch.autograd.Function):
    """The kernel as an autograd function of the parameters; it is differentiable once."""

    @staticmethod
    def forward(ctx: Any, networks: PlainNetworks, x: Tensor, *parameters: Tensor) -> Tensor:
        call = _Call(networks, x)
        results, kept = call.forward(keep=True)
        ctx.call = call
        ctx.save_for_backward(kept, x)  # x so that torch notices a change in place
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, _ = ctx.saved_tensors
        return None, None, *ctx.call.backward(kept, grad)
