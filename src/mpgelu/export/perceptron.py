r"""Ensembles of MP-GELU perceptrons as few nodes: constants folded, few arrays with few dimensions.

A unit :math:`h \sim (m, v)` after MP-GELU and a mask of mean g and variance n has mean :math:`g k m`, gain :math:`g k`
and residual variance :math:`g^2 k q\, (1 - k + n / g^2)`, with :math:`k = \Phi(m / \sqrt v)` and
:math:`q = v + m^2`. The graph carries :math:`2 v`, which the error function wants, and leaves g to the next weights.

Values of one network are ``(rows, units)``, those of M networks ``(M, rows, units)``. Weights and what belongs to them
always have the dimension M. In front of it there is room for outputs, ``(outputs, M, rows, units)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mpgelu.export.graph import Value
from mpgelu.export.layers import Array, Layer
from mpgelu.rules.normal import smallest_variance

# Added to every variance, so that a unit without any is divided by a number; it counts as none to the library too.
_NO_VARIANCE = smallest_variance(torch.float32)
_TINY = 1e-30
_SMALL_RATE = 0.01  # a smaller rate loses too many digits when float32 adds it to 1
PAIRS = ([0, 1, 0], [0, 1, 1])  # of two outputs: those of the two variances and of the covariance
OF_FLUCTUATIONS = np.sqrt([1.0, 0.5])  # scales of the outputs' fluctuations: the graph carries S22 / 2


class Outputs(NamedTuple):
    """Moments of the outputs of M networks in the graph, without the dimension M if it is 1.

    Attributes:
        mean: Means, ``(outputs, M, rows)``.
        variance: Variances of the outputs times ``OF_FLUCTUATIONS``, in the same shape.
        correlated: Whether there is a third row, which is the covariance in ``variance`` and unused in ``mean``.
    """

    mean: Value
    variance: Value
    correlated: bool


def diagonal(x: Value, layers: Sequence[Layer]) -> Outputs:
    """Return mean and variance of the outputs with diagonal moments, which drop correlations.

    Args:
        x: Centred features, ``(rows, n)``.
        layers: Layers of the networks.
    """
    *hidden, last = layers
    inputs = _Inputs(x, x * x)
    if not hidden:
        return _outputs(inputs, inputs.second_moment, last, last.noise_weight)
    mean, twice, _ = _first(inputs, hidden[0])
    for layer in hidden[1:]:
        unit = _Unit.of(mean, twice, layer)
        mean = _affine(unit.mean, layer.mean_weight, _nonzero(layer.bias))
        twice = _twice(unit.variance, layer, [_from_weights(unit, layer)])
    unit = _Unit.of(mean, twice, last)
    return _outputs(unit, unit.variance, last, last.mean_weight)


def exact(x: Value, layers: Sequence[Layer], cross: bool) -> Outputs:
    """Return mean and covariance of the outputs with all correlations.

    The covariance is a sum over independent sources of noise. Their factors are propagated forward to the hidden
    units, because each unit needs its variance. For the outputs, which are few, derivatives are propagated backward to
    the sources instead, which costs less.

    Args:
        x: Centred features, ``(rows, n)``.
        layers: Layers of the networks.
        cross: Whether the covariance of two outputs is needed.
    """
    *hidden, last = layers
    inputs = _Inputs(x, x * x)
    if not hidden:
        return _outputs(inputs, inputs.second_moment, last, last.noise_weight, cross=cross)
    mean, twice, added = _first(inputs, hidden[0])
    units = [_Unit.of(mean, twice, layers[1], added)]
    sources: list[_Sources] = []
    if hidden[0].noise.any():
        sources.append(_Sources.new(hidden[0].noise_weight, inputs.second_moment.reshape(-1, 1, hidden[0].before)))
    for layer, following in zip(hidden[1:], layers[2:], strict=True):
        unit, keep = units[-1], _row_wise(units[-1].keep, layer)
        mean = _affine(unit.mean, layer.mean_weight, _nonzero(layer.bias))
        sources = [source.through(keep, layer) for source in sources]
        added = _from_weights(unit, layer)
        twice = _twice(unit.residual, layer, [*(source.twice(layer) for source in sources), added])
        sources.append(_Sources.new(layer.mean_weight, _row_wise(unit.residual, layer)))
        units.append(_Unit.of(mean, twice, following, added))
    return _outputs(units[-1], units[-1].residual, last, last.mean_weight, _to_sources(x, units, layers), cross)


class _Inputs(NamedTuple):
    """Mean and second moment of the features, which are known exactly, ``(rows, n)`` each."""

    mean: Value
    second_moment: Value


@dataclass(frozen=True)
class _Unit:
    """Units after MP-GELU and before the next layer's mask; the formulas are those of the module.

    Args:
        keep: The keep probability k.
        mean: The mean k m.
        second_moment: The second moment k q.
        residual: The variance k q (1 - k + n / g^2) of the unit's own mask, plus that of random weights before it.
        variance: Variance of the masked unit over g^2.
    """

    keep: Value
    mean: Value
    second_moment: Value
    residual: Value
    variance: Value

    @staticmethod
    def of(mean: Value, twice: Value, layer: Layer, added: Value | None = None) -> _Unit:
        """Units from the mean and twice the variance before MP-GELU, and the part of it due to random weights."""
        erf = (mean / twice.sqrt()).op("Erf")  # 2 k - 1
        keep = erf.op("HardSigmoid", alpha=0.5, beta=0.5)  # the fastest way to an affine function
        half = erf.op("HardSigmoid", alpha=0.25, beta=0.25)
        ratio = _mask_ratio(layer)
        dropped = (1.0 - keep) + ratio if np.any((ratio > 0) & (ratio < _SMALL_RATE)) else (1 + ratio) - keep
        after = keep * mean
        product = after * mean
        second_moment = product + half * twice
        residual = _plus(second_moment * dropped, None if added is None else keep * half * added)
        variance = product * dropped + keep * (0.5 + ratio / 2) * twice
        return _Unit(keep, after, second_moment, residual, variance)


class _Sources(NamedTuple):
    """Independent sources of noise that arise in the same layer.

    Args:
        size: Number of sources.
        factor: Derivative of every unit by each source, times sqrt(2), ``(M, rows or 1, size, units)``.
        variances: Variances of the sources, ``(M, rows, 1, size)``.
    """

    size: int
    factor: Value | Array
    variances: Value

    @staticmethod
    def new(weight: Array, variances: Value) -> _Sources:
        """Sources at the input of a linear layer with these weights, ``(M, before, after)``."""
        return _Sources(weight.shape[1], np.sqrt(2) * (weight[0] if len(weight) == 1 else weight[:, None]), variances)

    def through(self, keep: Value, layer: Layer) -> _Sources:
        """The same sources after MP-GELU with gains ``(M, rows, 1, units)`` and then the layer."""
        kept, networks = keep * self.factor, _networks(layer.weight)
        if not networks:
            return self._replace(factor=kept @ layer.mean_weight[0])
        factor = kept.reshape(*networks, -1, layer.before) @ layer.mean_weight  # few products of large matrices
        return self._replace(factor=factor.reshape(*networks, -1, self.size, layer.after))

    def twice(self, layer: Layer) -> Value:
        """Twice the variance of each unit after the layer that is due to these sources."""
        assert isinstance(self.factor, Value)
        given = self.variances @ self.factor.square()  # (M, rows, 1, units)
        return given.reshape(*_networks(layer.weight), -1, layer.after)


def _first(inputs: _Inputs, layer: Layer) -> tuple[Value, Value, Value | None]:
    """Mean and twice the variance of the first layer's units, and the part of the latter due to random weights."""
    mean = _from_features(inputs.mean, layer.mean_weight, layer.bias)
    variance, added = layer.noise_weight**2, None
    if layer.weight_variance is not None:
        variance = variance + layer.second_moment_weight
        added = _from_features(inputs.second_moment, 2 * layer.second_moment_weight, 2 * layer.bias_variance)
    return mean, _from_features(inputs.second_moment, 2 * variance, 2 * layer.bias_variance + 2 * _NO_VARIANCE), added


