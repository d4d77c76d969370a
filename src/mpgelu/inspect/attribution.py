"""Decomposition of the predictive variance into additive contributions of its sources.

A source is an independent random number: the outcome of a mask, a random weight, the error of a feature, the noise.
:class:`mpgelu.FactoredMoments` hold one factor for each source, so the variance of an output is a sum of squares, one
for each source. This module labels the sources with the layers that added them and collects their terms.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators.measurement import checked_errors, main_effects, moved
from mpgelu.inspect.diagonal_sources import DiagonalSources
from mpgelu.inspect.hooks import after_each_layer
from mpgelu.layers import MPGELU, Dropout, GaussianLinear, Periodic
from mpgelu.likelihoods import HeteroscedasticGaussian, Likelihood, MeanAndLogVariance
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import Members, Parts, is_random, parts_of
from mpgelu.rules import fork

_KINDS: dict[type[nn.Module], str] = {Dropout: "dropout", MPGELU: "mpgelu"}
_JOINTLY = "jointly"  # name of the unit that holds the interactions of the errors of several features
_ENTRIES = 2**22  # largest number of entries of the factors in memory
_COLUMNS = ["row", "kind", "layer", "unit", "variance", "share"]


@dataclass(frozen=True)
class _Source:
    """A set of independent random numbers with the same origin.

    Attributes:
        kind: What they are, such as ``"dropout"``; the column ``kind`` of the result.
        layer: Name of the layer that draws them, empty if no layer does.
        units: Names of the units or features that they act on, one for each random number.
    """

    kind: str
    layer: str
    units: tuple[str, ...]


@dataclass(frozen=True)
class _Label:
    """What is known of a set of sources.

    Attributes:
        source: The random numbers by their units.
        shares: Shares of the units in each number of the moments, ``(rows, numbers, units)``; ``None`` if each number
            belongs to one unit.
    """

    source: _Source
    shares: Tensor | None = None


_NOISE, _DISAGREEMENT = _Source("noise", "", ("",)), _Source("disagreement", "", ("",))


def attribute(
    model: Any,
    X: ArrayLike,
    *,
    input_std: ArrayLike | None = None,
    units: bool | None = None,
    features: int | Sequence[str] | None = None,
    likelihood: Likelihood | None = None,
    moments: type[Moments] = FactoredMoments,
) -> pd.DataFrame:
    r"""Decompose the predictive variance of each row into additive contributions of its sources.

    .. math:: \operatorname{Var} y = \sum_m w_m \Big( \text{noise}_m + \sum_s d_{ms} F_{ms}^2 \Big)
        + \sum_m w_m (\text{mean}_m - \text{mean})^2

    Every outcome of a mask and every random weight is a source s of its own, of variance :math:`d_{ms}`, which reaches
    the output of network m through the factor :math:`F_{ms}`. Sources are independent, so there are no interaction
    terms. The decomposition is exact for the moments that the model propagates. Networks run in float64; the
    contributions therefore add up to the predicted variance within the float32 rounding of the prediction.

    The kinds of sources are

    - ``noise``, the expected variance of the observation noise, which is aleatoric; all others are epistemic,
    - ``dropout``, the masks of a dropout layer; those of a dropout layer on the input are reported by feature,
    - ``mpgelu``, the masks of an MP-GELU layer,
    - ``weights``, the random weights of a :class:`mpgelu.GaussianLinear` layer, by the feature or unit that they
      multiply, and its random ``bias``,
    - ``disagreement``, the variance of the means of the networks of an ensemble,
    - ``distance``, the variance that is added for each feature outside the range of the training data,
    - ``input``, the measurement errors of the features, with ``input_std`` only.

    With ``input_std`` every contribution is its average over the possible true features, at the points of
    :func:`mpgelu.estimators.measurement.error_points`, and ``input`` is the variance of the predicted mean over these
    points. A feature is assigned the part that a quadratic function of its error alone explains, the unit ``jointly``
    the remainder: see :func:`mpgelu.estimators.measurement.main_effects`.

    Args:
        model: A fitted estimator or table model, an ensemble, or a network, which takes standardised features.
        X: Features, ``(rows, n)``, as a data frame or an array.
        input_std: Standard deviations of independent measurement errors of the features: one number, one for each
            feature ``(n,)``, or one for each row and feature ``(rows, n)``, in the units of the features.
        units: Whether hidden units are listed one by one instead of summed over each layer. By default they are for a
            single network only, because units of the same number in different networks are unrelated. Features are
            always listed one by one.
        features: Names of the features, or their number, if neither the model nor ``X`` has names.
        likelihood: Likelihood of a network; by default heteroscedastic for two outputs, Gaussian of unit noise for one.
        moments: Type of moments that a network propagates: ``FactoredMoments``, which are exact, or
            ``DiagonalMoments``, which drop correlations; estimators and ensembles have their own.

    Returns:
        A data frame with one line for each row and source and the columns ``row``, ``kind``, ``layer``, ``unit``,
        ``variance`` (in the squared unit of the target) and ``share`` (of the variance of the row; sums to one).

    Raises:
        InputError: The shapes do not fit, an error is negative, or a layer merges its sources, as ReLU does.

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
    parts = parts_of(model, "attribute", features=features, likelihood=likelihood, moments=moments)
    raw = parts.raw("attribute", X)
    named = len(parts.networks) == 1 if units is None else units
    networks = [copy.deepcopy(network).double() for network in parts.networks]
    if input_std is None:
        _, totals = _split(networks, parts, raw, named)
    else:
        errors = torch.tensor(checked_errors("attribute", input_std, tuple(raw.shape)), device=raw.device)
        totals = _with_errors(networks, parts, raw, errors, named)
    return _tidy(list(totals), torch.cat(list(totals.values()), -1).numpy() * parts.target_scale**2)


