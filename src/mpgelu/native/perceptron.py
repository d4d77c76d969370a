"""Stacked perceptrons as one differentiable function of their parameters: the fast way to train many small ones."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mpgelu.native import Size, run

_LANES = 8  # as in kernels.c
_EXACT_ROWS = 16  # as in perceptron.c

Nonlinearity = Literal["mpgelu", "relu_dvi", "relu_exact"]  # in the order of perceptron.c


@dataclass(frozen=True)
class Perceptrons:
    """Networks of one shape as plain arrays: a mask, a linear map, a nonlinearity, and so on, a linear map last.

    Args:
        weights: of each layer, ``(models, after, before)``.
        biases: of each layer, ``(models, after)``.
        gains: mean of each layer's mask, ``(models, layers)``.
        noises: variance of each layer's mask, ``(models, layers)``.
        nonlinearity: between the linear maps; for ReLU with the rule of its covariance.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    gains: Tensor
    noises: Tensor
    nonlinearity: Nonlinearity = "mpgelu"

    @property
    def widths(self) -> list[int]:
        """Number of features before the first layer and after each."""
        return [self.weights[0].shape[2], *(weight.shape[1] for weight in self.weights)]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Layers, widths and nonlinearity, as the kernels take them."""
        return len(self.weights), _integers(self.widths), get_args(Nonlinearity).index(self.nonlinearity)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All weights, then all biases."""
        return *self.weights, *self.biases

    def need_gradients(self) -> bool:
        """Whether a result has to be differentiated by a parameter."""
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters)


