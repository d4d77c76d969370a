"""From the moments of the networks' outputs to the predictive distribution, in ONNX nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from mpgelu.export.graph import Graph, Value
from mpgelu.export.perceptron import Outputs
from mpgelu.predictive import _normal_nodes

Array = NDArray[np.float64]
_TINY = 1e-30  # below every standard deviation that float32 tells from zero
_CLOSE = 1e-5  # error of the distribution function after which one more Newton step is exact to rounding
_MOST_STEPS = 40


class Distribution(NamedTuple):
    """Summary of the predictive distribution, each ``(rows,)``, and its quantiles ``(rows, levels)``."""

    mean: Value
    stddev: Value
    epistemic: Value
    aleatoric: Value
    quantiles: Value | None


def distribution(
    outputs: Outputs, weights: Array, noise_variance: float | None, levels: Sequence[float], nodes: int
) -> Distribution:
    """The mixture of M networks.

    Args:
        outputs: moments of the networks' outputs.
        weights: of the networks, ``(M,)``, summing to one.
        noise_variance: of the targets; ``None`` if the second output is its logarithm.
        levels: probabilities of the quantiles.
        nodes: components of each network's mixture over the noise.
    """
    means, epistemics = outputs.mean.take(0), outputs.variance.take(0)  # (M, rows), or (rows,) for one network
    if noise_variance is None:
        log_noise, spread = outputs.mean.take(1), outputs.variance.take(1)
        aleatorics = (spread * 0.5 + log_noise).exp()
    else:
        aleatorics = means.graph.op("Expand", noise_variance, means.op("Shape"))

    def average(value: Value) -> Value:
        return value if len(weights) == 1 else (value * weights[:, None]).sum(0)

    mean, aleatoric = average(means), average(aleatorics)
    epistemic = epistemics if len(weights) == 1 else average((means - mean).square() + epistemics)
    stddev = (epistemic + aleatoric).sqrt()
    if not levels:
        return Distribution(mean, stddev, epistemic, aleatoric, None)
    quantiles = mean + stddev * ndtri(levels)[:, None, None]  # of a Gaussian, (levels, 1, rows)
    if noise_variance is None:
        z, log_weights = (part.numpy() for part in _normal_nodes(nodes, torch.zeros((), dtype=torch.float64)))
        components = _over_noise(means, log_noise, epistemics, outputs.covariance, spread, z, len(weights))
        quantiles = _quantiles(*components, np.outer(np.exp(log_weights), weights).ravel(), quantiles, levels)
    elif len(weights) > 1:
        quantiles = _quantiles(means, (epistemics + aleatorics).sqrt(), weights, quantiles, levels)
    by_row = quantiles.op("Reshape", [len(levels), -1]).op("Transpose", perm=[1, 0])
    return Distribution(mean, stddev, epistemic, aleatoric, by_row)


def _over_noise(
    means: Value, log_noise: Value, epistemic: Value, covariance: Value | None, spread: Value, nodes: Array, count: int
) -> tuple[Value, Value]:
    """Means and standard deviations of the components, ``(components, rows)``; see ``Predictive.heteroscedastic``."""
    z = nodes.reshape(-1, 1) if count == 1 else nodes.reshape(-1, 1, 1)
    deviation = spread.sqrt()
    centers, conditional = means, epistemic
    if covariance is not None:
        slope = covariance / (deviation + _TINY)
        centers, conditional = slope * z + means, (epistemic - slope.square()).op("Max", 0.0)
    deviations = ((deviation * z + log_noise).exp() + conditional).sqrt()
    if count > 1:
        flat = [len(nodes) * count, -1]
        centers = (centers if covariance is not None else centers + 0 * z).op("Reshape", flat)
        deviations = deviations.op("Reshape", flat)
    return centers, deviations


def _quantiles(means: Value, stddevs: Value, weights: Array, start: Value, levels: Sequence[float]) -> Value:
    """Newton steps kept between bounds that close in, until the distribution function is right everywhere.

    The root lies between the smallest and the largest quantile of the components.

    Args:
        means: of the components, ``(components, rows)``.
        stddevs: of the components, ``(components, rows)``.
        weights: ``(components,)``.
        start: first guess, ``(levels, 1, rows)``.
        levels: probabilities.
    """
    bounds = stddevs * ndtri(levels)[:, None, None] + means  # (levels, components, rows)
    lower, upper = (bounds.op(kind, [1], keepdims=1) for kind in ("ReduceMin", "ReduceMax"))
    start = start.op("Min", upper).op("Max", lower)
    precision = means.graph.op("Div", np.sqrt(0.5), stddevs)
    excess_at_zero = (0.5 - np.asarray(levels))[:, None, None]

    def step(graph: Graph, values: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        y, lower, upper = values
        ratio = (y - means) * precision
        excess = graph.op("MatMul", weights[None] / 2, ratio.op("Erf")) + excess_at_zero
        bells = (ratio * ratio).op("Neg").exp() * precision
        density = graph.op("MatMul", weights[None] / np.sqrt(np.pi), bells)
        below = excess.op("Less", 0.0)
        lower, upper = below.op("Where", y, lower), below.op("Where", upper, y)
        newton = y - excess / density.op("Max", _TINY)
        inside = newton.op("LessOrEqual", upper).op("And", newton.op("GreaterOrEqual", lower))
        following = inside.op("Where", newton, (lower + upper) * 0.5)
        error = excess.op("Abs").op("ReduceMax", keepdims=0)
        return error.op("LessOrEqual", _CLOSE).op("Not"), (following, lower, upper)  # goes on while it is NaN

    return means.graph.loop(step, _MOST_STEPS, (start, lower, upper))[0]
