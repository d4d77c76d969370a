"""What tests compare with, in numpy and scipy, and the moments and rules that the contract tests run over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.special import expit, ndtr
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments import Block, Moments
from mpgelu.rules import (
    add,
    batch_norm,
    concatenate,
    dropout,
    elementwise,
    flatten,
    fork,
    gaussian_linear,
    layer_norm,
    leaky_relu,
    linear,
    mpgelu,
    multiply,
    periodic,
    relu,
    scale,
    subtract_from,
)
from mpgelu.rules.activations import GELU, Rectifier, Sigmoid, SiLU, SmoothLimit, Softplus, Tanh
from mpgelu.rules.elementwise import Activation

Array = NDArray[np.float64]
Dense = tuple[Array, Array]  # mean (n,) and covariance (n, n) of one row
TYPES = [DiagonalMoments, FullMoments, FactoredMoments]
RATE, SLOPE = 0.3, 0.2
FUNCTIONS: dict[Activation, Callable[[Any], Any]] = {  # in numpy
    Tanh(): np.tanh,
    Sigmoid(): expit,
    SiLU(): lambda x: x * expit(x),
    Softplus(1.5): lambda x: np.logaddexp(0, 1.5 * x) / 1.5,
    GELU(): lambda x: x * ndtr(x),
    SmoothLimit(2.5): lambda x: x / np.hypot(1, x / 2.5),
    Rectifier(SLOPE): lambda x: np.where(x > 0, x, SLOPE * x),
}

# Dense algebra, one row at a time


def linear_reference(m: Array, c: Array, weight: Array, bias: Array) -> Dense:
    return weight @ m + bias, weight @ c @ weight.T


def gaussian_linear_reference(m: Array, c: Array, weight: Array, v: Array, bias: Array, vb: Array) -> Dense:
    mean, covariance = linear_reference(m, c, weight, bias)
    return mean, covariance + np.diag(v @ (m**2 + np.diag(c)) + vb)


def multiply_reference(m: Array, c: Array, gain: Array, noise: Array) -> Dense:
    return gain * m, np.outer(gain, gain) * c + np.diag(noise * (np.diag(c) + m**2))


def dropout_reference(m: Array, c: Array, rate: float, rescale: bool) -> Dense:
    keep, ones = 1 - rate, np.ones_like(m)
    scale = 1 / keep if rescale else 1.0
    return multiply_reference(m, c, scale * keep * ones, scale**2 * keep * rate * ones)


def mpgelu_reference(m: Array, c: Array) -> Dense:
    keep = ndtr(m / np.sqrt(np.diag(c)))
    return multiply_reference(m, c, keep, keep * (1 - keep))


def relu_reference(m: Array, c: Array) -> Dense:
    s = np.sqrt(np.diag(c))
    marginals = [relu_marginal(*pair) for pair in zip(m / s, s, strict=True)]
    covariance = np.diag([variance for _, variance in marginals])
    for i, j in itertools.combinations(range(len(m)), 2):
        pair = s[i] * s[j] * relu_pair(m[i] / s[i], m[j] / s[j], c[i, j] / (s[i] * s[j]))
        covariance[i, j] = covariance[j, i] = pair
    return np.array([mean for mean, _ in marginals]), covariance


def scale_reference(m: Array, c: Array, gain: Array) -> Dense:
    return gain * m, np.outer(gain, gain) * c


def batch_norm_reference(m: Array, c: Array, mean: Array, variance: Array, weight: Array, bias: Array) -> Dense:
    matrix = np.diag(weight / np.sqrt(variance + 1e-5))
    return linear_reference(m - mean, c, matrix, bias)


def layer_norm_reference(m: Array, c: Array, weight: Array, bias: Array) -> Dense:
    """The documented linearisation, by matrices."""
    n = len(m)
    centring = np.eye(n) - 1 / n
    mu = centring @ m
    q = mu @ mu / n + np.trace(centring @ c @ centring) / n + 1e-5
    jacobian = np.diag(weight / np.sqrt(q)) @ (centring - np.outer(mu, mu) / (n * q))
    return weight * mu / np.sqrt(q) + bias, jacobian @ c @ jacobian.T


def elementwise_reference(function: Callable[[Any], Any]) -> Callable[[Array, Array], Dense]:
    """Means and variances of f by adaptive quadrature; covariances by the gain E[f(h) (h - m)] / v."""

    def reference(m: Array, c: Array) -> Dense:
        marginals = np.array([function_marginal(function, *pair) for pair in zip(m, np.diag(c), strict=True)])
        covariance = np.outer(marginals[:, 2], marginals[:, 2]) * c
        np.fill_diagonal(covariance, marginals[:, 1])
        return marginals[:, 0], covariance

    return reference


def leaky_relu_reference(m: Array, c: Array, slope: float) -> Dense:
    mean, rectified = relu_reference(m, c)
    positive = ndtr(m / np.sqrt(np.diag(c)))
    cross = c * positive  # Cov(h_i, relu(h_j))
    bend = 1 - slope
    return slope * m + bend * mean, slope**2 * c + slope * bend * (cross + cross.T) + bend**2 * rectified


def periodic_reference(m: Array, c: Array, frequency: Array, phase: Array, weight: Array) -> Dense:
    """Every pair of features by the trapezoidal rule in the plane, which converges exponentially for such functions."""
    step = np.arange(-9, 9.001, 0.1)
    points, density = product_rule((step, _pdf(step)), (step, _pdf(step)))
    weights = density / density.sum()
    n, (_, _, d) = len(m), weight.shape
    mean, covariance = np.empty((n, 1 + d)), np.empty((n, 1 + d, n, 1 + d))
    for i, j in itertools.combinations_with_replacement(range(n), 2):
        first = math.sqrt(c[i, i])
        slope = c[i, j] / first if first else 0.0
        second = math.sqrt(max(c[j, j] - slope**2, 0)) if i != j else 0.0
        x = np.stack([m[i] + first * points[:, 0], m[j] + slope * points[:, 0] + second * points[:, 1]], 1)
        cosines = np.cos(2 * np.pi * (x[..., None] * frequency[[i, j]] + phase[[i, j]]))
        values = np.concatenate([x[..., None], np.einsum("pnk,nkd->pnd", cosines, weight[[i, j]])], -1)
        both, pair = weighted_moments(values.reshape(len(x), -1), weights)
        mean[[i, j]] = both.reshape(2, 1 + d)
        covariance[i, :, j] = pair[: 1 + d, 1 + d :]
        covariance[j, :, i] = pair[: 1 + d, 1 + d :].T
    return mean.ravel(), covariance.reshape(n * (1 + d), n * (1 + d))


# Quadrature


def function_marginal(function: Callable[[Any], Any], mean: float, variance: float) -> tuple[float, float, float]:
    """Mean, variance and gain of f(h), h ~ N(mean, variance), by adaptive quadrature on both sides of the kink at 0."""
    s = math.sqrt(variance)
    bends = (np.array([-40, -10, -4, -1, 0, 1, 4, 10, 40]) - mean) / s
    ends = np.unique(np.clip([-14, -8, -4, -1, 1, 4, 8, 14, *bends], -14, 14))

    def expectation(g: Callable[[float], float]) -> float:
        pieces = itertools.pairwise(ends)
        return sum(float(quad(lambda z: g(z) * _pdf(z), *ab, epsabs=1e-14, epsrel=1e-12)[0]) for ab in pieces)

    first = expectation(lambda z: function(mean + s * z))
    second = expectation(lambda z: (function(mean + s * z) - first) ** 2)
    return first, second, expectation(lambda z: z * (function(mean + s * z) - first)) / s


def product_rule(*axes: tuple[Array, Array]) -> tuple[Array, Array]:
    """Points (count, axes) and weights of independent one-dimensional rules."""
    points = np.array(list(itertools.product(*[nodes for nodes, _ in axes])))
    weights = np.array([math.prod(w) for w in itertools.product(*[weights for _, weights in axes])])
    return points, weights


def normal_rule(count: int = 5) -> tuple[Array, Array]:
    """Gauss-Hermite nodes and weights of a standard normal: exact for polynomials below degree 2 count."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


