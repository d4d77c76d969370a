r"""Ensembles of MP-GELU perceptrons as few nodes: every constant folded, no factor carried further than needed.

A unit :math:`h \sim (m, v)` after MP-GELU and a mask of mean g and variance n, with :math:`k = \Phi(m / \sqrt v)` and
:math:`q = v + m^2`, has mean :math:`g k m`, gain :math:`g k` and the residual variance :math:`k q (g^2 (1 - k) + n)`.
The graph works with :math:`2 k` and leaves the factor :math:`g / 2` to the next weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mpgelu.export.graph import Value
from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Linear
from mpgelu.rules.dropout import mask_moments
from mpgelu.rules.normal import smallest_variance

Array = NDArray[np.float64]
# Added to every variance, so that a unit without any is divided by a number; it counts as none to the library too.
_NO_VARIANCE = smallest_variance(torch.float32)


class Outputs(NamedTuple):
    """Moments of the outputs of M networks in the graph, without the dimension M if it is 1.

    Args:
        mean: ``(M, rows, outputs)``.
        variance: ``(M, rows, outputs)``.
        covariance: of the first and the second output, ``(M, rows)``; ``None`` if there is none.
    """

    mean: Value
    variance: Value
    covariance: Value | None


@dataclass(frozen=True)
class Layer:
    """One linear layer of M networks with the mask before it; without the first dimension if M is 1.

    Args:
        weight: ``(M, before, after)``.
        bias: ``(M, 1, after)``.
        gain: mean of the mask, ``(M, 1, 1)``.
        noise: variance of the mask, ``(M, 1, 1)``.
        weight_variance: as ``weight``, or ``None`` if the weights are known.
        bias_variance: as ``bias``.
    """

    weight: Array
    bias: Array
    gain: Array
    noise: Array
    weight_variance: Array | None
    bias_variance: Array

    @property
    def half(self) -> Array:
        """The weights after MP-GELU, whose graph gives twice the keep-probability."""
        return self.weight * self.gain / 2

    def scaled(self, scale: Array, shift: Array) -> Layer:
        """The layer with its outputs multiplied by ``scale`` and then shifted, ``(after,)``."""
        variance = None if self.weight_variance is None else self.weight_variance * scale**2
        weight, bias = self.weight * scale, self.bias * scale + shift
        return Layer(weight, bias, self.gain, self.noise, variance, self.bias_variance * scale**2)


def layers_of(networks: Sequence[nn.Module]) -> list[Layer] | None:
    """The networks layer by layer, if they are linear layers with MP-GELU between them and dropout before any."""
    each = [_parts(network) for network in networks]
    if any(parts is None for parts in each):
        return None
    layers = []
    for same in zip(*(parts for parts in each if parts is not None), strict=True):
        weight, bias, weight_variance, bias_variance, gain, noise = map(_stacked, zip(*same, strict=True))
        uncertain = weight_variance.any() or bias_variance.any()
        layers.append(Layer(weight, bias, gain, noise, weight_variance if uncertain else None, bias_variance))
    return layers


def _parts(network: nn.Module) -> list[tuple[Tensor, ...]] | None:
    """Weight, bias, their variances, mean and variance of the mask of every linear layer."""
    found: list[tuple[Tensor, ...]] = []
    mask: tuple[Tensor | float, Tensor | float] = (1.0, 0.0)
    expected: tuple[type[nn.Module], ...] = (Dropout, Linear, GaussianLinear)
    for module in network.children() if type(network) is nn.Sequential else ():
        if type(module) not in expected:
            return None
        if isinstance(module, Dropout):
            mask, expected = mask_moments(module.rate.double(), module.rescale), (Linear, GaussianLinear)
        elif isinstance(module, Linear | GaussianLinear):
            weight = module.weight.double()
            bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.double()
            variances = (torch.zeros_like(weight), torch.zeros_like(bias))
            if isinstance(module, GaussianLinear):
                held = module.bias_variance
                variances = module.weight_variance.double(), variances[1] if held is None else held.double()
            numbers = (torch.as_tensor(part, dtype=torch.float64).reshape(1, 1) for part in mask)
            found.append((weight.mT, bias[None], variances[0].mT, variances[1][None], *numbers))
            mask, expected = (1.0, 0.0), (MPGELU,)
        else:
            expected = (Dropout, Linear, GaussianLinear)
    return found if expected == (MPGELU,) else None


def _stacked(parts: Sequence[Tensor]) -> Array:
    stacked: Array = torch.stack(list(parts)).detach().numpy()
    return stacked[0] if len(parts) == 1 else stacked


def diagonal(x: Value, layers: Sequence[Layer]) -> Outputs:
    """Mean and variance of every unit, correlations dropped.

    Args:
        x: standardised features ``(rows, n)``.
        layers: of the networks.
    """
    mean, variance = _first(x, layers[0])
    for layer in layers[1:]:
        unit = _Unit.of(mean, variance, layer)
        mean = _affine(unit.mean, layer.half, layer.bias)
        variance = _affine(unit.residual + unit.keep.square() * variance, layer.half**2, _NO_VARIANCE)
        variance = _plus(variance, unit.from_weights)
    return Outputs(mean, variance, None)


def exact(x: Value, layers: Sequence[Layer]) -> Outputs:
    """Mean and covariance of the outputs with every correlation kept.

    Args:
        x: standardised features ``(rows, n)``.
        layers: of the networks.
    """
    mean, variance = _first(x, layers[0])
    added = _first_from_weights(x, layers[0])
    # The newest sources: their variances and standard deviations, and what they do to the units.
    residual, deviation, weight = x.square(), x, layers[0].weight * np.sqrt(layers[0].noise)
    factors: Value | None = None  # what all older sources do, times their deviations, (M, rows, sources, units)
    for layer in layers[1:]:
        unit = _Unit.of(mean, variance, layer, added)
        mean = _affine(unit.mean, layer.half, layer.bias)
        variance = _plus(_affine(unit.residual, layer.half**2, _NO_VARIANCE), unit.from_weights)
        sources = [] if factors is None else [factors]
        if layer is layers[-1]:
            factors = _to_outputs(sources, deviation, weight, unit.keep, layer.half)
        elif weight.any():
            joined = _joined([*sources, deviation.unsqueeze(-1) * _rows(weight)], -2)
            factors = (joined * unit.keep.unsqueeze(-2)) @ _rows(layer.half)
        if factors is not None:
            variance = variance + factors.op("ReduceSumSquare", [-1 if layer is layers[-1] else -2], keepdims=0)
        residual, deviation, weight = unit.residual, unit.residual.sqrt(), layer.half
        added = unit.from_weights
    if weight.shape[-1] == 1:
        return Outputs(mean, variance, None)
    covariance = (residual @ (weight[..., :1] * weight[..., 1:])).take(0)
    if factors is not None:
        covariance = covariance + (factors.take(0, -2) * factors.take(1, -2)).sum(-1)
    return Outputs(mean, variance, covariance)


def _to_outputs(sources: list[Value], deviation: Value, weight: Array, keep: Value, last: Array) -> Value | None:
    """What all sources do to the outputs, ``(M, rows, outputs, sources)``: from the few outputs back to the sources."""
    backward = keep.unsqueeze(-2) * _rows(last.swapaxes(-1, -2))  # (M, rows, outputs, units)
    order = [*range(last.ndim - 1), last.ndim, last.ndim - 1]
    parts = [backward @ source.op("Transpose", perm=order) for source in sources]
    if weight.any():
        parts.append((backward @ _rows(weight.swapaxes(-1, -2))) * deviation.unsqueeze(-2))
    return _joined(parts, -1) if parts else None


@dataclass(frozen=True)
class _Unit:
    """Units after MP-GELU and the next layer's mask; see the formulas of the module.

    Args:
        keep: 2 k.
        mean: 2 k m.
        residual: 4 k q ((1 - k) + n / g^2), and what the weights before added.
        from_weights: what the random weights of the next layer add to its variances.
    """

    keep: Value
    mean: Value
    residual: Value
    from_weights: Value | None

    @staticmethod
    def of(mean: Value, variance: Value, layer: Layer, added: Value | None = None) -> _Unit:
        positive = (mean / variance.sqrt() * np.sqrt(0.5)).op("Erf")  # 2 k - 1
        keep, dropped = positive + 1.0, 1.0 - positive
        if layer.noise.any():  # apart from the 1, beside which a small rate would lose its digits
            dropped = dropped + 2 * layer.noise / layer.gain**2
        second = keep * (mean.square() + variance)  # 2 k q
        residual = second * dropped
        if added is not None:
            residual = residual + keep.square() * added
        from_weights = None
        if layer.weight_variance is not None:
            factor = (layer.gain**2 + layer.noise) / 2
            from_weights = _affine(second, factor * layer.weight_variance, layer.bias_variance)
        return _Unit(keep, keep * mean, residual, from_weights)


def _first(x: Value, layer: Layer) -> tuple[Value, Value]:
    """Mean and variance of the first linear layer's units, of certain features."""
    variance = layer.noise * layer.weight**2
    if layer.weight_variance is not None:
        variance = variance + (layer.gain**2 + layer.noise) * layer.weight_variance
    mean = _affine(x, layer.gain * layer.weight, layer.bias)
    return mean, _affine(x.square(), variance, layer.bias_variance + _NO_VARIANCE)


def _first_from_weights(x: Value, layer: Layer) -> Value | None:
    if layer.weight_variance is None:
        return None
    return _affine(x.square(), (layer.gain**2 + layer.noise) * layer.weight_variance, layer.bias_variance)


def _affine(x: Value, weight: Array, bias: Array | float) -> Value:
    """``x @ weight + bias`` as one node for one network."""
    if weight.ndim == 2:
        return x.op("Gemm", weight, np.broadcast_to(bias, (1, weight.shape[-1]))[0])
    return x @ weight + bias


def _plus(value: Value, more: Value | None) -> Value:
    return value if more is None else value + more


def _joined(parts: Sequence[Value], axis: int) -> Value:
    return parts[0].op("Concat", *parts[1:], axis=axis) if len(parts) > 1 else parts[0]


def _rows(weight: Array) -> Array:
    """A weight that meets values with a dimension of sources: ``(M, 1, before, after)``."""
    return weight if weight.ndim == 2 else weight[:, None]
