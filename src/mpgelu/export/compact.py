"""The network that distillation makes, as few nodes: constants are folded into the weights of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from mpgelu.export.distribution import Distribution, quantiles_by_row
from mpgelu.export.graph import Value
from mpgelu.export.layers import Array
from mpgelu.layers import Beside, GaussianLinear, Linear, Periodic, Scale, SiLU
from mpgelu.likelihoods import GaussianMixture
from mpgelu.networks import Parts

_FARTHEST = 1e15  # scales from the centre, whose square float32 holds
_SMALLEST = 1e-36  # variance that is none, close to the smallest normal float32


def is_compact(parts: Parts) -> bool:
    """Whether a model is one as :meth:`mpgelu.MPGELURegressor.distill` makes it."""
    if not isinstance(parts.likelihood, GaussianMixture) or len(parts.networks) != 1:
        return False
    network = parts.networks[0]
    if type(network) is not nn.Sequential or len(network) < 5 or len(network) % 2 == 0:
        return False
    kinds = [type(layer) for layer in network]
    between = [Linear, SiLU] * ((len(network) - 3) // 2)
    head = [type(part) for part in network[-1].children()]
    biases = all(layer.bias is not None for layer in network.modules() if isinstance(layer, nn.Linear))
    return kinds == [Periodic, Scale, *between, Beside] and head == [GaussianLinear, Linear] and biases


def distribution(x: Value, parts: Parts, levels: Sequence[float]) -> Distribution:
    """The mixture that a compact network predicts; its location alone is random, so everything is exact.

    Args:
        x: Features in units of their scales, before the limit, ``(rows, n)``.
        parts: A model that :func:`is_compact`.
        levels: Probabilities of the quantiles.
    """
    assert isinstance(parts.likelihood, GaussianMixture)
    network, count, scale = parts.networks[0], parts.likelihood.components, parts.target_scale
    assert isinstance(network, nn.Sequential)
    location, shape = network[-1].children()
    assert isinstance(location, GaussianLinear)
    assert isinstance(shape, Linear)
    x = x.op("Clip", -_FARTHEST, _FARTHEST)
    hidden = _hidden(x, network, float(parts.scaling.limit))
    of_bias = _extrapolation(x, parts, scale**2 * _bias(location, variance=True))
    epistemic = hidden.square().op("Gemm", scale**2 * _array(location.weight_variance).T, of_bias)  # (rows, 1)
    outputs = hidden.op("Gemm", *_folded(location, shape, count, scale))
    logits, means, log_noises = x.graph.ops("Split", 3, outputs, axis=1, num_outputs=3)
    weights, noises = logits.op("Softmax", axis=1), log_noises.exp()
    ones = np.ones((count, 1))  # a product with a vector is refused for no rows
    mean = (weights * means) @ ones
    centers = means - mean
    aleatoric = ((weights * (centers.square() + noises)) @ ones).reshape(-1)
    epistemics = epistemic.reshape(-1)
    stddev, quantiles = (epistemics + aleatoric).sqrt(), None
    if levels:
        stddevs = (noises + epistemic).op("Max", _SMALLEST).sqrt()
        quantiles = quantiles_by_row(centers, stddevs, weights, count, stddev, levels)
    mean = mean.reshape(-1) + parts.target_mean
    return Distribution(mean, stddev, epistemics.sqrt(), aleatoric.sqrt(), quantiles)


def _hidden(x: Value, network: nn.Sequential, limit: float) -> Value:
    r"""Units before the last layer: the embedding's combinations and scales are part of the first linear layer.

    The smooth limit is :math:`l x / \sqrt{l^2 + x^2}`, whose factor l is part of the weights.
    """
    embedding, scaling, first = network[0], network[1], network[2]
    assert isinstance(embedding, Periodic)
    assert isinstance(scaling, Scale)
    assert isinstance(first, Linear)
    n, frequencies, outputs = embedding.weight.shape
    limited = limit < _FARTHEST
    unit = limit if limited else 1.0
    z = x / (x.square() + limit**2).sqrt() if limited else x
    into = (_array(first.weight) * _array(scaling.weight)).T.reshape(n, 1 + outputs, -1)
    angles = np.zeros((n, n, frequencies))
    angles[range(n), range(n)] = 2 * np.pi * unit * _array(embedding.frequency)
    phases = 2 * np.pi * _array(embedding.phase).ravel()
    cosines = z.op("Gemm", angles.reshape(n, -1), phases).op("Cos")
    combined = (_array(embedding.weight) @ into[:, 1:]).reshape(n * frequencies, -1)
    hidden = _silu(z.op("Gemm", unit * into[:, 0], cosines.op("Gemm", combined, _bias(first))))
    for layer in network[4:-1:2].children():
        assert isinstance(layer, Linear)
        hidden = _silu(hidden.op("Gemm", _array(layer.weight).T, _bias(layer)))
    return hidden


def _extrapolation(x: Value, parts: Parts, added: Array) -> Value | Array:
    """Variance of rows outside the training data in the target's unit, and ``added``: ``(rows, 1)`` or ``(1,)``."""
    scaling, reach = parts.scaling, float(parts.scaling.reach) * parts.target_scale
    if not reach:
        return added
    beyond = x - (scaling.upper.numpy() - 1), (scaling.lower.numpy() + 1) - x  # plus one
    logs = x.graph.op("Max", 1.0, *beyond).op("Log")
    return logs.square().op("Gemm", np.full((len(scaling.lower), 1), reach**2), added)


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