def _split(
    networks: Sequence[nn.Module], parts: Parts, raw: Tensor, named: bool
) -> tuple[Tensor, dict[_Source, Tensor]]:
    r"""Return the predicted mean ``(rows,)`` and the contribution of each source to the variance, ``(rows, units)``.

    Both are in units of the scaled target. The contribution of a source is its average over the networks with their
    weights; the disagreement is :math:`c^2 \sum_m w_m (\mu_m - \mu)^2` with the factor c of the shrinkage of the
    networks towards their mean, :attr:`Parts.spread`.

    Args:
        networks: The networks of the model in float64.
        parts: The model.
        raw: Raw features, ``(rows, n)``.
        named: Whether hidden units are listed one by one.
    """
    x = parts.scaling(raw).to(parts.dtype).double()
    totals: dict[_Source, Tensor] = {}
    means = []
    for network, weight in zip(networks, parts.weights, strict=True):
        if parts.members is not None and not is_random(network):
            continue  # a deterministic network contributes to the disagreement only
        mean, split = _network(network, parts, x)
        means.append(mean)
        for source, variance in split.items():
            if not named and source.units[: len(parts.feature_names)] != tuple(parts.feature_names):
                source, variance = replace(source, units=("",)), variance.sum(-1, keepdim=True)
            totals[source] = totals.get(source, torch.zeros((), device="cpu")) + weight * variance
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


def _of_members(members: Members, x: Tensor) -> tuple[Tensor, dict[_Source, Tensor]]:
    r"""Return the mean ``(rows,)`` of the components that a model mixes, with their noise and disagreement.

    If several components belong to one network, :math:`\mu_k` is the mean of a component and :math:`c_k` that of its
    network. The spread of the components around their network counts as noise:

    .. math:: \text{noise} = \sum_k w_k \big(\sigma_k^2 + (\mu_k - c_k)^2\big), \qquad
        \text{disagreement} = \sum_k w_k (c_k - \mu)^2

    Args:
        members: The components, :attr:`Parts.members`.
        x: Scaled features, ``(rows, n)``.
    """
    with torch.no_grad():
        mean, variance = (part.double() for part in members(x))
    weights = members.weights
    noise, means = HeteroscedasticGaussian().noise(DiagonalMoments(mean, variance)), MeanAndLogVariance.of(mean).mean
    center, centers = weights @ means, members.centers
    if centers is not None:  # the components are not centred at the means of their networks
        of_networks = centers @ means
        noise, means = noise + (means - of_networks).square(), of_networks
    between = weights @ (means - center).square()
    return center, {_NOISE: (weights @ noise)[:, None], _DISAGREEMENT: between[:, None]}