def bernoulli_rule(keep: float, scale: float = 1.0) -> tuple[Array, Array]:
    return np.array([0.0, scale]), np.array([1 - keep, keep])


def weighted_moments(values: Array, weights: Array) -> Dense:
    mean = weights @ values
    return mean, (values - mean).T @ (weights[:, None] * (values - mean))


def relu_marginal(a: float, s: float = 1.0) -> tuple[float, float]:
    """Mean and variance of ReLU of N(a s, s^2), by adaptive quadrature of integrands that are never negative."""
    if a < 0:  # with exp(-a^2 / 2) taken out, which keeps the relative accuracy of a far tail
        scale = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
        first = scale * _integral(lambda x: x * math.exp(a * x - x * x / 2), 0, 12)
        second = scale * _integral(lambda x: x * x * math.exp(a * x - x * x / 2), 0, 12)
        return s * first, s * s * (second - first * first)
    mean = _integral(lambda z: (z + a) * _pdf(z), -a, 0) + _integral(lambda z: (z + a) * _pdf(z), 0, 12)
    spread = sum(_integral(lambda z: (z + a - mean) ** 2 * _pdf(z), *ends) for ends in ((max(-a, -12), 0), (0, 12)))
    return s * mean, s * s * (spread + mean * mean * float(ndtr(-a)))


