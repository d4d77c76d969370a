"""How much each kind of networks counts, and how wide their mixture is: fitted to rows they have not seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logsumexp, softmax
from torch import Tensor

Array = NDArray[np.float64]

_EM_STEPS = 500
_LOWEST_LOG_DENSITY = -1e4  # of a row; keeps the weights finite
_LARGEST_TAIL, _LEAST_TAIL = 0.25, 1e-12  # share of wide errors


def mean_weights(means: Array, y: Array, row_weights: Array) -> Array:
    r"""Weights on the simplex whose average of the kinds has the smallest smooth absolute error on held-out rows.

    .. math:: \min_a \sum_i c_i \sqrt{r_i^2 + \delta^2} / \delta + |a|^2, \qquad r = y - \sum_m w_m f_m, \qquad
        w = \operatorname{softmax}(a)

    The penalty is worth one row and keeps kinds that are equally good equal. The absolute error, not its square: one
    kind that fails on one row must not decide.

    Args:
        means: Means of each kind for every row, ``(kinds, rows)``, by a network that has not seen it.
        y: Targets ``(rows,)``.
        row_weights: c, ``(rows,)``, of mean one.
    """
    kinds, rows = means.shape
    delta = float(np.median(np.abs(y - means.mean(0)))) + 1e-6

    def loss(a: Array) -> tuple[float, Array]:
        w = softmax(a)
        r = y - w @ means
        q = np.sqrt(r * r + delta * delta)
        slope = -(row_weights * means * (r / q)).mean(1) / delta
        return float((row_weights * q).mean() / delta + a @ a / rows), w * (slope - w @ slope) + 2 * a / rows

    return softmax(minimize(loss, np.zeros(kinds), jac=True, method="L-BFGS-B").x) if kinds > 1 else np.ones(1)


class Width(NamedTuple):
    """How wide the mixture of the networks is.

    Args:
        spread: Factor c by which networks are moved towards their average.
        scale: Factor of the noise variance.
        tail_share: Share of wide errors.
        tail_width: How many times as wide they are.
    """

    spread: float
    scale: float
    tail_share: float
    tail_width: float

    @staticmethod
    def of(parameters: Array) -> Width:
        """From four unbounded numbers."""
        a, b, c, d = parameters
        return Width(float(expit(a)), float(np.exp(b)), _LARGEST_TAIL * float(expit(c)), 1.5 + 2.5 * float(expit(d)))


def background(rows: int) -> tuple[float, float]:
    """Share and variance of errors that nothing explains, in the target's scale: about one row of the table."""
    return 1 / (rows + 50), 0.1


def fit_width(means: Array, log_variance: Array, y: Array, weights: Array, row_weights: Array) -> tuple[Width, float]:
    """The width whose mixture of the kinds has the largest held-out likelihood, and the mean log density of the rows.

    The :func:`background` has its part, so that one absurd row does not decide.

    A weak prior, worth about one row, keeps four numbers from being fitted to few rows.

    Args:
        means: As in :func:`mean_weights`.
        log_variance: Log-variance of the noise, from a head that has not seen the row, ``(rows,)``.
        y: Targets ``(rows,)``.
        weights: Weights of the kinds.
        row_weights: Weights of the rows, of mean one.
    """
    share, extra = background(len(y))
    average, log_variance = weights @ means, np.clip(log_variance, -60, 60)

    def log_density(width: Width) -> Array:
        centers = average + width.spread * (means - average)
        variance = width.scale * np.exp(log_variance)
        parts = (
            (1 - width.tail_share - share, variance),
            (width.tail_share, variance * width.tail_width**2),
            (share, variance + extra),
        )
        found = [np.log(max(part, _LEAST_TAIL)) + _log_normal(y - centers, noise) for part, noise in parts]
        joined: Array = logsumexp(np.concatenate(found), axis=0, b=np.tile(weights, 3)[:, None])
        return joined

    def loss(p: Array) -> float:
        prior = 0.5 * (p[0] / 2) ** 2 + 0.2 * p[1] ** 2 + 0.5 * ((p[2] + 1) / 2) ** 2 + 0.5 * p[3] ** 2
        return float(-(row_weights * log_density(Width.of(p))).mean() + prior / len(y))

    start = np.array([0.0, 0.0, -1.0, 0.0])
    width = Width.of(
        minimize(loss, start, method="Nelder-Mead", options={"maxiter": 250, "xatol": 1e-2, "fatol": 1e-5}).x
    )
    return width, float((row_weights * log_density(width)).mean())


def _log_normal(error: Array, variance: Array) -> Array:
    return -0.5 * (np.log(2 * np.pi * variance) + error * error / variance)


def stacking_weights(log_densities: Tensor, row_weights: Tensor) -> tuple[Tensor, float]:
    r"""The weights :math:`w` on the simplex that maximise :math:`\sum_i c_i \log \sum_k w_k p_k(y_i)`, by EM.

    Args:
        log_densities: Log density of each row under each candidate, trained without it, ``(rows, candidates)``.
        row_weights: c, ``(rows,)``.

    Returns:
        The weights ``(candidates,)`` and the mean log density of their mixture.
    """
    logs = log_densities.double().clamp_min(_LOWEST_LOG_DENSITY)
    shares = row_weights.double() / row_weights.double().sum()
    weights = torch.full(logs.shape[1:], 1 / logs.shape[1], dtype=torch.float64)
    for _ in range(_EM_STEPS):
        weights = shares @ torch.softmax(logs + weights.log(), dim=1)
    return weights, float(shares @ torch.logsumexp(logs + weights.log(), dim=1))