def _from_weights(unit: _Unit, layer: Layer) -> Value | None:
    """Twice the variance of the next layer's units due to random weights; ``None`` if the weights are known."""
    if layer.weight_variance is None:
        return None
    return _affine(unit.second_moment, 2 * layer.second_moment_weight, 2 * layer.bias_variance)


def _twice(fluctuation: Value, layer: Layer, terms: Sequence[Value | None]) -> Value:
    """Twice the variance after a layer: the part of independent fluctuations before it, plus further terms.

    Where the mask adds no noise, a tiny variance keeps the division m / s defined. Where it adds noise, a unit without
    variance has all inputs zero, so its mean is its bias, which :func:`_nonzero` keeps from being zero.
    """
    more: list[Value | float] = [term for term in terms if term is not None]
    if not layer.noise.all():
        more.insert(0, 2 * _NO_VARIANCE)
    twice = _affine(fluctuation, 2 * layer.mean_weight**2, more[0] if more else None)
    for term in more[1:]:
        twice = twice + term
    return twice


def _nonzero(bias: Array) -> Array:
    """The bias with zeros replaced by a tiny number, so that m / s is not 0 / 0; see :func:`_twice`."""
    return np.where(np.abs(bias) < _TINY, _TINY, bias)


def _to_sources(x: Value, units: Sequence[_Unit], layers: Sequence[Layer]) -> list[tuple[Value, int]]:
    """Derivatives of the outputs by the sources of noise times their standard deviations, and the number of sources.

    Each array is ``(outputs, M, rows, sources)``. The residuals of the last units are not among them: they act on the
    outputs directly.
    """
    found = []
    weight = layers[-1].mean_weight * OF_FLUCTUATIONS[: layers[-1].after]
    backward = units[-1].keep * _by_output(weight)  # (outputs, M, rows, units)
    for unit, layer in zip(units[-2::-1], layers[-2:0:-1], strict=True):
        backward = backward @ _single(layer.mean_weight.swapaxes(1, 2))
        found.append((backward * unit.residual.sqrt(), layer.before))
        backward = backward * unit.keep
    if layers[0].noise.any():
        found.append((backward @ _single(layers[0].noise_weight.swapaxes(1, 2)) * x, layers[0].before))
    return found


