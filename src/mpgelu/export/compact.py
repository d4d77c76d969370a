"""The network that distillation makes, as few nodes: constants folded into the weights of its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from mpgelu.export.graph import Value
from mpgelu.export.layers import Array
from mpgelu.layers import Beside, GaussianLinear, Linear, Periodic, Scale, SiLU


class Components(NamedTuple):
    """A mixture of K Gaussians in the graph, in the target's unit.

    Args:
        weights: Of the components, ``(rows, K)``.
        centers: Means minus the mean of the mixture, ``(rows, K)``.
        variances: Of the components, ``(rows, K)``.
        mean: Of the mixture without the target's own mean, ``(rows, 1)``.
        epistemic: Variance from not knowing the function, ``(rows, 1)``.
        aleatoric: Variance of the noise, ``(rows, 1)``.
    """

    weights: Value
    centers: Value
    variances: Value
    mean: Value
    epistemic: Value
    aleatoric: Value


def is_compact(network: nn.Module) -> bool:
    """Whether a network is one as :func:`mpgelu.estimators.distillation.compact_network` makes it."""
    if type(network) is not nn.Sequential or len(network) < 5 or len(network) % 2 == 0:
        return False
    kinds = [type(layer) for layer in network]
    between = [Linear, SiLU] * ((len(network) - 3) // 2)
    head = [type(part) for part in network[-1].children()]
    biases = all(layer.bias is not None for layer in network.modules() if isinstance(layer, nn.Linear))
    return kinds == [Periodic, Scale, *between, Beside] and head == [GaussianLinear, Linear] and biases


def components(z: Value, network: nn.Sequential, count: int, scale: float, extra: Value | None) -> Components:
    """The mixture that a compact network predicts; its location alone is random, so everything is exact.

    Args:
        z: Scaled features ``(rows, n)``.
        network: One that :func:`is_compact`.
        count: Number K of components.
        scale: Of the target.
        extra: Variance to add to that of the location, in the target's unit, ``(rows, 1)``; ``None`` for none.
    """
    hidden = _hidden(z, network)
    location, shape = network[-1].children()
    assert isinstance(location, GaussianLinear)
    assert isinstance(shape, Linear)
    of_weights, of_bias = _array(location.weight_variance).T, _bias(location, variance=True)
    variance = hidden.square().op("Gemm", scale**2 * of_weights, scale**2 * of_bias)
    weight, bias = _folded(location, shape, count, scale)
    logits, means, log_noises = z.graph.ops("Split", 3, hidden.op("Gemm", weight, bias), axis=1, num_outputs=3)
    weights, noises, ones = logits.op("Softmax", axis=1), log_noises.exp(), np.ones((count, 1))
    mean = (weights * means) @ ones
    centers = means - mean
    aleatoric = (weights * (centers.square() + noises)) @ ones
    epistemic = variance if extra is None else variance + extra
    return Components(weights, centers, noises + epistemic, mean, epistemic, aleatoric)


def _hidden(z: Value, network: nn.Sequential) -> Value:
    """Units before the last layer: the embedding's combinations and scales are part of the first linear layer."""
    embedding, scaling, first = network[0], network[1], network[2]
    assert isinstance(embedding, Periodic)
    assert isinstance(scaling, Scale)
    assert isinstance(first, Linear)
    n, frequencies, outputs = embedding.weight.shape
    into = (_array(first.weight) * _array(scaling.weight)).T.reshape(n, 1 + outputs, -1)
    angles = np.zeros((n, n, frequencies))
    angles[range(n), range(n)] = 2 * np.pi * _array(embedding.frequency)
    phases = 2 * np.pi * _array(embedding.phase).ravel()
    cosines = z.op("Gemm", angles.reshape(n, -1), phases).op("Cos")
    combined = (_array(embedding.weight) @ into[:, 1:]).reshape(n * frequencies, -1)
    hidden = _silu(z.op("Gemm", into[:, 0], cosines.op("Gemm", combined, _bias(first))))
    for layer in network[4:-1:2].children():
        assert isinstance(layer, Linear)
        hidden = _silu(hidden.op("Gemm", _array(layer.weight).T, _bias(layer)))
    return hidden


def _folded(location: GaussianLinear, shape: Linear, count: int, scale: float) -> tuple[Array, Array]:
    """Weights and biases of logits, means in the target's unit, and log-variances in its square."""
    weight, bias = _array(shape.weight).copy(), _bias(shape).copy()
    means = slice(count, 2 * count)
    weight[means] = scale * (weight[means] + _array(location.weight))
    bias[means] = scale * (bias[means] + _bias(location))
    bias[2 * count :] += 2 * np.log(scale)
    return weight.T, bias


def _silu(value: Value) -> Value:
    return value * value.op("Sigmoid")


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().double().numpy()
    return array


def _bias(layer: nn.Linear, variance: bool = False) -> Array:
    held = layer.bias_variance if variance and isinstance(layer, GaussianLinear) else layer.bias
    assert held is not None
    return _array(held)