def relu_pair(a1: float, a2: float, rho: float) -> float:
    """Covariance of (z1 + a1)+ and (z2 + a2)+: the second is known in closed form given z1, whose integral is left."""
    left, kink = math.sqrt(max(1 - rho * rho, 0)), -a2 / rho if rho else 0.0
    steps = [kink + side * width * left for side in (-1, 1) for width in (0, 2, 8)]
    ends = np.unique(np.clip([-a1, -a1 + 3, *steps, -6, -3, 0, 3, 12], max(-a1, -12), 12))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    half = np.diff(ends)[:, None] / 2
    z = (ends[:-1, None] + half * (nodes + 1)).ravel()
    given = a2 + rho * z
    if left > 0:
        given = given * ndtr(given / left) + left * _pdf(given / left)
    product = (half * weights).ravel() @ ((z + a1) * np.maximum(given, 0) * _pdf(z))
    return float(product) - relu_marginal(a1)[0] * relu_marginal(a2)[0]


def _pdf(z: Any) -> Any:
    return np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _integral(function: Callable[[float], float], low: float, high: float) -> float:
    return float(quad(function, low, high, epsabs=0, epsrel=1e-12, limit=200)[0])


# Moments to run over


def random_covariance(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Covariances (*shape, shape[-1]) well away from singular."""
    n = shape[-1]
    root = torch.randn(*shape, n, dtype=dtype)
    return root @ root.mT / n + 0.1 * torch.eye(n, dtype=dtype)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _uniform(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def _uncertain(kind: Any) -> Callable[..., Moments]:
    def build(*shape: int) -> Moments:
        moments: Moments = kind.of(_normal(*shape), random_covariance(*shape))
        return moments

    return build


def _independent(*shape: int) -> Moments:
    return FactoredMoments.of(_normal(*shape), _uniform(*shape) + 0.1)


def _shared(*shape: int) -> Moments:
    *batch, n = shape
    block = Block(_normal(3, n), _uniform(*batch, 3))
    return FactoredMoments(_normal(*shape), (block,), _uniform(*shape))


def _scaled(*shape: int) -> Moments:
    *batch, n = shape
    shared = Block(_normal(3, n), _uniform(*batch, 3), _uniform(*shape))
    per_row = Block(_normal(*batch, 2, n), _uniform(*batch, 2), _uniform(n))
    both = Block(_normal(*batch, 2, n), _uniform(*batch, 2), _uniform(*shape))
    return FactoredMoments(_normal(*shape), (shared, per_row, both))


# name: from a shape (*batch, n) to float64 moments; each holds its covariance in another way
MOMENTS: dict[str, Callable[..., Moments]] = {
    "diagonal": _uncertain(DiagonalMoments),
    "full": _uncertain(FullMoments),
    "factored covariance": _uncertain(FactoredMoments),
    "factored variance": _independent,
    "factored shared": _shared,
    "factored scaled": _scaled,
}


def map_tensors(moments: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same moments with every tensor replaced."""
    leaves, structure = torch.utils._pytree.tree_flatten(moments)
    return torch.utils._pytree.tree_unflatten([function(leaf) for leaf in leaves], structure)


def tensors(moments: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(moments) if isinstance(leaf, Tensor)]


def row(moments: Moments, index: tuple[int, ...]) -> Moments:
    """One row, without any batch dimension."""

    def pick(value: Tensor | None, trailing: int) -> Tensor | None:
        return value if value is None or value.dim() == trailing else value[index]

    if isinstance(moments, FactoredMoments):
        blocks = tuple(Block(pick(b.factor, 2), b.variance[index], pick(b.gain, 1)) for b in moments.blocks)  # type: ignore[arg-type]
        return FactoredMoments(moments.mean[index], blocks, pick(moments.residual, 1), moments.max_rank)
    return map_tensors(moments, lambda tensor: tensor[index])  # type: ignore[no-any-return]


# Rules to run over


@dataclass(frozen=True)
class Rule:
    """A rule, parameters for it, and what it should do to one dense row."""

    name: str
    apply: Callable[..., Any]
    reference: Callable[..., Dense]
    parameters: Callable[[int], tuple[Tensor, ...]] = lambda n: ()
    covariance_error: float = 0.0  # allowed, of the product of the two standard deviations
    marginal_error: float = 0.0  # allowed, of a mean and a variance, beyond rounding
    outputs: int | None = None


def _random(*shapes: tuple[int, ...], positive: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    drawn = [_normal(*shape) for shape in shapes]
    return tuple(value.square() + 0.1 if place in positive else value for place, value in enumerate(drawn))


def _embedding(n: int) -> tuple[Tensor, ...]:
    """Three cosines of each feature, combined into two outputs."""
    return 0.3 * _normal(n, 3), _uniform(n, 3), _normal(n, 3, 2)


RULES = [
    Rule("linear", linear, linear_reference, lambda n: _random((3, n), (3,)), outputs=3),
    Rule(
        "gaussian_linear",
        gaussian_linear,
        gaussian_linear_reference,
        lambda n: _random((3, n), (3, n), (3,), (3,), positive=(1, 3)),
        outputs=3,
    ),
    Rule(
        "dropout, rescaled",
        lambda value, rate=RATE: dropout(value, rate),
        lambda m, c: dropout_reference(m, c, RATE, True),
    ),
    Rule(
        "dropout, paper",
        lambda value, rate=RATE: dropout(value, rate, rescale=False),
        lambda m, c: dropout_reference(m, c, RATE, False),
    ),
    Rule("multiply", multiply, multiply_reference, lambda n: _random((n,), (n,), positive=(1,))),
    Rule("mpgelu", mpgelu, mpgelu_reference),
    Rule("relu, exact", relu, relu_reference, covariance_error=1e-5),
    Rule("relu, dvi", lambda value: relu(value, "dvi"), relu_reference, covariance_error=1.3e-2),
    Rule(
        "relu, leaky",
        lambda value: leaky_relu(value, SLOPE),
        lambda m, c: leaky_relu_reference(m, c, SLOPE),
        covariance_error=1e-5,
    ),
    Rule("scale", scale, scale_reference, lambda n: _random((n,))),
    Rule("add a constant", add, lambda m, c, b: (m + b, c), lambda n: _random((n,))),
    Rule("subtract from a constant", subtract_from, lambda m, c, b: (b - m, c), lambda n: _random((n,))),
    Rule("batch_norm", batch_norm, batch_norm_reference, lambda n: _random((n,), (n,), (n,), (n,), positive=(1,))),
    Rule("layer_norm", layer_norm, layer_norm_reference, lambda n: _random((n,), (n,))),
    Rule("periodic", periodic, periodic_reference, _embedding, outputs=12),
    Rule("flatten", lambda value: flatten(value, -1), lambda m, c: (m, c)),
    Rule("fork", fork, lambda m, c: (m, c)),
    Rule("concatenate one", concatenate, lambda m, c: (m, c)),
    *(
        Rule(
            f"elementwise, {type(activation).__name__}",
            lambda value, activation=activation: elementwise(value, activation),
            elementwise_reference(FUNCTIONS[activation]),
            marginal_error=1e-8,
        )
        for activation in FUNCTIONS
    ),
]