def propagate(networks: Perceptrons, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the outputs of every network.

    The same numbers as the rules one after the other, to rounding. Gradients flow to weights and biases only. The
    tensors are float32 on the CPU.

    Args:
        networks: of M models.
        mean: of the inputs, ``(M, rows, n)``.
        variance: of the inputs, ``(M, rows, n)``.
    """
    if networks.need_gradients():
        outputs: tuple[Tensor, Tensor] = _Propagate.apply(mean, variance, networks, *networks.parameters)  # type: ignore[no-untyped-call]
        return outputs
    mean_after, variance_after, _, _ = _forward(mean, variance, networks, keep=False)
    return mean_after, variance_after


def propagate_exactly(networks: Perceptrons, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs of every network, with all correlations.

    Gradients flow to weights and biases only, as in :func:`propagate`.

    Args:
        networks: of M models.
        mean: of the inputs, ``(M, rows, n)``.
        variance: of the inputs, independent of each other, ``(M, rows, n)``.
    """
    if networks.need_gradients():
        outputs: tuple[Tensor, Tensor] = _PropagateExactly.apply(mean, variance, networks, *networks.parameters)  # type: ignore[no-untyped-call]
        return outputs
    if networks.nonlinearity == "mpgelu":
        sizes, workspace = networks.sizes[:2], _exact_workspace(networks.widths)
        return _with_covariance("perceptron_exact", sizes, workspace, mean, variance, networks)
    return _with_covariance(*_with_gradients(networks), mean, variance, networks)


def _flat(networks: Perceptrons) -> Tensor:
    """All parameters of each network, every weight matrix followed by its biases, ``(M, parameters)``."""
    pairs = zip(networks.weights, networks.biases, strict=True)
    return torch.cat([part.detach().flatten(1) for pair in pairs for part in pair], dim=1)


def _unflat(flat: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """What :func:`_flat` joined: all weights, then all biases."""
    shapes = [(after, before) for before, after in itertools.pairwise(widths)]
    parts = torch.split(flat, [size for after, before in shapes for size in (after * before, after)], dim=1)
    weights = [part.reshape(len(flat), *shape) for part, shape in zip(parts[::2], shapes, strict=True)]
    return [*weights, *parts[1::2]]


def _forward(
    mean: Tensor, variance: Tensor, networks: Perceptrons, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of the outputs, the parameters as one array, and what the backward pass needs."""
    models, rows, _ = mean.shape
    widths = networks.widths
    flat = _flat(networks)
    outputs = mean.new_empty(models, rows, widths[-1]), mean.new_empty(models, rows, widths[-1])
    kept = mean.new_empty(models if keep else 1, _kept_entries(_padded(widths), rows))
    workspace = mean.new_empty(_forward_workspace(widths))
    sizes = (models, rows, *networks.sizes, int(keep))
    run("perceptron", sizes, (mean, variance, networks.gains, networks.noises, flat), (*outputs, kept, workspace))
    return *outputs, flat, kept


def _with_gradients(networks: Perceptrons) -> tuple[str, Sequence[Size], int]:
    """The kernel for covariances that has a backward pass, its sizes and its workspace."""
    if networks.nonlinearity == "mpgelu":
        return "perceptron_factored", networks.sizes[:2], _factored_workspace(networks.widths)
    return "perceptron_full", networks.sizes, _full_workspace(networks.widths)


def _with_covariance(
    kernel: str, sizes: Sequence[Size], workspace: int, mean: Tensor, variance: Tensor, networks: Perceptrons
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the outputs by one of the kernels that compute them."""
    models, rows, _ = mean.shape
    outputs = networks.widths[-1]
    results = mean.new_empty(models, rows, outputs), mean.new_empty(models, rows, outputs, outputs)
    inputs = mean, variance, networks.gains, networks.noises, _flat(networks)
    run(kernel, (models, rows, *sizes), inputs, (*results, mean.new_empty(workspace)))
    return results


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, networks: Perceptrons, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean_after, variance_after, flat, kept = _forward(mean, variance, networks, keep=True)
        ctx.networks, ctx.rows = networks, mean.shape[1]
        ctx.save_for_backward(flat, kept)
        return mean_after, variance_after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor) -> tuple[Tensor | None, ...]:
        flat, kept = ctx.saved_tensors
        networks: Perceptrons = ctx.networks
        by_flat = torch.empty_like(flat)
        run(
            "perceptron_backward",
            (len(flat), ctx.rows, *networks.sizes),
            (networks.gains, networks.noises, flat, kept, grad_mean, grad_variance),
            (by_flat, flat.new_empty(_backward_workspace(networks.widths, ctx.rows))),
        )
        return None, None, None, *_unflat(by_flat, networks.widths)


class _PropagateExactly(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, networks: Perceptrons, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.networks = networks
        ctx.save_for_backward(mean, variance, _flat(networks))
        return _with_covariance(*_with_gradients(networks), mean, variance, networks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_covariance: Tensor) -> tuple[Tensor | None, ...]:
        mean, variance, flat = ctx.saved_tensors
        networks: Perceptrons = ctx.networks
        kernel, sizes, workspace = _with_gradients(networks)
        workspace += _LANES * (flat.shape[1] + 2 * networks.widths[-1] ** 2)
        by_flat = torch.empty_like(flat)
        run(
            f"{kernel}_backward",
            (len(flat), mean.shape[1], *sizes),
            (mean, variance, networks.gains, networks.noises, flat, grad_mean, grad_covariance),
            (by_flat, flat.new_empty(workspace)),
        )
        return None, None, None, *_unflat(by_flat, networks.widths)


def _padded(widths: Sequence[int]) -> list[int]:
    return [-(-width // _LANES) * _LANES for width in widths]


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _kept_entries(padded: Sequence[int], rows: int) -> int:
    return sum(2 * rows * (before + after) for before, after in itertools.pairwise(padded))


def _forward_workspace(widths: Sequence[int]) -> int:
    return 2 * max(before * after for before, after in zip(widths, _padded(widths)[1:], strict=False))


def _exact_workspace(widths: Sequence[int]) -> int:
    padded, rows = _padded(widths), _EXACT_ROWS
    matrices = [before * after for before, after in itertools.pairwise(padded)]
    # A block of sources keeps the rank of the layer that made it while its rows pass through the later layers.
    ranks = {layer: padded[layer] * max(padded[layer:]) for layer in range(len(matrices))}
    scaled = max(*ranks.values(), max(padded) * widths[-1])
    room = 7 * rows * max(padded) + 2 * max(matrices) + rows * scaled
    return room + sum(rows * padded[layer] + matrices[layer] + rows * ranks[layer] for layer in ranks)


def _full_workspace(widths: Sequence[int]) -> int:
    inputs, *inner = widths
    widest, pairs = max(inner), list(itertools.pairwise(widths))
    layers = 2 * inputs + sum(width * (width + 1) for width in inner) + sum(width * (width + 1) for width in inner[:-1])
    largest = max(widest**2, *(before * after for before, after in pairs))
    return _LANES * (layers + (10 + 2 * widest) * widest + 2 * largest)


def _factored_workspace(widths: Sequence[int]) -> int:
    pairs = list(itertools.pairwise(widths))
    sources = list(itertools.accumulate(widths[:-1], initial=0))
    maps = sum((before + after) * (2 + count) for (before, after), count in zip(pairs, sources, strict=False))
    largest = max(max(pair) * count for pair, count in zip(pairs, sources, strict=False))
    return _LANES * (maps + 2 * sources[-1] + max(widths) + max(*widths, widths[-1] ** 2) + 2 * largest)


def _backward_workspace(widths: Sequence[int], rows: int) -> int:
    padded = _padded(widths)
    return 4 * (max(before * after for before, after in zip(padded, widths[1:], strict=False)) + rows * max(padded))
