"""The predictive distribution in ONNX nodes, from the moments of the outputs of the networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto
from scipy.special import ndtri

from mpgelu.export.graph import Graph, Value
from mpgelu.export.layers import Array
from mpgelu.export.perceptron import Outputs
from mpgelu.predictive.nodes import normal_nodes

_TINY = 1e-30  # smaller than every density and standard deviation that matters in float32
_CLOSE = 1e-5  # error of the distribution function from which one more step is exact to rounding
_EXACT = 1e-6  # rounding error of the distribution function
_FOUND = -1.0  # stands for the error of rows that have converged
_THINNEST = 0.03  # smallest density in a step, relative to that of the Gaussian at the same level
_NEAR = 1e-3  # error below which steps converge and are not checked
_PATIENCE = 4  # iterations before steps are checked
_STEPS_BY_ROW = 2  # steps before the first test of convergence, which usually avoid the loop
_MOST_STEPS = 120  # more than bisection needs from the largest numbers to adjacent ones
_MARGIN = 1.001  # factor of the initial bounds, for rounding
_LARGEST = 3e38  # close to the largest float32
SMALLEST = 1e-36  # close to the smallest normal float32; a variance of this size is negligible
_NEIGHBOURS = 3e-7  # relative distance below which bounds are adjacent numbers
_FARTHEST = 1e4  # standardised distance beyond which a density is exactly zero


class Distribution(NamedTuple):
    """A summary of the predictive distribution, each ``(rows,)``.

    Attributes:
        mean: Mean of the target.
        stddev: Standard deviation of the target.
        epistemic_std: Standard deviation from uncertainty about the function.
        aleatoric_std: Standard deviation of the noise.
        quantiles: Quantiles minus the mean, ``(levels, rows)``; ``None`` without levels.
    """

    mean: Value
    stddev: Value
    epistemic_std: Value
    aleatoric_std: Value
    quantiles: Value | None


def distribution(
    outputs: Outputs,
    weights: Array,
    noise_variance: float | None,
    levels: Sequence[float],
    nodes: int,
    centers: Array | None = None,
) -> Distribution:
    """Return the summary of the mixture of M networks.

    Args:
        outputs: Moments of the outputs of the networks.
        weights: Weights of the networks, ``(M,)``, summing to one.
        noise_variance: Variance of the noise; ``None`` if the second output is its logarithm.
        levels: Probabilities of the quantiles.
        nodes: Number of mixture components of each network over the noise.
        centers: Matrix from the means of the mixed members to those of the networks they belong to, ``(M, M)``; the
            distance between the two counts as noise. ``None`` if they are equal.
    """
    means, epistemics = outputs.mean.take(0), outputs.variance.take(0)  # (M, rows), or (rows,) for one network
    aleatorics = _aleatoric(outputs, noise_variance)
    mean, epistemic = means, epistemics
    if len(weights) > 1:
        mean, of_networks = _average(means, weights), means
        if centers is not None:
            of_networks = means.graph.op("MatMul", centers, means)
            aleatorics = aleatorics + (means - of_networks).square()
        epistemic = _average((of_networks - mean).square() + epistemics, weights)
    aleatoric = _average(aleatorics, weights)
    stddev = (epistemic + aleatoric).sqrt()
    quantiles = _quantiles(outputs, mean, stddev, weights, noise_variance, levels, nodes) if levels else None
    return Distribution(mean, stddev, epistemic.sqrt(), aleatoric.sqrt(), quantiles)


def _aleatoric(outputs: Outputs, noise_variance: float | None) -> Value:
    """Return the expected variance of the noise of each network."""
    if noise_variance is None:
        return (outputs.mean + outputs.variance).take(1).exp()
    return outputs.mean.graph.op("Expand", noise_variance, outputs.mean.take(0).op("Shape"))


def _average(value: Value, weights: Array) -> Value:
    """Return the weighted average over the networks."""
    if len(weights) == 1:
        return value
    return value.graph.op("MatMul", weights[None], value).op("Squeeze", [0])


def _quantiles(
    outputs: Outputs,
    mean: Value,
    stddev: Value,
    weights: Array,
    noise_variance: float | None,
    levels: Sequence[float],
    nodes: int,
) -> Value:
    """Return quantiles minus the mean, ``(levels, rows)``.

    The initial guess is the quantile of a Gaussian. With several networks, one step towards the quantile of the
    mixture of one Gaussian per network improves it. Components are the last dimension, which is the fastest to sum.

    Args:
        outputs: Moments of the outputs of the networks.
        mean: Mean of the mixture, ``(rows,)``.
        stddev: Standard deviation of the mixture, ``(rows,)``.
        weights: Weights of the networks, ``(M,)``.
        noise_variance: Variance of the noise; ``None`` if the second output is its logarithm.
        levels: Probabilities of the quantiles.
        nodes: Number of mixture components of each network over the noise.
    """
    deviation = stddev.reshape(-1, 1, 1)
    y = deviation * ndtri(_levels(levels))  # (levels, rows, 1, 1)
    outputs, centers = _by_row(outputs, len(weights)), None
    if len(weights) > 1:
        centers = outputs.mean.take(0) - mean.reshape(-1, 1, 1)  # (rows, M, 1)
        noise = None if noise_variance is None else max(noise_variance, SMALLEST)
        stddevs = (outputs.variance.take(0) + _aleatoric(outputs, noise)).sqrt()
        members = _Mixture.of(centers, stddevs, weights[:, None], levels)
        y = y - members.step(y).halley if noise_variance is None else _root(members, y, deviation)
    if noise_variance is None:
        like = torch.zeros((), dtype=torch.float64, device="cpu")
        z, log_weights = (part.numpy() for part in normal_nodes(nodes, like))
        mixture = _Mixture.of(*_over_noise(outputs, centers, z), np.outer(weights, np.exp(log_weights)), levels)
        y = _root(mixture, y, deviation)
    return y.reshape(len(levels), -1)


def _by_row(outputs: Outputs, count: int) -> Outputs:
    """Return the moments with rows before networks, ``(outputs, rows, M, 1)``."""

    def turned(value: Value) -> Value:
        return value.reshape(0, 0, 1, 1) if count == 1 else value.op("Transpose", perm=[0, 2, 1]).reshape(0, 0, 0, 1)

    return Outputs(turned(outputs.mean), turned(outputs.variance), outputs.correlated)


def _over_noise(outputs: Outputs, centers: Value | None, z: Array) -> tuple[Value | None, Value]:
    """Return means and standard deviations of the components, ``(rows, M, nodes)``; see ``Predictive.heteroscedastic``.

    Args:
        outputs: Moments of the outputs of the networks, by row.
        centers: Means of the networks minus that of the mixture, ``(rows, M, 1)``; ``None`` if they are zero.
        z: Nodes of the integral over the noise.
    """
    conditional, deviation = outputs.variance.take(0), outputs.variance.take(1).sqrt()
    if outputs.correlated:
        slope = outputs.variance.take(2) / (deviation + _TINY)
        conditional = conditional - slope.square()
        centers = slope * z if centers is None else slope * z + centers
    noise = (deviation * (np.sqrt(2) * z) + outputs.mean.take(1)).exp()
    return centers, (noise + conditional.op("Max", SMALLEST)).sqrt()


class _Step(NamedTuple):
    """Excess of the distribution function over the level, density and Halley step at ``(levels, rows, 1, 1)``."""

    excess: Value
    density: Value
    halley: Value


class _Mixture(NamedTuple):
    """A mixture of Gaussians with mean zero, whose quantiles are computed.

    Sums are matrix products, which onnxruntime also evaluates correctly for zero rows.

    Attributes:
        means: Means of the K components, ``(rows, 1, K)``; ``None`` if they are zero.
        precisions: Inverse standard deviations divided by the square root of two, in the same shape.
        heights: Heights of the densities of the components, in the same shape.
        halves: Halves of the weights, ``(K, 1)`` if all rows share them, otherwise ``(rows, K, 1)``.
        ones: A vector of ones, ``(K, 1)``.
        levels: Probabilities, ``(levels, 1, 1, 1)``.
    """

    means: Value | None
    precisions: Value
    heights: Value
    halves: Array | Value
    ones: Array
    levels: Array

    @staticmethod
    def of(means: Value | None, stddevs: Value, weights: Array, levels: Sequence[float]) -> _Mixture:
        """Return the mixture of means and deviations that broadcast to ``(rows, M, nodes)`` weights ``(M, nodes)``."""
        precisions = stddevs.graph.op("Div", np.full_like(weights, np.sqrt(0.5)), stddevs)
        if len(weights) > 1:
            means = None if means is None else (means + np.zeros_like(weights)).reshape(0, 1, weights.size)
            precisions = precisions.reshape(0, 1, weights.size)
        weights = weights.reshape(-1, 1)
        heights = precisions * (weights.T / np.sqrt(np.pi))
        return _Mixture(means, precisions, heights, weights / 2, np.ones_like(weights), _levels(levels))

    @staticmethod
    def by_row(means: Value, stddevs: Value, weights: Value, count: int, levels: Sequence[float]) -> _Mixture:
        """Return the mixture of means, standard deviations and weights of ``count`` components, ``(rows, K)`` each."""
        precisions = stddevs.graph.op("Div", np.sqrt(0.5), stddevs).reshape(0, 1, count)
        heights = precisions * (weights * (1 / np.sqrt(np.pi))).reshape(0, 1, count)
        halves = (weights * 0.5).reshape(0, count, 1)
        return _Mixture(means.reshape(0, 1, count), precisions, heights, halves, np.ones((count, 1)), _levels(levels))

    def excess(self, y: Value) -> Value:
        """Return the distribution function minus the levels."""
        return self._excess(self._ratio(y))

    def step(self, y: Value, thinnest: Value | float = _TINY, far: bool = False) -> _Step:
        """Return a Halley step, Newton's method with the derivative of the density.

        Args:
            y: Points, ``(levels, rows, 1, 1)``.
            thinnest: Lower bound of the density, which bounds the step.
            far: Whether components may be so narrow that standardised distances overflow, which costs one more node.
        """
        ratio = self._ratio(y)
        if far:
            ratio = ratio.op("Clip", -_FARTHEST, _FARTHEST)
        excess = self._excess(ratio)
        bells = (ratio * ratio).op("Neg").exp() * self.heights
        density = self._sum(bells).op("Max", thinnest)
        descent = self._sum(bells * (ratio * self.precisions))
        return _Step(excess, density, excess / (excess / density * descent + density))

    def _ratio(self, y: Value) -> Value:
        return (y if self.means is None else y - self.means) * self.precisions

    def _excess(self, ratio: Value) -> Value:
        return ratio.op("Erf") @ self.halves + (0.5 - self.levels)

    def _sum(self, value: Value) -> Value:
        return value @ self.ones


def _levels(levels: Sequence[float]) -> Array:
    """Return probabilities in the shape ``(levels, 1, 1, 1)``."""
    return np.asarray(levels)[:, None, None, None]


def _density(levels: Array) -> Array:
    """Return the standard normal density at its quantiles, in the shape of the levels."""
    density: Array = np.exp(-0.5 * ndtri(levels) ** 2) / np.sqrt(2 * np.pi)
    return density


def quantiles_by_row(
    means: Value, stddevs: Value, weights: Value, count: int, stddev: Value, levels: Sequence[float]
) -> Value:
    """Return quantiles ``(levels, rows)`` of mixtures of mean zero whose weights differ between rows.

    Args:
        means: Means of the components, ``(rows, K)``.
        stddevs: Standard deviations of the components, ``(rows, K)``.
        weights: Weights of the components, ``(rows, K)``.
        count: Number K of components.
        stddev: Standard deviations of the mixtures, ``(rows,)``.
        levels: Probabilities of the quantiles.
    """
    deviation = stddev.reshape(-1, 1, 1)
    y = deviation * ndtri(_levels(levels))
    mixture = _Mixture.by_row(means, stddevs, weights, count, levels)
    thinnest = y.graph.op("Div", _THINNEST * _density(mixture.levels), deviation)
    for _ in range(_STEPS_BY_ROW):
        y = y - mixture.step(y, thinnest).halley
    return _root(mixture, y, deviation).reshape(len(levels), -1)


def _root(mixture: _Mixture, start: Value, stddev: Value) -> Value:
    """Return the quantiles, ``(levels, rows, 1, 1)``.

    Usually one step from a good guess and a correction suffice. Otherwise a loop continues with steps between bounds
    that close in; after a few iterations, rows whose error was not halved are bisected. The initial bounds are
    Cantelli's, which hold for every distribution, or the largest numbers where the variance overflows. Rows that have
    converged stay unchanged, and rows with a NaN guess start in the middle.

    Args:
        mixture: The distribution.
        start: Initial guess, ``(levels, rows, 1, 1)``.
        stddev: Standard deviation of the mixture, ``(rows, 1, 1)``.
    """
    odds = np.sqrt(mixture.levels / (1 - mixture.levels))
    usual = start.graph.op("Div", _density(mixture.levels), stddev)
    first = mixture.step(start, usual * _THINNEST)
    place = start - first.halley
    excess = mixture.excess(place)

    def step(graph: Graph, count: Value, values: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        y, lower, upper, before = values
        begin, early = count.op("Equal", 0), count.op("Less", _PATIENCE)
        found_before = before.op("LessOrEqual", begin.op("Where", _CLOSE, _FOUND))
        lower = begin.op("Where", graph.op("Mul", stddev, -_MARGIN / odds).op("Max", -_LARGEST), lower)
        upper = begin.op("Where", graph.op("Mul", stddev, _MARGIN * odds).op("Min", _LARGEST), upper)
        y = _inside(y, lower, upper).op("Where", y, _middle(lower, upper, count))
        found = mixture.step(y, far=True)
        below, error = found.excess.op("Less", 0.0), found.excess.op("Abs")
        lower, upper = below.op("Where", y, lower), below.op("Where", upper, y)
        following = y - found.halley
        good = error.op("LessOrEqual", (before * 0.5).op("Max", _NEAR)).op("Or", early)
        good = _inside(following, lower, upper).op("And", good)
        following = good.op("Where", following, _middle(lower, upper, count))
        size = lower.op("Abs").op("Max", upper.op("Abs"))
        closed = (upper - lower).op("Greater", size * _NEIGHBOURS).op("Not")  # also if a bound is NaN
        at_bound = closed.op("And", size.op("Greater", _LARGEST / 2)).op("Where", y * 4.0, y)  # the quantile overflows
        done = closed.op("Or", error.op("Max", before).op("LessOrEqual", _EXACT))  # in two iterations, not by chance
        following, error = done.op("Where", at_bound, following), done.op("Where", _FOUND, error)
        following, error = found_before.op("Where", values[0], following), found_before.op("Where", _FOUND, error)
        return _go_on(error, _FOUND), (following, lower, upper, error)

    y = place - excess / first.density
    error = excess.op("Abs") * (usual / first.density).op("Max", 1.0)  # small densities magnify it
    return start.graph.loop(step, _MOST_STEPS, _go_on(error, _CLOSE), (y, y, y, error))[0]


def _inside(y: Value, lower: Value, upper: Value) -> Value:
    """Return whether y lies between the bounds; false for NaN."""
    return y.op("LessOrEqual", upper).op("And", y.op("GreaterOrEqual", lower))


def _middle(lower: Value, upper: Value, count: Value) -> Value:
    """Return a point between bounds: in even iterations the arithmetic mean, in odd ones the geometric mean.

    The former is better for bounds of similar size, the latter for bounds of different sizes; it is zero if signs
    differ.
    """
    same = (lower.op("Sign") + upper.op("Sign")).op("Sign")
    sizes = (bound.op("Abs").op("Max", SMALLEST).sqrt() for bound in (lower, upper))
    ratio = next(sizes) * next(sizes) * same
    return count.op("Mod", 2).op("Equal", 0).op("Where", lower * 0.5 + upper * 0.5, ratio)


def _go_on(error: Value, small: float) -> Value:
    """Return whether an error is not small in some row; NaN is not small, and zero rows are."""
    large = error.op("LessOrEqual", small).op("Not").op("Cast", to=TensorProto.FLOAT)
    return large.op("ReduceSum", keepdims=0).op("Greater", 0.0)
