r"""Predictions for features with measurement errors: averages over the possible true features by quadrature.

The true features are the recorded ones x plus independent Gaussian errors of known standard deviations s. The
predictive distribution of the target is

.. math:: p(y \mid x, s) = \int p(y \mid x + s z)\, N(z;\ 0, I)\, dz \approx \sum_p w_p\, p(y \mid x + s z_p)

with the distribution :math:`p(y \mid x)` of any model. The points :math:`z_p` are fixed, so that predictions are
reproducible, and have one dimension for each feature with an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from torch import Tensor

from mpgelu.errors import InputError
from mpgelu.predictive import Predictive
from mpgelu.predictive.nodes import normal_nodes

ROWS_AT_ONCE = 64  # rows with errors whose components are in memory together
_ALONE = 128  # points for one feature; with fewer, moments are as accurate but quantiles are not
_WEIGHTED = (2, 3)  # numbers of features with weights for exact fourth moments; for more, some would be negative
_FEWEST = 512  # points for several features
_PER_FEATURE = 8  # smallest number of points per feature, for exact second moments
_ROUNDS = 3  # alternations between exact margins and exact covariance, which then have converged
_PREDICTED_AT_ONCE = 4096  # points that are predicted together

Array = NDArray[np.float64]


class ErrorPoints(NamedTuple):
    """Quadrature points for an expectation over k independent standard normal errors.

    Attributes:
        nodes: The points, ``(P, k)``, float64; the set is symmetric about zero.
        weights: Their weights, ``(P,)``, positive, summing to one.
    """

    nodes: Tensor
    weights: Tensor


class Moved(NamedTuple):
    """Some rows at all points of their errors.

    Attributes:
        rows: Numbers of the rows, ``(r,)``.
        x: Features of each row at each point, ``(r, P, n)``.
        features: Indices of the k features with an error, ``(r, k)``.
        points: The points in units of the standard deviations of the errors.
    """

    rows: Tensor
    x: Tensor
    features: Tensor
    points: ErrorPoints


@cache
def error_points(features: int) -> ErrorPoints:
    """Return fixed points with positive weights for an expectation over independent standard normal errors.

    No feature: one point, exact. One feature: the 128 nodes of :func:`mpgelu.predictive.nodes.normal_nodes`, whose
    error for smooth functions is rounding.

    Several features: a Kronecker sequence by powers of the generalised golden ratio (Roberts, 2018) and its mirror
    image, mapped to normal margins and made uncorrelated; exact for polynomials of degree 3 and for every odd function.
    Scrambled Sobol' points do as well, but need a generator of random numbers. There are 512 points, from 65 features
    on at least 8 for each (rounded up to a power of two). For two and three features their weights are those closest to
    equal ones that are exact for polynomials of degree 5; for more features they are equal, and the expectation of a
    cosine or an exponential of one radian or one e-fold per standard deviation of the error is off by 0.01 (root mean
    square over directions), a third of the error of as many random points. The variance of a random quadratic form,
    without any linear part, is then off by about 10 %.

    Args:
        features: Number k of features with an error.
    """
    if features == 0:
        return ErrorPoints(torch.from_numpy(np.zeros((1, 0))), torch.from_numpy(np.ones(1)))
    if features == 1:
        single, log_weights = normal_nodes(_ALONE, torch.zeros((), dtype=torch.float64, device="cpu"))
        return ErrorPoints(single[:, None], log_weights.exp())
    count = max(_FEWEST, 2 ** math.ceil(math.log2(_PER_FEATURE * features)))
    nodes = _kronecker(count, features)
    for _ in range(_ROUNDS):
        nodes = _with_normal_margins(_uncorrelated(nodes))
    nodes = _uncorrelated(nodes)
    weights = _matching(nodes) if features in _WEIGHTED else np.full(len(nodes), 1 / len(nodes))
    return ErrorPoints(torch.from_numpy(nodes), torch.from_numpy(weights))


def checked_errors(caller: str, input_std: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Return the standard deviation of the error of each entry of the features, ``(rows, n)``.

    Args:
        caller: Name of the function that the error message starts with.
        input_std: One number, one for each feature ``(n,)``, or one for each row and feature ``(rows, n)``.
        shape: Shape of the features, ``(rows, n)``.

    Raises:
        InputError: The argument has another shape, or a number is negative or not finite.
    """
    errors = np.asarray(input_std, dtype=np.float64)
    if errors.shape not in ((), shape[1:], shape):
        raise InputError(
            f"{caller}: input_std must be a number, one for each feature {shape[1:]} or one for each entry {shape}, "
            f"got shape {errors.shape}"
        )
    if not (np.isfinite(errors).all() and (errors >= 0).all()):
        raise InputError(f"{caller}: input_std must be finite and not negative; it is a standard deviation")
    return np.broadcast_to(errors, shape)


