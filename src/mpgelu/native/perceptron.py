"""Moments of stacked perceptrons by the compiled kernels, differentiable with respect to the parameters.

A kernel evaluates all layers of all networks in one call, without tensors between the layers. Its results equal those
of the rules up to rounding, which tests verify.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mpgelu.native import available, bound, integers, number_of, run, size_of
from mpgelu.native.threads import run_all, spans
from mpgelu.visibility import values_are_visible

Nonlinearity = Literal["mpgelu", "relu_dvi", "relu_exact"]

_WORTH_A_THREAD = 200_000  # multiplications per thread from which on a thread pays off


@dataclass(frozen=True)
class Perceptrons:
    """Networks of the same shape as arrays. Each layer is a dropout mask, a linear map and a nonlinearity.

    The last layer has no nonlinearity. All arrays are float32 on the CPU.

    Args:
        weights: Weight matrix of each layer, ``(models, after, before)``.
        biases: Bias of each layer, ``(models, after)``.
        gains: Mean of the mask of each layer, ``(models, layers)``; one without dropout.
        noises: Variance of the mask of each layer, ``(models, layers)``; zero without dropout.
        nonlinearity: Nonlinearity between linear maps; for ReLU with the method of its covariance.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    gains: Tensor
    noises: Tensor
    nonlinearity: Nonlinearity = "mpgelu"

    @property
    def widths(self) -> list[int]:
        """Number of features before the first layer and after each layer."""
        return [self.weights[0].shape[2], *(weight.shape[1] for weight in self.weights)]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The weights of all layers, followed by the biases of all layers."""
        return *self.weights, *self.biases

    @cached_property
    def flat(self) -> Tensor:
        """All parameters of each network, ``(models, parameters)``: for each layer weights, row by row, then bias."""
        return self._joined(self.weights)

    @cached_property
    def transposed(self) -> Tensor:
        """All parameters with transposed weight matrices ``(before, after)``, for the kernel of a single row."""
        return self._joined([weight.mT for weight in self.weights])

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        """Return weights and biases as one vector for each network."""
        pairs = zip(weights, self.biases, strict=True)
        return torch.cat([part.detach().flatten(1) for pair in pairs for part in pair], dim=1)

    def kernel(self, exact: bool) -> str:
        """Name of the kernel for diagonal moments, or for the covariance: factored for MP-GELU, full for ReLU."""
        return "diagonal" if not exact else "factored" if self.nonlinearity == "mpgelu" else "full"


def can_take(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the kernels accept tensors: plain, on the CPU, of one dtype, not traced, not in forward mode."""
    plain = all(tensor.dtype == dtype and tensor.is_cpu for tensor in tensors)
    return plain and values_are_visible(*tensors) and available()


def propagate(networks: Perceptrons, mean: Tensor, variance: Tensor, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Return the moments of the outputs of each network.

    The results equal those of the rules up to rounding. Gradients are computed for weights and biases only. All tensors
    are float32 on the CPU; see :func:`can_take`.

    Args:
        networks: M networks.
        mean: Means of the inputs, ``(M, rows, n)``.
        variance: Variances of the inputs, which are independent of each other, ``(M, rows, n)``.
        exact: Whether correlations between all units are propagated, or diagonal moments.

    Returns:
        Means, ``(M, rows, outputs)``, and covariances, ``(M, rows, outputs, outputs)``, or variances, in the shape of
        the means.
    """
    return _outputs(networks.kernel(exact), networks, mean, variance)


def _outputs(kernel: str, networks: Perceptrons, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Run a kernel, and record it for autograd if a parameter requires a gradient."""
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in networks.parameters):
        outputs: tuple[Tensor, Tensor] = _Propagate.apply(kernel, networks, mean, variance, *networks.parameters)  # type: ignore[no-untyped-call]
        return outputs
    call = _Call(kernel, networks, mean, variance)
    return call.forward(keep=False)[:2]


def bound_propagation(
    networks: Perceptrons, exact: bool, mean: Tensor, variance: Tensor
) -> tuple[Callable[[], None], Tensor, Tensor]:
    """Return a function that propagates moments on the calling thread, and the tensors that receive its results.

    Args:
        networks: M networks.
        exact: As in :func:`propagate`.
        mean: Means of the inputs, ``(M, rows, n)``, contiguous; they are read at each call.
        variance: Variances of the inputs, ``(M, rows, n)``, contiguous.

    Returns:
        The function, and the tensors for means and for variances or covariances of the outputs.
    """
    call = _Call(networks.kernel(exact), networks, mean, variance)
    results, room = call.results(keep=False), size_of(f"{call.kernel}_workspace", call.rows, call.integers)
    workspace = torch.empty(room, dtype=torch.float32, device="cpu")
    inputs, form = call.inputs, "forward"
    if call.kernel == "diagonal" and call.rows == 1:
        inputs, form = [*inputs[:-1], networks.transposed], "single"
    arrays = (*inputs, *results, workspace)
    return bound(f"{call.kernel}_{form}", (call.models, *call.sizes, 0), arrays), results[0], results[1]


