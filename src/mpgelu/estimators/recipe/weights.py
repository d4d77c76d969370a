"""How much each kind of networks counts, and how wide their mixture is: fitted to rows they have not seen."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import softmax
from torch import Tensor

Array = NDArray[np.float64]

_EM_STEPS = 500
_LOWEST_LOG_DENSITY = -1e4  # of a row; keeps the weights finite
_LARGEST_TAIL = 0.6  # share of wide errors
_WIDTHS = 1.2, 6.0  # of wide errors, least and largest
_PRIOR_MEAN = 0.0, 0.0, -2.1, -0.75, 0.0  # of the width in unbounded numbers: 6.6 % of wide errors, 2.7 times as wide
_PRIOR_STDDEV = 2.0, 1.6, 2.0, 1.0, 0.7
_STARTS = (-2.1, -0.75, 0.0), (0.0, -0.75, 0.7), (0.0, -0.75, -0.7)  # share, width and offset


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
    """How wide the mixture of the networks is, and its shape.

    Args:
        spread: Factor c by which networks are moved towards their average.
        scale: Factor of the noise variance.
        tail_share: Share of wide errors.
        tail_width: How many times as wide they are.
        tail_offset: How far they lie to one side, see :class:`mpgelu.likelihoods.HeavyTailedGaussian`.
    """

    spread: float
    scale: float
    tail_share: float
    tail_width: float
    tail_offset: float


def background(rows: int) -> tuple[float, float]:
    """Share and variance of errors that nothing explains, in the target's scale: about one row of the table."""
    return 1 / (rows + 50), 0.1


def fit_width(means: Array, log_variance: Array, y: Array, weights: Array, row_weights: Array) -> tuple[Width, float]:
    """The width whose mixture of the kinds has the largest held-out likelihood, and the mean log density of the rows.

    The :func:`background` has its part, so that one absurd row does not decide. A weak prior, worth about one row,
    keeps five numbers from being fitted to few rows. The search starts from few wide errors, and from many to either
    side: targets that are often zero, or bounded, have such residuals.

    Args:
        means: As in :func:`mean_weights`.
        log_variance: Log-variance of the noise, from a head that has not seen the row, ``(rows,)``.
        y: Targets ``(rows,)``.
        weights: Weights of the kinds.
        row_weights: Weights of the rows, of mean one.
    """
    average = weights @ means
    errors, apart = torch.as_tensor(y - average), torch.as_tensor(means - average)
    variance, log_weights = torch.as_tensor(np.exp(np.clip(log_variance, -60, 60))), torch.as_tensor(np.log(weights))
    shares, rows = torch.as_tensor(row_weights) / len(y), len(y)

    def log_density(spread: Tensor, scale: Tensor, share: Tensor, width: Tensor, offset: Tensor) -> Tensor:
        rest, extra = background(rows)
        usual = 1 - share - rest
        e, v = errors - spread * apart, scale * variance  # (kinds, rows), (rows,)
        s = v.sqrt()
        parts = (
            usual.log() + _log_normal(e + share / usual * offset * s, v),
            share.log() + _log_normal(e - offset * s, v * width**2),
            math.log(rest) + _log_normal(e, v + extra),
        )
        return torch.logsumexp(torch.stack(parts) + log_weights[:, None], (0, 1))

    def loss(values: Array) -> tuple[float, Array]:
        with torch.enable_grad():
            p = torch.tensor(values, requires_grad=True)
            prior = 0.5 * ((p - p.new_tensor(_PRIOR_MEAN)) / p.new_tensor(_PRIOR_STDDEV)).square().sum()
            total = prior / rows - shares @ log_density(*_bounded(p))
            total.backward()  # type: ignore[no-untyped-call]
        assert p.grad is not None
        return total.item(), p.grad.numpy()

    starts = [np.array([*_PRIOR_MEAN[:2], *start]) for start in _STARTS]
    found = [minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 60}) for start in starts]
    best = _bounded(torch.tensor(min(found, key=lambda each: float(each.fun)).x))
    return Width(*map(float, best)), float(shares @ log_density(*best))


def _bounded(p: Tensor) -> tuple[Tensor, ...]:
    """Spread, scale, share, width and offset from five unbounded numbers."""
    lowest, highest = _WIDTHS
    return (
        torch.sigmoid(p[0]),
        p[1].exp(),
        _LARGEST_TAIL * torch.sigmoid(p[2]),
        lowest + (highest - lowest) * torch.sigmoid(p[3]),
        p[4],
    )


def _log_normal(error: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (torch.log(2 * math.pi * variance) + error * error / variance)


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