def _outputs(
    unit: _Unit | _Inputs,
    fluctuation: Value,
    last: Layer,
    weight: Array,
    sources: Sequence[tuple[Value, int]] = (),
    cross: bool = False,
) -> Outputs:
    """Moments of the outputs after the last layer.

    Args:
        unit: Units before the layer.
        fluctuation: Variances of the independent fluctuations before the layer.
        last: The layer.
        weight: Weights from these fluctuations to the outputs.
        sources: Contributions of all other sources, from ``_to_sources``.
        cross: Whether the covariance of two outputs is wanted.
    """
    correlated = cross and last.after == 2
    first, second = PAIRS if correlated else ([*range(last.after)], [*range(last.after)])
    scale = OF_FLUCTUATIONS[: last.after]
    weight = weight * scale
    variance: Value | None = None
    if sources:
        values, sizes = zip(*sources, strict=True)
        joined = values[0].op("Concat", *values[1:], axis=-1) if len(values) > 1 else values[0]
        products = joined.take(first) * joined.take(second) if correlated else joined.square()
        variance = _sum(products, sum(sizes))
    variance = _to_outputs(fluctuation, weight[..., first] * weight[..., second], variance)
    if last.weight_variance is not None:
        apart = (scale**2)[first] * np.equal(first, second)
        added = last.second_moment_weight[..., first] * apart, last.bias_variance[..., first] * apart
        variance = variance + _to_outputs(unit.second_moment, *added)
    mean = _to_outputs(unit.mean, last.mean_weight[..., first], last.bias[..., first])
    return Outputs(mean, variance, correlated)


def _from_features(x: Value, weight: Array, bias: Array) -> Value:
    """An affine function of features ``(rows, n)`` for all networks: one product of matrices."""
    count, before, after = weight.shape
    if count == 1:
        return _affine(x, weight, bias)
    flat = x.op("Gemm", weight.swapaxes(0, 1).reshape(before, -1), bias.ravel())
    return flat.reshape(-1, count, after).op("Transpose", perm=[1, 0, 2])


def _affine(value: Value, weight: Array, bias: Array | Value | float | None) -> Value:
    """``value @ weight + bias``, as one node for one network."""
    if len(weight) > 1:
        return _plus(value @ weight, bias)
    if isinstance(bias, np.ndarray | float):
        bias = value.graph.constant(np.broadcast_to(bias, (1, 1, weight.shape[-1]))[0, 0])
    return value.op("Gemm", weight[0], *([] if bias is None else [bias]))


def _to_outputs(value: Value, weight: Array, bias: Array | Value | None = None) -> Value:
    """``value @ weight + bias`` with outputs first and rows last, ``(outputs, M, rows)``."""
    if isinstance(bias, np.ndarray):
        bias = value.graph.constant(bias[0].T if len(weight) == 1 else bias.transpose(2, 0, 1))
    if len(weight) > 1:
        return _plus(_sum(value * _by_output(weight), weight.shape[1]), bias)
    return value.graph.op("Gemm", weight[0].T, value, *([] if bias is None else [bias]), transB=1)


def _by_output(weight: Array) -> Array:
    """Weights in the shape ``(outputs, M, 1, units)``, which broadcasts against values."""
    return weight[0].T[:, None] if len(weight) == 1 else weight.transpose(2, 0, 1)[:, :, None]


def _single(weight: Array) -> Array:
    """The weights without the dimension M if it is 1."""
    return weight[0] if len(weight) == 1 else weight


def _row_wise(value: Value, layer: Layer) -> Value:
    """Values before a layer with room for sources: ``(M, rows, 1, units)``."""
    return value.reshape(*_networks(layer.weight), -1, 1, layer.before)


def _networks(weight: Array) -> tuple[int, ...]:
    """The dimension M of values, ``(M,)``, or ``()`` for one network."""
    return weight.shape[:1] if len(weight) > 1 else ()


def _mask_ratio(layer: Layer) -> Array:
    """Variance of the mask over its squared mean: ``(M, 1, 1)``, or one number if it is the same for all networks."""
    ratio = layer.noise / layer.gain**2
    return ratio[0, 0, 0, ...] if np.ptp(ratio) == 0 else ratio


def _sum(value: Value, size: int) -> Value:
    """Sum over the last dimension by a matrix product, because onnxruntime does not reduce arrays without rows."""
    return (value @ np.ones((size, 1))).op("Squeeze", [-1])


def _plus(value: Value, more: Value | Array | float | None) -> Value:
    """Return the sum with an optional second term."""
    return value if more is None else value + more