class _Call:
    """A call of a kernel, with the arrays that its forward and backward pass share.

    Args:
        kernel: Name of the kernel: ``"diagonal"``, ``"factored"`` or ``"full"``.
        networks: M networks.
        mean: Means of the inputs, ``(M, rows, n)``.
        variance: Variances of the inputs, ``(M, rows, n)``.
    """

    def __init__(self, kernel: str, networks: Perceptrons, mean: Tensor, variance: Tensor) -> None:
        self.kernel, self.models, self.rows = kernel, *mean.shape[:2]
        self.widths = networks.widths
        self.integers = integers(self.widths)
        self.sizes = (self.rows, len(self.widths) - 1, self.integers, number_of(networks.nonlinearity))
        given = (mean, variance, networks.gains, networks.noises, networks.flat)
        self.inputs = [tensor.detach().contiguous() for tensor in given]

    def forward(self, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run the forward pass.

        Args:
            keep: Whether intermediate results are kept for the backward pass.

        Returns:
            Means of the outputs, their variances or covariances, and the intermediate results, ``(M, kept)``.
        """
        results = self.results(keep)
        self._run("forward", (*self.sizes, int(keep)), self.inputs, results)
        return results

    def results(self, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return uninitialised tensors for the results of :meth:`forward`.

        Args:
            keep: Whether intermediate results are kept for the backward pass.
        """
        like, outputs = self.inputs[0], self.widths[-1]
        spread = (outputs,) if self.kernel == "diagonal" else (outputs, outputs)
        shape = self.models, self.rows
        return (
            like.new_empty(*shape, outputs),
            like.new_empty(*shape, *spread),
            like.new_empty(self.models, size_of(f"{self.kernel}_kept", self.rows, self.integers) if keep else 0),
        )

    def backward(self, kept: Tensor, grad_mean: Tensor, grad_spread: Tensor) -> list[Tensor]:
        """Return the gradients of all weights, followed by those of all biases.

        Args:
            kept: Intermediate results of :meth:`forward`.
            grad_mean: Gradient with respect to the means of the outputs.
            grad_spread: Gradient with respect to their variances or covariances.
        """
        by_flat = torch.empty_like(self.inputs[-1])
        gradients = [grad_mean.contiguous(), grad_spread.contiguous()]
        self._run("backward", self.sizes, [*self.inputs, kept, *gradients], (by_flat,))
        return _unflat(by_flat, self.widths)

    def _run(self, direction: str, sizes: Sequence[Any], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Run the kernel on several threads, each with a part of the networks; results do not depend on the threads."""
        room = size_of(f"{self.kernel}_workspace", self.rows, self.integers)

        def part(models: slice) -> Callable[[], None]:
            def run_part() -> None:
                given, made = ([tensor[models] for tensor in tensors] for tensors in (inputs, results))
                workspace = torch.empty(room, dtype=torch.float32, device="cpu")
                run(f"{self.kernel}_{direction}", (given[0].shape[0], *sizes), (*given, *made, workspace))

            return run_part

        multiplications = self.rows * self.inputs[-1].numel()
        threads = min(torch.get_num_threads(), multiplications // _WORTH_A_THREAD)
        run_all([part(models) for models in spans(self.models, threads)], threads)


class _Propagate(torch.autograd.Function):
    """The kernels as an autograd function of the parameters; it is differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, networks: Perceptrons, mean: Tensor, variance: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        call = _Call(kernel, networks, mean, variance)
        mean_after, spread, kept = call.forward(keep=True)
        ctx.call = call
        ctx.save_for_backward(kept)
        return mean_after, spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_spread: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return None, None, None, None, *ctx.call.backward(kept, grad_mean, grad_spread)


def _unflat(flat: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return the weights of all layers, then the biases of all layers, from the layout of :attr:`Perceptrons.flat`."""
    shapes = [(after, before) for before, after in itertools.pairwise(widths)]
    parts = torch.split(flat, [size for after, before in shapes for size in (after * before, after)], dim=1)
    weights = [part.reshape(len(flat), *shape) for part, shape in zip(parts[::2], shapes, strict=True)]
    return [*weights, *parts[1::2]]
