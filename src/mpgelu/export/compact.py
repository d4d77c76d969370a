"""The ONNX graph of a distilled network, with few nodes: constants are folded into the weights of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from mpgelu.export.distribution import SMALLEST, Distribution, quantiles_by_row
from mpgelu.export.graph import Value
from mpgelu.export.layers import Array
from mpgelu.layers import GaussianLinear, Linear, Periodic, Scale
from mpgelu.likelihoods import GaussianMixture
from mpgelu.likelihoods.mixture import LARGEST_LOG_VARIANCE
from mpgelu.networks import Parts
from mpgelu.networks.headed import headed_form
from mpgelu.networks.scaling import FARTHEST

# Contributions of the epistemic and the aleatoric variance to the variance, the epistemic and the aleatoric part.
_EPISTEMIC, _ALEATORIC = np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.0, 1.0])


def is_compact(parts: Parts) -> bool:
    """Return whether a model has the structure that :meth:`mpgelu.MPGELURegressor.distill` returns."""
    if not isinstance(parts.likelihood, GaussianMixture) or len(parts.networks) != 1:
        return False
    form = headed_form(parts.networks[0])
    if form is None or form.body.embedding is None or form.body.scale is None:
        return False
    return all(layer.bias is not None for layer in parts.networks[0].modules() if isinstance(layer, nn.Linear))


def distribution(x: Value, parts: Parts, levels: Sequence[float]) -> Distribution:
    """Return the mixture that a compact network predicts; exact, because its location alone is random.

    Args:
        x: Features minus their centres, ``(rows, n)``.
        parts: A model for which :func:`is_compact` is true.
        levels: Probabilities of the quantiles.
    """
    assert isinstance(parts.likelihood, GaussianMixture)
    network, count, scale = parts.networks[0], parts.likelihood.components, parts.target_scale
    assert isinstance(network, nn.Sequential)
    location, shape = network[-1].children()
    assert isinstance(location, GaussianLinear)
    assert isinstance(shape, Linear)
    limit = float(parts.scaling.limit)
    unit = limit if limit < FARTHEST else 1.0
    x = (x * (1 / (unit * parts.scaling.scale.numpy()))).op("Clip", -FARTHEST / unit, FARTHEST / unit)
    # The smooth limit is x / sqrt(1 + x^2) = sin(atan(x)).
    hidden = _hidden(x.op("Atan").op("Sin") if limit < FARTHEST else x, network, unit)
    outputs = hidden.op("Gemm", *_folded(location, shape, count, scale))
    logits, means, log_noises = x.graph.ops("Split", 3, outputs, axis=1, num_outputs=3)
    largest = LARGEST_LOG_VARIANCE + 2 * math.log(scale)
    weights, noises = logits.op("Softmax", axis=1), log_noises.op("Min", largest).exp()
    mean = (weights * means) @ np.ones((count, 1))  # onnxruntime refuses a product with a vector if there are no rows
    centers = means - mean

    epistemics = _epistemics(x, hidden, parts, location, unit)  # (rows, 3)
    variances = (weights * (centers.square() + noises)).op("Gemm", np.ones((count, 1)) * _ALEATORIC, epistemics)
    deviations = variances.sqrt()
    stddev, epistemic_std, aleatoric_std = (deviations.op("Gather", part, axis=1) for part in range(3))
    quantiles = None
    if levels:
        stddevs = (noises + epistemics.op("Gather", [1], axis=1)).op("Max", SMALLEST).sqrt()
        quantiles = quantiles_by_row(centers, stddevs, weights, count, stddev, levels)
    return Distribution(mean.reshape(-1) + parts.target_mean, stddev, epistemic_std, aleatoric_std, quantiles)


def _hidden(z: Value, network: nn.Sequential, unit: float) -> Value:
    """Return the units before the last layer, ``(rows, units)``.

    The combinations of the embedding and the scales are folded into the weights of the first linear layer.

    Args:
        z: Limited features in units of ``unit``, ``(rows, n)``.
        network: A compact network.
        unit: Unit of the features in their scales, which is folded into the weights.
    """
    embedding, scaling, first = network[0], network[1], network[2]
    assert isinstance(embedding, Periodic)
    assert isinstance(scaling, Scale)
    assert isinstance(first, Linear)
    n, frequencies, outputs = embedding.weight.shape
    into = (_array(first.weight) * _array(scaling.weight)).T.reshape(n, 1 + outputs, -1)
    angles = np.zeros((n, n, frequencies))
    angles[range(n), range(n)] = 2 * np.pi * unit * _array(embedding.frequency)
    phases = 2 * np.pi * _array(embedding.phase).ravel()
    cosines = z.op("Gemm", angles.reshape(n, -1), phases).op("Cos")
    combined = (_array(embedding.weight) @ into[:, 1:]).reshape(n * frequencies, -1)
    hidden = _silu(z.op("Gemm", unit * into[:, 0], cosines.op("Gemm", combined, _array(first.bias))))
    for layer in network[4:-1:2].children():
        assert isinstance(layer, Linear)
        hidden = _silu(hidden.op("Gemm", _array(layer.weight).T, _array(layer.bias)))
    return hidden


def _epistemics(x: Value, hidden: Value, parts: Parts, location: GaussianLinear, unit: float) -> Value:
    """Return the contributions of the epistemic variance to the variance and its two parts, ``(rows, 3)``.

    The epistemic variance is due to the random weights and to the distance from the training data, in the squared unit
    of the target; its contribution to the aleatoric part is zero.

    Args:
        x: Features before the limit in units of ``unit``, ``(rows, n)``.
        hidden: Units before the last layer, ``(rows, units)``.
        parts: The model.
        location: The layer with random weights.
        unit: Unit of the features in their scales.
    """
    scaling, reach = parts.scaling, float(parts.scaling.reach)
    variances, roots = _array(location.weight_variance)[0], hidden
    if reach:
        lower, upper, identity = scaling.lower.numpy(), scaling.upper.numpy(), np.eye(len(scaling.lower))
        beyond = x.op("Gemm", unit * np.hstack([identity, -identity]), 1 + np.hstack([-upper, lower]))  # 1 + distance
        roots = hidden.op("Concat", beyond.op("Max", 1.0).op("Log"), axis=1)
        variances = np.hstack([variances, np.full(2 * len(identity), reach**2)])
    gain, added = parts.target_scale**2 * _EPISTEMIC, _array(location.bias_variance)
    return roots.square().op("Gemm", variances[:, None] * gain, added * gain)


def _folded(location: GaussianLinear, shape: Linear, count: int, scale: float) -> tuple[Array, Array]:
    """Return weights and biases of logits, means in the unit of the target, and log-variances in its squared unit."""
    weight, bias = _array(shape.weight).copy(), _array(shape.bias).copy()
    means = slice(count, 2 * count)
    weight[means] = scale * (weight[means] + _array(location.weight))
    bias[means] = scale * (bias[means] + _array(location.bias))
    bias[2 * count :] += 2 * np.log(scale)
    return weight.T, bias


def _silu(value: Value) -> Value:
    """Return x / (1 + exp(-x))."""
    return value * value.op("Sigmoid")


def _array(tensor: Tensor | None) -> Array:
    """Return a parameter in float64; all layers of a compact network have a bias."""
    assert tensor is not None
    array: Array = tensor.detach().double().numpy()
    return array