def moved(x: Tensor, input_std: Tensor) -> Iterator[Moved]:
    """Yield all rows at the points of their errors, in chunks of rows with the same number of uncertain features.

    The points of a row do not depend on other rows.

    Args:
        x: Recorded features, ``(rows, n)``.
        input_std: Standard deviation of the error of each entry, ``(rows, n)``; zero for exact features.
    """
    uncertain = input_std > 0
    counts = uncertain.sum(-1)
    for count in sorted(set(counts.tolist())):
        points = error_points(count)
        size = max(1, _PREDICTED_AT_ONCE // len(points.weights))
        for rows in torch.split(torch.nonzero(counts == count).flatten(), size):
            features = torch.nonzero(uncertain[rows])[:, 1].reshape(len(rows), count)
            errors = input_std[rows].gather(1, features)[:, None] * points.nodes.to(x)  # (r, P, k)
            places = features[:, None].expand(errors.shape)
            repeated = x[rows][:, None].expand(-1, len(points.weights), -1)
            yield Moved(rows, repeated.scatter_add(2, places, errors), features, points)


def averaged(
    exact: Callable[[Tensor], Predictive], short: Callable[[Tensor], Predictive], x: Tensor, input_std: Tensor
) -> Predictive:
    r"""Return the distribution of the target if the true features are x plus Gaussian errors.

    .. math:: \text{mean} = \sum_p w_p \mu_p, \qquad \text{aleatoric} = \sum_p w_p a_p, \qquad
        \text{epistemic} = \sum_p w_p \big(e_p + (\mu_p - \text{mean})^2\big)

    with mean :math:`\mu_p`, epistemic variance :math:`e_p` and aleatoric variance :math:`a_p` at point p of
    :func:`error_points`. The contribution of the errors is epistemic, because better measurements would remove it.

    Args:
        exact: Function from known features ``(rows, n)`` to their distributions; used for rows without errors.
        short: The same with few components, of which the mixture over P points has P times as many.
        x: Recorded features, ``(rows, n)``.
        input_std: Standard deviation of the error of each entry, ``(rows, n)``; zero for exact features.
    """
    parts: list[tuple[Tensor, Predictive]] = []
    for some in moved(x, input_std):
        if some.points.nodes.shape[1] == 0:
            parts.append((some.rows, exact(some.x[:, 0])))
            continue
        at_points = _by_row(short(some.x.flatten(0, 1)), len(some.rows))  # (r, P)
        parts.append((some.rows, at_points.mixture_over(1, some.points.weights.to(x))))
    return _in_order(parts)


def main_effects(values: Tensor, points: ErrorPoints) -> Tensor:
    r"""Decompose the variance of a function of k errors into main effects and a remainder.

    The main effect of an error is the variance of the projection of the function onto the first two Hermite polynomials
    of this error, :math:`z` and :math:`z^2 - 1`. These polynomials B of all errors are made orthonormal over the points
    by the symmetric transformation :math:`B G^{-1/2}` with their Gram matrix G, which treats all errors alike. The
    remainder is due to interactions of errors and to polynomials of degree three and higher. A single error has the
    whole variance.

    Args:
        values: Values of the function at each point, ``(rows, P)``.
        points: Quadrature points in k dimensions.

    Returns:
        Non-negative variances ``(rows, k + 1)`` that add up to the variance of each row; the last is the remainder.
    """
    nodes, weights = points.nodes.to(values), points.weights.to(values)
    centred = values - (values @ weights)[:, None]
    variance = centred.square() @ weights
    count = nodes.shape[1]
    if count < 2:
        return torch.stack([variance, torch.zeros_like(variance)], 1)[:, 1 - count :]
    basis = torch.cat([nodes, nodes.square() - 1], 1)
    eigenvalues, vectors = torch.linalg.eigh(basis.mT @ (weights[:, None] * basis))
    orthonormal = basis @ (vectors * eigenvalues.rsqrt()) @ vectors.mT
    squares = (centred @ (weights[:, None] * orthonormal)).square()
    parts = squares[:, :count] + squares[:, count:]
    return torch.cat([parts, (variance - parts.sum(1)).clamp_min(0)[:, None]], 1)


def _kronecker(count: int, features: int) -> Array:
    r"""Return approximately normal points ``(count, features)``, symmetric about zero.

    The first half is :math:`\Phi^{-1}\big(\{i\, g^{-j} + \tfrac12\}\big)` for point i and feature j, with the
    fractional part in braces and with g the positive root of :math:`g^{k + 1} = g + 1` (Roberts, 2018); the second half
    is its negative.
    """
    golden = 2.0
    for _ in range(100):  # fixed-point iteration for the root
        golden = (1 + golden) ** (1 / (features + 1))
    places = np.arange(1, count // 2 + 1)[:, None] * golden ** -np.arange(1.0, features + 1)
    half = ndtri((places + 0.5) % 1)
    return np.concatenate([half, -half])


def _matching(nodes: Array) -> Array:
    """Return weights ``(P,)`` for which second and fourth moments are those of independent standard normal variables.

    Of all such weights they are those closest to equal ones, in the sense of least squares.
    """
    features, columns, exact = range(nodes.shape[1]), [np.ones(len(nodes))], [1.0]
    for degree in (2, 4):
        for chosen in itertools.combinations_with_replacement(features, degree):
            columns.append(nodes[:, chosen].prod(1))
            powers = [chosen.count(feature) for feature in features]
            exact.append(float(math.prod({0: 1, 1: 0, 2: 1, 3: 0, 4: 3}[power] for power in powers)))
    moments = np.stack(columns)
    change, *_ = np.linalg.lstsq(moments, np.array(exact) - moments.mean(1), rcond=None)
    weights: Array = 1 / len(nodes) + change
    return weights


def _uncorrelated(nodes: Array) -> Array:
    """Return points with unit covariance by the smallest change, :math:`Z C^{-1/2}`, which keeps the symmetry."""
    values, vectors = np.linalg.eigh(nodes.T @ nodes / len(nodes))
    changed: Array = nodes @ (vectors / np.sqrt(values)) @ vectors.T
    return changed


def _with_normal_margins(nodes: Array) -> Array:
    """Return points whose columns have normal scores of the same ranks, scaled to variance one."""
    scores: Array = ndtri((np.arange(len(nodes)) + 0.5) / len(nodes))
    standard: Array = scores / np.sqrt(np.mean(scores**2))
    return standard[nodes.argsort(0).argsort(0)]


def _by_row(each: Predictive, rows: int) -> Predictive:
    """Return distributions with batch shape ``(rows * P,)`` in the batch shape ``(rows, P)``."""
    values = {field.name: getattr(each, field.name) for field in fields(each)}
    own = {name: value for name, value in values.items() if name != "log_weights" or value.dim() > 1}
    return replace(each, **{name: value.unflatten(0, (rows, -1)) for name, value in own.items()})


def _in_order(parts: Sequence[tuple[Tensor, Predictive]]) -> Predictive:
    """Return the distributions of all rows in the order of their numbers.

    Rows may have different numbers of components; components of weight zero are added to those with fewer.

    Args:
        parts: Numbers of rows, and their distributions.
    """
    order = torch.cat([rows for rows, _ in parts]).argsort()
    alone = [part for _, part in parts]
    if all(torch.equal(part.log_weights, alone[0].log_weights) for part in alone):
        return Predictive.concatenate(alone)[order]
    most = max(part.means.shape[-1] for part in alone)
    padding = {"means": 0.0, "variances": 1.0, "log_weights": -math.inf}
    values: dict[str, Tensor] = {}
    for field in fields(Predictive):
        each = [getattr(part, field.name) for part in alone]
        if field.name in padding:
            wide = [value.expand_as(part.means) for value, part in zip(each, alone, strict=True)]
            each = [F.pad(value, (0, most - value.shape[-1]), value=padding[field.name]) for value in wide]
        values[field.name] = torch.cat(each)[order]
    return Predictive(**values)
