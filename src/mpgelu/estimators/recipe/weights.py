"""Weights of the networks: those that predict best the rows that each has not seen."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpgelu.estimators.recipe.folds import Folds
from mpgelu.estimators.recipe.settings import Covariance, Settings, certain
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import Moments
from mpgelu.networks import Stack

_AGREEMENT = 0.01  # nats per row by which exact moments may score below diagonal ones and still be preferred
_HELD_AT_ONCE = 256
_EM_STEPS = 500
_LOWEST_LOG_DENSITY = -1e4  # of a row; keeps the weights finite
_LEAST_WEIGHT = 0.02
_ROWS_OF_DISAGREEMENT = 1000
_LARGEST_DISAGREEMENT = 1 / 3  # share of the variance; the noise is at most halved
_HIGHEST_LOG_NOISE = 30.0


def choose(
    copies: list[Stack], folds: Folds, data: tuple[Tensor, Tensor, Tensor], settings: Settings
) -> tuple[Covariance, Stacking]:
    """Weights of rates and copies, and how to propagate: exactly, unless it predicts the held-out rows worse."""
    X, y, row_weights = data
    kinds: tuple[Covariance, ...] = ("exact", "diagonal") if settings.covariance == "auto" else (settings.covariance,)
    found: dict[Covariance, Stacking] = {}
    for kind in kinds:
        densities = [log_densities(copy, folds, X, y, kind) for copy in copies]
        found[kind] = stacking_weights(*_out_of_fold(densities, folds, row_weights, len(settings.rates)))
    chosen = max(found, key=lambda kind: found[kind].score + (_AGREEMENT if kind == "exact" else 0))
    return chosen, found[chosen]


class Stacking(NamedTuple):
    """Weights of candidates ``(candidates,)`` and the mean log density of their mixture."""

    weights: Tensor
    score: float


def stacking_weights(log_densities: Tensor, row_weights: Tensor) -> Stacking:
    r"""The weights :math:`w` on the simplex that maximise :math:`\sum_i c_i \log \sum_k w_k p_k(y_i)`, by EM.

    Candidates with less than a fiftieth of the weight are left out, weight zero: they cost as much as the others.

    Args:
        log_densities: of each row under each candidate, trained without it, ``(rows, candidates)``.
        row_weights: c, ``(rows,)``.
    """
    logs, shares = log_densities.double(), row_weights.double() / row_weights.double().sum()
    weights = torch.full(logs.shape[1:], 1 / logs.shape[1], dtype=torch.float64)
    for least in (0.0, _LEAST_WEIGHT):
        weights = torch.where(weights < min(least, 0.5 * float(weights.max())), 0, weights)
        for _ in range(_EM_STEPS):
            weights = shares @ torch.softmax(logs + weights.log(), dim=1)
    return Stacking(weights, float(shares @ torch.logsumexp(logs + weights.log(), dim=1)))


def narrow_noise(stack: Stack, weights: Tensor, members: int, X: Tensor, covariance: Covariance) -> float:
    r"""Scale the noise of all networks so that averaging over folds does not widen the prediction; the factor.

    Each network was judged alone, and its variance V covers its own error. The mixture over the networks of a rate adds
    their disagreement A to V, although the mean over them is closer to the truth by just that A. So the noise is
    multiplied by 1 - A / V, which gives the mixture the variance that its members have on average. That is still the
    wide side: A is taken on training rows, which most networks have seen.

    Args:
        stack: networks, those of one rate next to each other; changed in place.
        weights: of the networks.
        members: networks of each rate.
        X: rows to take A and V on.
        covariance: moments to predict with.
    """
    rows = X[:: max(1, len(X) // _ROWS_OF_DISAGREEMENT)]
    with torch.no_grad():
        parts = [
            _disagreement(stack(certain(part.expand(len(stack), *part.shape), covariance)), weights, members)
            for part in torch.split(rows, _HELD_AT_ONCE)
        ]
        share = min(float(torch.cat(parts).mean()), _LARGEST_DISAGREEMENT)
        factor = 1 - share / (1 - share)
        parameters, _ = stack.state()
        log_noise_bias = [p for name, p in parameters.items() if name.endswith(".bias")][-1][:, 1]
        log_noise_bias += math.log(factor)
    return factor


def _disagreement(moments: Moments, weights: Tensor, members: int) -> Tensor:
    """A / (A + V) of each row."""
    mean, variance = moments.mean, moments.variance
    alone = variance[..., 0] + torch.exp((mean[..., 1] + variance[..., 1] / 2).clamp(max=_HIGHEST_LOG_NOISE))
    between = mean[..., 0].reshape(-1, members, mean.shape[1]).var(1, correction=0)
    by_rate = weights.to(between).view(-1, members).sum(1)
    disagreement, average = by_rate @ between, weights.to(alone) @ alone
    return disagreement / (disagreement + average)


def log_densities(stack: Stack, folds: Folds, X: Tensor, y: Tensor, covariance: Covariance, nodes: int = 32) -> Tensor:
    """Log density of its held-out rows under every network, ``(networks, rows)``."""
    parts, likelihood = [], HeteroscedasticGaussian()
    with torch.no_grad():
        for rows in torch.split(folds.held, _HELD_AT_ONCE, dim=1):
            moments = stack(certain(X[rows], covariance))
            parts.append(likelihood.predictive(moments, nodes).log_prob(y[rows]))
    return torch.cat(parts, 1)


def _out_of_fold(densities: list[Tensor], folds: Folds, row_weights: Tensor, rates: int) -> tuple[Tensor, Tensor]:
    """Log densities ``(held-out rows, candidates)`` and row weights; a candidate is a rate, at its end or its best."""
    members = len(folds.held) // rates
    real = folds.counts[:members].flatten()
    columns = [column for density in densities for column in density.view(rates, -1)]
    table = torch.stack(columns, 1)[real]
    return table.clamp_min(_LOWEST_LOG_DENSITY), row_weights[folds.held[:members].flatten()[real]]


def held_out_score(stack: nn.Module, folds: Folds, X: Tensor, y: Tensor, weights: Tensor, settings: Settings) -> Tensor:
    """Mean log density of the held-out rows of every network."""
    assert isinstance(stack, Stack)
    counts = folds.counts * weights[folds.held]
    densities = log_densities(stack, folds, X, y, settings.train_covariance, nodes=8)
    return (counts * densities).sum(1) / counts.sum(1)
