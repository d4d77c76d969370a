"""From the moments of the networks' outputs to the predictive distribution, in ONNX nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri

from mpgelu.export.graph import Graph, Value
from mpgelu.export.layers import Array
from mpgelu.export.perceptron import Outputs
from mpgelu.predictive.nodes import normal_nodes

_TINY = 1e-30  # below every density and standard deviation that float32 tells from zero
_CLOSE = 1e-5  # error of the distribution function after which one more step is exact to rounding
_NEAR = 1e-3  # error after which steps need no watching
_PATIENCE = 4  # steps before they are watched
_MOST_STEPS = 60
_MARGIN = 1.001  # of bounds that hold without rounding


class Distribution(NamedTuple):
    """Summary of the predictive distribution, each ``(rows,)``.

    Args:
        mean: of the target.
        stddev: of the target.
        epistemic: variance from not knowing the function.
        aleatoric: variance of the noise.
        quantiles: minus the mean, ``(levels, rows)``.
    """

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
    aleatorics = _aleatoric(outputs, noise_variance)
    mean, epistemic = means, epistemics
    if len(weights) > 1:
        mean = _average(means, weights)
        epistemic = _average((means - mean).square() + epistemics, weights)
    aleatoric = _average(aleatorics, weights)
    stddev = (epistemic + aleatoric).sqrt()
    quantiles = _quantiles(outputs, mean, stddev, weights, noise_variance, levels, nodes) if levels else None
    return Distribution(mean, stddev, epistemic, aleatoric, quantiles)


def _aleatoric(outputs: Outputs, noise_variance: float | None) -> Value:
    """Expected variance of the noise in each network."""
    if noise_variance is None:
        return (outputs.mean + outputs.variance).take(1).exp()
    return outputs.mean.graph.op("Expand", noise_variance, outputs.mean.take(0).op("Shape"))


def _average(value: Value, weights: Array) -> Value:
    """Over the networks."""
    if len(weights) == 1:
        return value
    return value.op("ReduceMean", [0], keepdims=0) if np.ptp(weights) == 0 else (value * weights[:, None]).sum(0)


def _quantiles(
    outputs: Outputs,
    mean: Value,
    stddev: Value,
    weights: Array,
    noise_variance: float | None,
    levels: Sequence[float],
    nodes: int,
) -> Value:
    """Quantiles minus the mean, ``(levels, rows)``.

    The first guess is that of a Gaussian. With several networks a step towards the quantile of the mixture of one
    Gaussian for each makes it better. Components come last, which is fastest to sum.

    Args:
        outputs: moments of the networks' outputs.
        mean: of the mixture, ``(rows,)``.
        stddev: of the mixture, ``(rows,)``.
        weights: of the networks, ``(M,)``.
        noise_variance: of the targets; ``None`` if the second output is its logarithm.
        levels: probabilities.
        nodes: components of each network's mixture over the noise.
    """
    deviation = stddev.reshape(-1, 1, 1)
    y = deviation * ndtri(levels)[:, None, None, None]  # (levels, rows, 1, 1)
    outputs, centers = _by_row(outputs, len(weights)), None
    if len(weights) > 1:
        centers = outputs.mean.take(0) - mean.reshape(-1, 1, 1)  # (rows, M, 1)
        stddevs = (outputs.variance.take(0) + _aleatoric(outputs, noise_variance)).sqrt()
        members = _Mixture.of(centers, stddevs, weights[:, None], levels)
        y = y - members.step(y).halley if noise_variance is None else _root(members, y, deviation)
    if noise_variance is None:
        z, log_weights = (part.numpy() for part in normal_nodes(nodes, torch.zeros((), dtype=torch.float64)))
        mixture = _Mixture.of(*_over_noise(outputs, centers, z), np.outer(weights, np.exp(log_weights)), levels)
        y = _root(mixture, y, deviation)
    return y.reshape(len(levels), -1)


def _by_row(outputs: Outputs, count: int) -> Outputs:
    """Moments with rows before networks, ``(outputs, rows, M, 1)``."""

    def turned(value: Value) -> Value:
        return value.reshape(0, 0, 1, 1) if count == 1 else value.op("Transpose", perm=[0, 2, 1]).reshape(0, 0, 0, 1)

    return Outputs(turned(outputs.mean), turned(outputs.variance), outputs.correlated)


def _over_noise(outputs: Outputs, centers: Value | None, z: Array) -> tuple[Value | None, Value]:
    """Means and standard deviations of the components, ``(rows, M, nodes)``; see ``Predictive.heteroscedastic``.

    Args:
        outputs: moments of the networks' outputs, by row.
        centers: means of the networks minus that of all, ``(rows, M, 1)``; ``None`` if they are zero.
        z: nodes of the integral over the noise.
    """
    conditional, deviation = outputs.variance.take(0), outputs.variance.take(1).sqrt()
    if outputs.correlated:
        slope = outputs.variance.take(2) / (deviation + _TINY)
        conditional = (conditional - slope.square()).op("Relu")
        centers = slope * z if centers is None else slope * z + centers
    noise = (deviation * (np.sqrt(2) * z) + outputs.mean.take(1)).exp()
    return centers, (noise + conditional).sqrt()


class _Step(NamedTuple):
    """At places ``(levels, rows, 1, 1)``: excess of the distribution function, density, step of Halley."""

    excess: Value
    density: Value
    halley: Value


class _Mixture(NamedTuple):
    """A mixture of Gaussians with mean zero, whose quantiles are wanted.

    Args:
        means: of the components, ``(rows, M, nodes)``; ``None`` if they are zero.
        precisions: inverse standard deviations over the root of two, of the same shape.
        heights: of the components' densities, of the same shape.
        weights: of the components, ``(M, nodes)``.
        levels: probabilities ``(levels, 1, 1, 1)``.
    """

    means: Value | None
    precisions: Value
    heights: Value
    weights: Array
    levels: Array

    @staticmethod
    def of(means: Value | None, stddevs: Value, weights: Array, levels: Sequence[float]) -> _Mixture:
        precisions = stddevs.graph.op("Div", np.full_like(weights, np.sqrt(0.5)), stddevs)
        heights = precisions * (weights / np.sqrt(np.pi))
        return _Mixture(means, precisions, heights, weights, np.asarray(levels)[:, None, None, None])

    def excess(self, y: Value) -> Value:
        """Distribution function minus the levels."""
        return self._excess(self._ratio(y))

    def step(self, y: Value) -> _Step:
        """A step of Newton that knows the slope of the density."""
        ratio = self._ratio(y)
        excess = self._excess(ratio)
        bells = (ratio * ratio).op("Neg").exp() * self.heights
        density = bells.sum(-2, -1, keep=True).op("Max", _TINY)
        descent = (bells * (ratio * self.precisions)).sum(-2, -1, keep=True)
        return _Step(excess, density, excess / (excess / density * descent + density))

    def _ratio(self, y: Value) -> Value:
        return (y if self.means is None else y - self.means) * self.precisions

    def _excess(self, ratio: Value) -> Value:
        erf, weights = ratio.op("Erf"), self.weights / 2
        total = erf @ weights.T if len(weights) == 1 else (erf * weights).sum(-2, -1, keep=True)
        return total + (0.5 - self.levels)


def _root(mixture: _Mixture, start: Value, stddev: Value) -> Value:
    """Quantiles ``(levels, rows, 1, 1)``.

    Most times a step from a good guess and a correction are enough. If not, more follow, kept between bounds that close
    in; should it take long, bisection steps in wherever the error was not halved. The first bounds are Cantelli's,
    which hold for every distribution.

    Args:
        mixture: the distribution.
        start: first guess, ``(levels, rows, 1, 1)``.
        stddev: of the mixture, ``(rows, 1, 1)``.
    """
    odds = np.sqrt(mixture.levels / (1 - mixture.levels))
    first = mixture.step(start)
    place = start - first.halley
    excess = mixture.excess(place)

    def step(graph: Graph, count: Value, values: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        y, lower, upper, before = values
        begin, early = count.op("Equal", 0), count.op("Less", _PATIENCE)
        lower = begin.op("Where", graph.op("Mul", stddev, -_MARGIN / odds), lower)
        upper = begin.op("Where", graph.op("Mul", stddev, _MARGIN * odds), upper)
        y = y.op("Min", upper).op("Max", lower)
        found = mixture.step(y)
        below, error = found.excess.op("Less", 0.0), found.excess.op("Abs")
        lower, upper = below.op("Where", y, lower), below.op("Where", upper, y)
        following = y - found.halley
        inside = following.op("LessOrEqual", upper).op("And", following.op("GreaterOrEqual", lower))
        good = error.op("LessOrEqual", (before * 0.5).op("Max", _NEAR)).op("Or", early)
        following = inside.op("And", good).op("Where", following, (lower + upper) * 0.5)
        return _go_on(error), (following, lower, upper, error)

    y, error = place - excess / first.density, excess.op("Abs")
    return start.graph.loop(step, _MOST_STEPS, _go_on(error), (y, y, y, error))[0]


def _go_on(error: Value) -> Value:
    """While it is not small everywhere."""
    return error.op("ReduceMax", keepdims=0).op("Greater", _CLOSE)
