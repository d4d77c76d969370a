r"""Errors of the features: a prediction averaged over where the true features may be, without sampling.

The recorded features are the true ones plus independent errors of known standard deviation. What is asked for is

.. math:: p(y \mid x, s) = \int p(y \mid x + s z)\, N(z;\ 0, I)\, dz \approx \sum_p w_p\, p(y \mid x + s z_p)

with the model's own :math:`p(y \mid x)` under the integral, whatever the model is. The points :math:`z_p` are fixed, so
that the same question has the same answer, and lie in the space of those features only that have an error.
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

ROWS_AT_ONCE = 64  # rows with errors whose components are held at a time
_ALONE = 128  # points for one feature; fewer have the same moments, but lie so far apart that quantiles show it
_WEIGHTED = (2, 3)  # numbers of features with weights that make fourth moments exact; for more, some are negative
_FEWEST = 512  # points for several features
_PER_FEATURE = 8  # points at least, so that the second moments of the errors can be made exact
_ROUNDS = 3  # of alternating exact margins and exact covariance; more change nothing
_PREDICTED_AT_ONCE = 4096  # points

Array = NDArray[np.float64]


class ErrorPoints(NamedTuple):
    """Points that stand for k independent standard normal errors.

    Args:
        nodes: ``(P, k)``, float64; for every point its negative is another one.
        weights: ``(P,)``, positive, summing to one.
    """

    nodes: Tensor
    weights: Tensor


class Moved(NamedTuple):
    """Some rows of a table at all points of their errors.

    Args:
        rows: Their numbers, ``(r,)``.
        x: Their features at each point, ``(r, P, n)``.
        features: Which features have an error, ``(r, k)``.
        points: What the points are in units of the errors.
    """

    rows: Tensor
    x: Tensor
    features: Tensor
    points: ErrorPoints


@cache
def error_points(features: int) -> ErrorPoints:
    """Fixed points with positive weights for an expectation over independent standard normal errors.

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
        return ErrorPoints(torch.zeros(1, 0, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    if features == 1:
        single, log_weights = normal_nodes(_ALONE, torch.zeros((), dtype=torch.float64))
        return ErrorPoints(single[:, None], log_weights.exp())
    count = max(_FEWEST, 2 ** math.ceil(math.log2(_PER_FEATURE * features)))
    nodes = _kronecker(count, features)
    for _ in range(_ROUNDS):
        nodes = _with_normal_margins(_uncorrelated(nodes))
    nodes = _uncorrelated(nodes)
    weights = _matching(nodes) if features in _WEIGHTED else np.full(len(nodes), 1 / len(nodes))
    return ErrorPoints(torch.from_numpy(nodes), torch.from_numpy(weights))


def checked_errors(caller: str, input_std: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Standard deviations of the errors of each entry, of the shape of the features.

    Args:
        caller: Function to name in errors.
        input_std: One number, one for each feature, or one for each row and feature.
        shape: ``(rows, n)``.

    Raises:
        InputError: Another shape, a negative or a non-finite number.
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
    """All rows at the points of their errors, a few rows with the same number of uncertain features at a time.

    A row's points depend on the row alone.

    Args:
        x: Features ``(rows, n)``.
        input_std: Standard deviation of the error of each entry, ``(rows, n)``; zero for none.
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
    r"""Distribution of the target where the true features are x plus normal errors.

    .. math:: \text{mean} = \sum_p w_p \mu_p, \qquad \text{aleatoric} = \sum_p w_p a_p, \qquad
        \text{epistemic} = \sum_p w_p \big(e_p + (\mu_p - \text{mean})^2\big)

    with mean :math:`\mu_p`, epistemic variance :math:`e_p` and aleatoric variance :math:`a_p` at point p of
    :func:`error_points`. What the errors add is epistemic: better measurements would remove it.

    Args:
        exact: Predictive for each row of known features; used for rows without errors.
        short: The same with few components, of which the mixture has P times as many.
        x: Recorded features ``(rows, n)``.
        input_std: Standard deviation of the error of each entry, ``(rows, n)``; zero for none.
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
    r"""Split the variance of a function of k errors over them and a rest; non-negative, adding up to the variance.

    The part of an error is the variance of the projection of the function onto the first two Hermite polynomials of
    this error, which are made orthonormal over the points by the symmetric :math:`B G^{-1/2}`, so that no error comes
    first. The rest is due to errors jointly, and to bends of third and higher degree. One error has everything.

    Args:
        values: Values of the function at each point, ``(rows, P)``.
        points: Quadrature points in k dimensions.

    Returns:
        Variances ``(rows, k + 1)``, the rest last.
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
    """Normal points ``(count, features)``, the second half of which mirrors the first."""
    golden = 2.0
    for _ in range(100):  # the positive root of g^(k + 1) = g + 1
        golden = (1 + golden) ** (1 / (features + 1))
    places = np.arange(1, count // 2 + 1)[:, None] * golden ** -np.arange(1.0, features + 1)
    half = ndtri((places + 0.5) % 1)
    return np.concatenate([half, -half])


def _matching(nodes: Array) -> Array:
    """Weights for which all second and fourth moments are those of independent standard normal variables."""
    features, columns, exact = range(nodes.shape[1]), [np.ones(len(nodes))], [1.0]
    for degree in (2, 4):
        for chosen in itertools.combinations_with_replacement(features, degree):
            columns.append(nodes[:, chosen].prod(1))
            powers = [chosen.count(feature) for feature in features]
            exact.append(float(math.prod({0: 1, 1: 0, 2: 1, 3: 0, 4: 3}[power] for power in powers)))
    moments = np.stack(columns)  # of all weights that are right, those closest to equal ones
    change, *_ = np.linalg.lstsq(moments, np.array(exact) - moments.mean(1), rcond=None)
    weights: Array = 1 / len(nodes) + change
    return weights


def _uncorrelated(nodes: Array) -> Array:
    """Exact unit covariance by the smallest change, which keeps a mirrored set mirrored."""
    values, vectors = np.linalg.eigh(nodes.T @ nodes / len(nodes))
    changed: Array = nodes @ (vectors / np.sqrt(values)) @ vectors.T
    return changed


def _with_normal_margins(nodes: Array) -> Array:
    """Each column's values replaced by normal ones of the same ranks."""
    scores: Array = ndtri((np.arange(len(nodes)) + 0.5) / len(nodes))
    standard: Array = scores / np.sqrt(np.mean(scores**2))
    return standard[nodes.argsort(0).argsort(0)]


def _by_row(each: Predictive, rows: int) -> Predictive:
    """Predictives ``(rows * P,)`` as ``(rows, P)``."""
    values = {field.name: getattr(each, field.name) for field in fields(each)}
    own = {name: value for name, value in values.items() if name != "log_weights" or value.dim() > 1}
    return replace(each, **{name: value.unflatten(0, (rows, -1)) for name, value in own.items()})


def _in_order(parts: Sequence[tuple[Tensor, Predictive]]) -> Predictive:
    """One predictive of all rows, in the order of their numbers; missing components have the weight zero."""
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
