"""Where a prediction's variance comes from: every source of uncertainty with its share, adding up to the whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators.measurement import checked_errors, main_effects, moved
from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Periodic
from mpgelu.likelihoods import HeteroscedasticGaussian, Likelihood, MeanAndLogVariance
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import Parts, is_random, parts_of
from mpgelu.rules import (
    add,
    elementwise,
    fork,
    gaussian_linear,
    keep_probability,
    linear,
    mpgelu,
    multiply,
    periodic,
    rescale,
    scale,
)
from mpgelu.rules.elementwise import Activation
from mpgelu.rules.periodic import fit_apart

_KINDS: dict[type[nn.Module], str] = {Dropout: "dropout", MPGELU: "mpgelu", GaussianLinear: "weights"}
_JOINTLY = "jointly"  # the unit of what errors of several features do together
_ENTRIES = 2**22  # of the factors held at a time
_COLUMNS = ["row", "kind", "layer", "unit", "variance", "share"]


@dataclass(frozen=True)
class _Source:
    """Independent random numbers of one origin, named unit by unit."""

    kind: str
    layer: str
    units: tuple[str, ...]


_NOISE, _DISAGREEMENT = _Source("noise", "", ("",)), _Source("disagreement", "", ("",))


def attribute(
    model: Any,
    X: ArrayLike,
    *,
    input_std: ArrayLike | None = None,
    units: bool | None = None,
    features: Sequence[str] | None = None,
    likelihood: Likelihood | None = None,
) -> pd.DataFrame:
    r"""Split the predictive variance of each row over its sources; exact, and additive.

    .. math:: \operatorname{Var} y = \sum_m w_m \Big( \text{noise}_m + \sum_s d_{ms} F_{ms}^2 \Big)
        + \sum_m w_m (\text{mean}_m - \text{mean})^2

    Every mask and every random weight is a source s of its own, which reaches the output of network m through a
    factor :math:`F_{ms}`; there are no terms that sources share. Networks are run in float64, so that the parts add up
    to the variance the model predicts within its float32 rounding.

    The kinds are ``noise`` (the observation's own), ``input`` (measurement error of a feature), ``dropout``,
    ``mpgelu`` and ``weights`` (random weights) of a layer and ``disagreement`` of an ensemble's networks. Dropout on
    the input is reported by feature.

    With ``input_std`` all of them are averages over the features that may be the true ones, at the points of
    :func:`mpgelu.estimators.measurement.error_points`, and ``input`` is the variance of the mean over these points. A
    feature has the part that a quadratic function of its error alone explains, the unit ``jointly`` the rest:
    see :func:`mpgelu.estimators.measurement.main_effects`.

    Args:
        model: A fitted estimator or model of a table, an ensemble, or a network, whose features are then standardised
            already.
        X: Features ``(rows, n)``, a data frame or an array.
        input_std: Standard deviation of independent measurement errors of the features: one number, one for each
            feature ``(n,)``, or for each row and feature ``(rows, n)``.
        units: Name every hidden unit, or sum over each layer; by default only for a single network, as units of the
            same number in different networks have nothing in common. Features are always named.
        features: Names of the features, where neither the model nor X has any.
        likelihood: Likelihood of a network; by default heteroscedastic for two outputs, Gaussian of unit noise for one.

    Returns:
        One line for each row and source: row, kind, layer, unit, variance, and share of the row's variance.

    Example:
        >>> import mpgelu, torch
        >>> frame = attribute(mpgelu.network(2, (8,)), torch.randn(5, 2), input_std=[0.1, 0.0])
        >>> sorted(frame.kind.unique())
        ['dropout', 'input', 'mpgelu', 'noise']
        >>> bool(abs(frame.groupby("row").share.sum() - 1).max() < 1e-9)
        True
    """
    if features is None and isinstance(X, pd.DataFrame) and isinstance(model, nn.Module):
        features = list(map(str, X.columns))
    parts = parts_of(model, "attribute", features=features, likelihood=likelihood)
    raw = parts.raw("attribute", X)
    named = len(parts.networks) == 1 if units is None else units
    networks = [copy.deepcopy(network).double() for network in parts.networks]
    if input_std is None:
        _, totals = _split(networks, parts, raw, named)
    else:
        errors = torch.tensor(checked_errors("attribute", input_std, tuple(raw.shape)))
        totals = _with_errors(networks, parts, raw, errors, named)
    return _tidy(list(totals), torch.cat(list(totals.values()), -1).numpy() * parts.target_scale**2)


def _split(
    networks: Sequence[nn.Module], parts: Parts, raw: Tensor, named: bool
) -> tuple[Tensor, dict[_Source, Tensor]]:
    """Mean ``(rows,)``, and what each source adds to the scaled variance, ``(rows, units)``."""
    x = parts.scaling(raw).to(parts.dtype).double()
    totals: dict[_Source, Tensor] = {}
    means = []
    for network, weight in zip(networks, parts.weights, strict=True):
        if parts.members is not None and not is_random(network):
            continue  # known outputs, which have no part in the variance but by their disagreement
        mean, split = _network(network, parts, x)
        means.append(mean)
        for source, variance in split.items():
            if not named and source.units != tuple(parts.feature_names):
                source, variance = replace(source, units=("",)), variance.sum(-1, keepdim=True)
            totals[source] = totals.get(source, torch.zeros(())) + weight * variance
    if parts.scaling.reach > 0:
        totals[_Source("distance", "input", tuple(parts.feature_names))] = parts.scaling.extrapolation(raw)
    if parts.members is not None:
        center, found = _of_members(parts.members, x.to(parts.dtype))
        return center, totals | found
    spread = torch.stack(means)
    center = parts.weights @ spread
    if len(means) > 1:
        totals[_DISAGREEMENT] = parts.spread**2 * (parts.weights @ (spread - center).square())[:, None]
    return center, totals


def _of_members(members: nn.Module, x: Tensor) -> tuple[Tensor, dict[_Source, Tensor]]:
    """Mean ``(rows,)``, noise and disagreement of what a model mixes, each ``(rows, 1)``."""
    with torch.no_grad():
        mean, variance = (part.double() for part in members(x))
    weights = torch.as_tensor(members.weights)
    noise, means = HeteroscedasticGaussian().noise(DiagonalMoments(mean, variance)), MeanAndLogVariance.of(mean).mean
    center, centers = weights @ means, getattr(members, "centers", None)
    if centers is not None:  # the noise is not centred at the networks' means
        of_networks = torch.as_tensor(centers) @ means
        noise, means = noise + (means - of_networks).square(), of_networks
    between = weights @ (means - center).square()
    return center, {_NOISE: (weights @ noise)[:, None], _DISAGREEMENT: between[:, None]}


def _with_errors(
    networks: Sequence[nn.Module], parts: Parts, x: Tensor, errors: Tensor, named: bool
) -> dict[_Source, Tensor]:
    """Every source averaged over the points of the errors, and what the errors themselves do to the mean."""
    names = tuple(parts.feature_names)
    places, chunks = [], []
    for some in moved(x, errors):
        count = len(some.points.weights)
        center, split = _split(networks, parts, some.x.flatten(0, 1), named)
        averages = {
            source: torch.einsum("p,rpu->ru", some.points.weights, variance.reshape(len(some.rows), count, -1))
            for source, variance in split.items()
        }
        effects = main_effects(center.reshape(-1, count), some.points)
        apart = x.new_zeros(len(some.rows), len(names)).scatter(1, some.features, effects[:, :-1])
        averages[_Source("input", "input", (*names, _JOINTLY))] = torch.cat([apart, effects[:, -1:]], 1)
        places.append(some.rows)
        chunks.append(averages)
    order = torch.cat(places).argsort()
    return {source: torch.cat([chunk[source] for chunk in chunks])[order] for source in chunks[0]}


def _tidy(sources: Sequence[_Source], variances: NDArray[np.float64]) -> pd.DataFrame:
    names = [(source.kind, source.layer, unit) for source in sources for unit in source.units]
    rows = len(variances)
    kind, layer, unit = (list(column) * rows for column in zip(*names, strict=True))
    infinite = np.isinf(variances)
    finite = np.where(infinite.any(1, keepdims=True), infinite, variances)  # far from the data, what is infinite is all
    shares = finite / finite.sum(1, keepdims=True)
    columns = [np.arange(rows).repeat(len(names)), kind, layer, unit, variances.ravel(), shares.ravel()]
    return pd.DataFrame(dict(zip(_COLUMNS, columns, strict=True)))


# ---- one network ----


def _network(network: nn.Module, parts: Parts, x: Tensor) -> tuple[Tensor, dict[_Source, Tensor]]:
    """Mean ``(rows,)`` and each source's part of the variance ``(rows, units)``, a few rows at a time."""
    widths = [p.shape[0] for p in network.parameters() if p.dim() == 2] or [1]
    size = max(1, _ENTRIES // (max(widths) * (x.shape[-1] + sum(widths))))
    chunks = []
    with torch.no_grad():
        for start in range(0, len(x), size):
            chunks.append(_rows(network, parts, x[start : start + size]))
    means, splits = zip(*chunks, strict=True)
    return torch.cat(means), {source: torch.cat([split[source] for split in splits]) for source in splits[0]}


def _rows(network: nn.Module, parts: Parts, x: Tensor) -> tuple[Tensor, dict[_Source, Tensor]]:
    diagonal = parts.moments is DiagonalMoments
    start: FactoredMoments | _Apart = _Apart(x) if diagonal else fork(FactoredMoments(x, max_rank=math.inf))
    labels: dict[int, _Source] = {}
    output = _traced(network, start, labels, tuple(parts.feature_names))
    moments = DiagonalMoments(output.mean, output.variance) if isinstance(output, _Apart) else output
    noise, mean = parts.likelihood.noise(moments), parts.likelihood.predictive(moments, 2).mean
    direction = parts.likelihood.mean_direction(moments)
    split = {labels[id(key)]: variances for key, variances in _along(output, direction)}
    return mean, {_NOISE: noise[:, None], **split}


def _traced(network: nn.Module, start: Any, labels: dict[int, _Source], features: tuple[str, ...]) -> Any:
    """Run a network and label every source that a layer adds; sources are kept, so that their ids stay theirs."""
    calls: dict[str, int] = {}
    mapped = False  # whether units are no longer the features
    alive: list[object] = []

    def hook(name: str, module: nn.Module, _: object, output: Any) -> Any:
        nonlocal mapped
        calls[name] = calls.get(name, 0) + 1
        if not isinstance(output, FactoredMoments | _Apart):
            raise InputError(
                f"attribute: layer {name} ({type(module).__name__}) mixes its sources, which cannot be told apart "
                "afterwards; MP-GELU, dropout, linear layers and their like keep them"
            )
        output = fork(output) if isinstance(output, FactoredMoments) else output
        mapped = mapped or isinstance(module, nn.Linear | Periodic)
        for key, variances in _reached(output):
            if id(key) not in labels:
                units = features if not mapped else tuple(map(str, range(variances.shape[-2])))
                kind = _KINDS.get(type(module), type(module).__name__.lower())
                labels[id(key)] = _Source(kind, name if calls[name] == 1 else f"{name} ({calls[name]})", units)
                alive.append(key)
        return output

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(partial(hook, name)) for name, module in leaves]
    try:
        return network(start)
    finally:
        for handle in handles:
            handle.remove()


def _reached(moments: Any) -> list[tuple[object, Tensor]]:
    """The identity of every set of sources, and what each adds to the variance of each unit, ``(rows, sources, n)``."""
    if isinstance(moments, _Apart):
        return list(moments.sources)
    return [(block.variance, block.variance.unsqueeze(-1) * block.scaled_factor.square()) for block in moments.blocks]


def _along(moments: Any, direction: Tensor) -> list[tuple[object, Tensor]]:
    """What every source adds to the variance of a linear combination of the units, ``(rows, sources)``."""
    by_source = direction.unsqueeze(-2)
    if isinstance(moments, _Apart):
        return [(key, (part * by_source.square()).sum(-1)) for key, part in moments.sources]
    return [(b.variance, b.variance * (b.scaled_factor * by_source).sum(-1).square()) for b in moments.blocks]


# ---- diagonal moments with their sources apart ----


@dataclass(frozen=True, eq=False, repr=False)
class _Apart(Moments):
    """Diagonal moments whose variances are kept apart by source.

    Rules that are written for all :class:`Moments` in terms of :func:`mpgelu.rules.rescale` apply to these, too.

    Args:
        mean: ``(rows, n)``.
        sources: The identity of every set of sources and its part of the variances, ``(rows, sources, n)``.
    """

    mean: Tensor
    sources: tuple[tuple[object, Tensor], ...] = ()

    @property
    def variance(self) -> Tensor:
        """Marginal variances ``(rows, n)``."""
        return sum((part.sum(-2) for _, part in self.sources), torch.zeros_like(self.mean))

    def then(self, mean: Tensor, carry: Callable[[Tensor], Tensor], added: Tensor | None = None) -> _Apart:
        """After a layer that carries the variances on and adds independent ones, one for each unit."""
        sources = tuple((key, carry(part)) for key, part in self.sources)
        return _Apart(mean, sources if added is None else (*sources, (object(), torch.diag_embed(added))))


@linear.register
def _(value: _Apart, weight: Tensor, bias: Tensor | None = None) -> _Apart:
    return value.then(F.linear(value.mean, weight, bias), lambda part: F.linear(part, weight.square()))


@gaussian_linear.register
def _(
    value: _Apart, weight: Tensor, weight_variance: Tensor, bias: Tensor | None, bias_variance: Tensor | None
) -> _Apart:
    added = F.linear(value.mean.square() + value.variance, weight_variance, bias_variance)
    return value.then(F.linear(value.mean, weight, bias), lambda part: F.linear(part, weight.square()), added)


@rescale.register
def _(value: _Apart, mean: Tensor, gain: Tensor, added: Tensor | None = None, row_wise: bool = False) -> _Apart:
    return value.then(mean, lambda part: part * gain.square().unsqueeze(-2), added)


@multiply.register
def _(value: _Apart, gain: Tensor | float, noise: Tensor | float) -> _Apart:
    added = (value.variance + value.mean.square()) * noise
    return value.then(value.mean * gain, lambda part: part * (gain * gain), added)


@mpgelu.register
def _(value: _Apart) -> _Apart:
    keep = keep_probability(value.mean, value.variance)
    added = keep * (1 - keep) * (value.variance + value.mean.square())
    apart: _Apart = rescale(value, keep * value.mean, keep, added)
    return apart


@add.register
def _(value: _Apart, other: Tensor | float, alpha: float = 1.0) -> _Apart:
    return replace(value, mean=value.mean + alpha * other)


@scale.register
def _(value: _Apart, gain: Tensor | float) -> _Apart:
    return value.then(value.mean * gain, lambda part: part * (gain * gain))


@elementwise.register
def _(value: _Apart, activation: Activation) -> _Apart:
    if not value.sources:
        return _Apart(activation(value.mean))
    apart: _Apart = rescale(value, *activation.fit(value.mean, value.variance))
    return apart


@periodic.register
def _(value: _Apart, frequency: Tensor, phase: Tensor, weight: Tensor) -> _Apart:
    if not value.sources:
        return _Apart(periodic(value.mean, frequency, phase, weight))
    fit = fit_apart(value.mean, value.variance, frequency, phase, weight)
    square = fit.gain.square().unsqueeze(-3)  # (rows, 1, n, 1 + d)
    return value.then(
        fit.mean.flatten(-2), lambda part: (part.unsqueeze(-1) * square).flatten(-2), fit.added.flatten(-2)
    )
