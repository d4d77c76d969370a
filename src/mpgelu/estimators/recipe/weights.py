"""Estimation of the weights of the kinds, and of spread and tails of their mixture, from held-out predictions."""

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
_LOWEST_LOG_DENSITY = -1e4  # lower bound of the log density of a row, which keeps the weights finite
_LARGEST_TAIL = 0.6  # largest share of the wide component
_WIDTHS = 1.2, 6.0  # smallest and largest relative width of the wide component
# Gaussian prior of the five unbounded parameters. Its mean is a wide component of share 6.6 % and relative width 2.7.
_PRIOR_MEAN = 0.0, 0.0, -2.1, -0.75, 0.0
_PRIOR_STDDEV = 2.0, 1.6, 2.0, 1.0, 0.7
_STARTS = (-2.1, -0.75, 0.0), (0.0, -0.75, 0.7), (0.0, -0.75, -0.7)  # initial share, width and offset


def mean_weights(means: Array, y: Array, row_weights: Array) -> Array:
    r"""Return the weights of the kinds that minimise a smooth absolute error of the averaged means.

    .. math:: \min_a \sum_i c_i \sqrt{r_i^2 + \delta^2} / \delta + |a|^2, \qquad r = y - \sum_m w_m f_m, \qquad
        w = \operatorname{softmax}(a),

    with the median absolute residual :math:`\delta` of the equally weighted average. The penalty counts as much as
    about one row, and gives equal weights to kinds that are equally good. The absolute error limits the influence of a
    single row on which one kind fails.

    Args:
        means: Means f of each kind for each row, by the network from which the row is held out, ``(kinds, rows)``.
        y: Targets, ``(rows,)``.
        row_weights: Weights c of the rows, ``(rows,)``, with mean one.

    Returns:
        The weights w, ``(kinds,)``, positive and summing to one.
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
    """Spread of the networks, and scale and tails of the noise.

    The tails are those of :class:`mpgelu.likelihoods.HeavyTailedGaussian`.

    Attributes:
        spread: Factor c of the shrinkage of the means towards their average; see :class:`Ensemble`.
        scale: Factor of the noise variance.
        tail_share: Share of the wide component of the noise.
        tail_width: Standard deviation of the wide component relative to the other.
        tail_offset: Offset of the wide component in standard deviations of the noise.
    """

    spread: float
    scale: float
    tail_share: float
    tail_width: float
    tail_offset: float


def background(rows: int) -> tuple[float, float]:
    """Return share and variance of the background component of the noise, in units of the scaled target.

    Its share is about that of one row, so that a single outlier has a bounded influence.
    """
    return 1 / (rows + 50), 0.1


def fit_width(means: Array, log_variance: Array, y: Array, weights: Array, row_weights: Array) -> tuple[Width, float]:
    r"""Return spread, scale and tails that maximise the likelihood of held-out rows, and their mean log density.

    With the average mean :math:`\mu`, the residuals :math:`e_k = y - \mu - c\, (f_k - \mu)` of the kinds, and the
    scaled noise variance :math:`s^2`, the density of a row is

    .. math:: \sum_k w_k \Big[ u\, N\big(e_k;\ -\tfrac{t}{u} o s,\ s^2\big) + t\, N\big(e_k;\ o s,\ (\omega s)^2\big)
        + b\, N\big(e_k;\ 0,\ s^2 + 0.1\big) \Big], \qquad u = 1 - t - b,

    with share t, width :math:`\omega` and offset o of the wide component, and share b of the :func:`background`. A
    Gaussian prior that counts as about one row regularises the five parameters. L-BFGS starts from a small symmetric
    wide component and from large ones with either sign of the offset, because targets that are often zero, or bounded,
    have such residuals; the best of the three local optima is returned.

    Args:
        means: Means f as in :func:`mean_weights`, ``(kinds, rows)``.
        log_variance: Log-variance of the noise by the network of the head from which the row is held out, ``(rows,)``.
        y: Targets, ``(rows,)``.
        weights: Weights w of the kinds, ``(kinds,)``.
        row_weights: Weights of the rows, with mean one, ``(rows,)``.
    """
    average = weights @ means
    arrays = y - average, means - average, np.exp(np.clip(log_variance, -60, 60)), np.log(weights)
    errors, apart, variance, log_weights = (torch.as_tensor(part, device="cpu") for part in arrays)
    shares, rows = torch.as_tensor(row_weights, device="cpu") / len(y), len(y)

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
            p = torch.tensor(values, requires_grad=True, device="cpu")
            prior = 0.5 * ((p - p.new_tensor(_PRIOR_MEAN)) / p.new_tensor(_PRIOR_STDDEV)).square().sum()
            total = prior / rows - shares @ log_density(*_bounded(p))
            total.backward()  # type: ignore[no-untyped-call]
        assert p.grad is not None
        return total.item(), p.grad.numpy()

    starts = [np.array([*_PRIOR_MEAN[:2], *start]) for start in _STARTS]
    found = [minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 60}) for start in starts]
    best = _bounded(torch.tensor(min(found, key=lambda each: float(each.fun)).x, device="cpu"))
    return Width(*map(float, best)), float(shares @ log_density(*best))


def _bounded(p: Tensor) -> tuple[Tensor, ...]:
    """Return spread, scale, share, width and offset within their bounds, from five unbounded numbers."""
    lowest, highest = _WIDTHS
    return (
        torch.sigmoid(p[0]),
        p[1].exp(),
        _LARGEST_TAIL * torch.sigmoid(p[2]),
        lowest + (highest - lowest) * torch.sigmoid(p[3]),
        p[4],
    )


def _log_normal(error: Tensor, variance: Tensor) -> Tensor:
    """Return the log density of a Gaussian with mean zero."""
    return -0.5 * (torch.log(2 * math.pi * variance) + error * error / variance)


def stacking_weights(log_densities: Tensor, row_weights: Tensor) -> tuple[Tensor, float]:
    r"""Return the weights of a mixture that maximise the log-likelihood of held-out rows, by 500 steps of EM.

    .. math:: \max_w \sum_i c_i \log \sum_k w_k\, p_k(y_i), \qquad w_k \ge 0, \quad \sum_k w_k = 1

    Args:
        log_densities: Log density of each row under each candidate that was trained without it, ``(rows, candidates)``.
        row_weights: Weights c of the rows, ``(rows,)``.

    Returns:
        The weights ``(candidates,)`` and the mean log density of their mixture.
    """
    logs = log_densities.double().clamp_min(_LOWEST_LOG_DENSITY)
    shares = row_weights.double() / row_weights.double().sum()
    weights = torch.full(logs.shape[1:], 1 / logs.shape[1], dtype=torch.float64, device="cpu")
    for _ in range(_EM_STEPS):
        weights = shares @ torch.softmax(logs + weights.log(), dim=1)
    return weights, float(shares @ torch.logsumexp(logs + weights.log(), dim=1))