def _with_errors(
    networks: Sequence[nn.Module], parts: Parts, x: Tensor, errors: Tensor, named: bool
) -> dict[_Source, Tensor]:
    """Return the contributions of all sources for features with measurement errors, ``(rows, units)`` each.

    Args:
        networks: The networks of the model in float64.
        parts: The model.
        x: Recorded raw features, ``(rows, n)``.
        errors: Standard deviations of their errors, ``(rows, n)``.
        named: Whether hidden units are listed one by one.

    Returns:
        The contributions of :func:`_split`, averaged over the points of the errors, and those of the kind ``input``,
        one for each feature and one for their interactions.
    """
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
    """Return contributions ``(rows, all units of all sources)`` as a data frame in long form.

    An infinite contribution, far outside the training data, has the whole share of its row.
    """
    names = [(source.kind, source.layer, unit) for source in sources for unit in source.units]
    rows = len(variances)
    kind, layer, unit = (list(column) * rows for column in zip(*names, strict=True))
    infinite = np.isinf(variances)
    finite = np.where(infinite.any(1, keepdims=True), infinite, variances)
    shares = finite / finite.sum(1, keepdims=True)
    columns = [np.arange(rows).repeat(len(names)), kind, layer, unit, variances.ravel(), shares.ravel()]
    return pd.DataFrame(dict(zip(_COLUMNS, columns, strict=True)))


# ---- one network ----


def _network(network: nn.Module, parts: Parts, x: Tensor) -> tuple[Tensor, dict[_Source, Tensor]]:
    """Return the mean ``(rows,)`` of one network and the contribution of each source, ``(rows, units)``.

    Factors have one column for each source, so that rows are processed in chunks of bounded memory.
    """
    widths = [p.shape[0] for p in network.parameters() if p.dim() == 2] or [1]
    size = max(1, _ENTRIES // (max(widths) * (x.shape[-1] + sum(widths))))
    chunks = []
    with torch.no_grad():
        for start in range(0, len(x), size):
            chunks.append(_rows(network, parts, x[start : start + size]))
    means, splits = zip(*chunks, strict=True)
    return torch.cat(means), {source: torch.cat([split[source] for split in splits]) for source in splits[0]}


def _rows(network: nn.Module, parts: Parts, x: Tensor) -> tuple[Tensor, dict[_Source, Tensor]]:
    """Return the same for one chunk of scaled features ``(rows, n)``.

    The predicted mean is a linear function of the outputs near their means, whose gradient the likelihood states
    (:meth:`Likelihood.mean_direction`); for a heteroscedastic Gaussian it is the first output itself.
    """
    diagonal = parts.moments is DiagonalMoments
    start: FactoredMoments | DiagonalSources = (
        DiagonalSources(x) if diagonal else fork(FactoredMoments(x, max_rank=math.inf))
    )
    labels: dict[int, _Label] = {}
    output = _traced(network, start, labels, tuple(parts.feature_names))
    moments = DiagonalMoments(output.mean, output.variance) if isinstance(output, DiagonalSources) else output
    noise, mean = parts.likelihood.noise(moments), parts.likelihood.predictive(moments, 2).mean
    direction = parts.likelihood.mean_direction(moments)
    split = {_NOISE: noise[:, None]}
    for key, variances in _along(output, direction):
        found = labels[id(key)]
        split[found.source] = variances if found.shares is None else (variances[:, None] @ found.shares)[:, 0]
    return mean, split


def _traced(network: nn.Module, start: Any, labels: dict[int, _Label], features: tuple[str, ...]) -> Any:
    """Run a network and label every source with the layer that added it.

    Args:
        network: The network to run.
        start: Moments of its inputs, :class:`FactoredMoments` without a limit of the rank or :class:`DiagonalSources`.
        labels: Labels of the sources by the ``id`` of their identity; filled by this function.
        features: Names of the features, which name the units of the sources before the first linear layer.

    Returns:
        The moments of the outputs, of the type of ``start``.

    Raises:
        InputError: A layer returned moments that do not keep their sources.
    """
    mapped = False  # whether a layer has mapped the features to other units
    alive: list[object] = []  # the identities of labelled sources, so that no id is used twice

    def label(name: str, module: nn.Module, value: Any, output: Any) -> Any:
        nonlocal mapped
        if not isinstance(output, FactoredMoments | DiagonalSources):
            raise InputError(
                f"attribute: layer {name} ({type(module).__name__}) mixes its sources, which cannot be told apart "
                "afterwards; MP-GELU, dropout, linear layers and their like keep them"
            )
        output = fork(output) if isinstance(output, FactoredMoments) else output
        before, mapped = mapped, mapped or isinstance(module, nn.Linear | Periodic)
        for key, variances in _reached(output):
            if id(key) in labels:
                continue
            if isinstance(module, GaussianLinear):
                labels[id(key)] = _of_weights(module, name, value, None if before else features)
            else:
                units = features if not mapped else tuple(map(str, range(variances.shape[-2])))
                kind = _KINDS.get(type(module), type(module).__name__.lower())
                labels[id(key)] = _Label(_Source(kind, name, units))
            alive.append(key)
        return output

    with after_each_layer(network, label):
        return network(start)


def _of_weights(layer: GaussianLinear, name: str, value: Any, features: tuple[str, ...] | None) -> _Label:
    r"""Return the label of the random weights of a layer, by the units that they multiply.

    The moments hold the variance that all random weights of an output add to it,
    :math:`\sum_j V_{oj} (m_j^2 + v_j) + V_{b,o}`. Weights are independent, and those of one output reach the result of
    the network by the same way, so that the shares of its terms are exact.

    Args:
        layer: The layer.
        name: Its name.
        value: Moments of its inputs, ``(rows, n)``.
        features: Names of the inputs if they are features; ``None`` for hidden units.
    """
    square = value.mean.square() + value.variance
    terms = square.unsqueeze(-2) * layer.weight_variance  # (rows, outputs, n)
    units = features or tuple(map(str, range(square.shape[-1])))
    if layer.bias_variance is not None:
        bias = layer.bias_variance.unsqueeze(-1).expand(*terms.shape[:-1], 1)
        terms, units = torch.cat([terms, bias], -1), (*units, "bias")
    shares = (terms / terms.sum(-1, keepdim=True)).nan_to_num()  # inputs that are zero contribute nothing
    return _Label(_Source("weights", name, units), shares)


def _reached(moments: Any) -> list[tuple[object, Tensor]]:
    """Return the identity of every set of sources, and its contributions to the variances of n units.

    The contribution of source s to unit i is :math:`d_s F_{is}^2`; the shape of each is ``(rows, sources, n)``.
    """
    if isinstance(moments, DiagonalSources):
        return list(moments.sources)
    return [(block.variance, block.variance.unsqueeze(-1) * block.scaled_factor.square()) for block in moments.blocks]


def _along(moments: Any, direction: Tensor) -> list[tuple[object, Tensor]]:
    r"""Return the contributions of all sources to the variance of :math:`g^\top h`, ``(rows, sources)`` each.

    .. math:: d_s \Big(\sum_i g_i F_{is}\Big)^2 \quad \text{(factored)}, \qquad
        \sum_i g_i^2\, v_{is} \quad \text{(diagonal)}

    Args:
        moments: Moments of the n units h.
        direction: The gradient g, ``(n,)`` or ``(rows, n)``.
    """
    by_source = direction.unsqueeze(-2)
    if isinstance(moments, DiagonalSources):
        return [(key, (part * by_source.square()).sum(-1)) for key, part in moments.sources]
    return [(b.variance, b.variance * (b.scaled_factor * by_source).sum(-1).square()) for b in moments.blocks]
