"""Export of a model as one ONNX graph, from raw features to the predictive distribution."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mpgelu.errors import InputError
from mpgelu.estimators import Ensemble, MPGELURegressor, conformal
from mpgelu.export.layers import Array, layers_of
from mpgelu.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import Parts, parts_of
from mpgelu.networks.parts import one_row
from mpgelu.networks.scaling import FARTHEST
from mpgelu.predictive.nodes import NODES
from mpgelu.storage.files import write_atomically
from mpgelu.tables.cells import MISSING
from mpgelu.tables.model import TableModel

_ROUNDING = 1e-7  # largest rounding error of a standardised feature that is left
_FOLDED = 1e6  # largest scale of a feature that is folded into weights; squares of larger ones could overflow


def export_onnx(
    model: MPGELURegressor | TableModel | Ensemble | nn.Module,
    path: str | os.PathLike[str],
    q: Sequence[float] = (0.05, 0.5, 0.95),
    *,
    features: int | Sequence[str] | None = None,
    likelihood: Likelihood | None = None,
    moments: type[Moments] = FactoredMoments,
) -> None:
    """Write a model as one ONNX graph, which onnxruntime runs without torch and without this library.

    The graph takes the raw ``features``, float32 ``(rows, n)``, with any number of rows; scaling, networks, moments
    and likelihood are inside. Its outputs, float32 in the unit of the target, are ``mean``, ``stddev`` and its two
    parts ``epistemic_std`` and ``aleatoric_std``, ``(rows,)`` each, and ``quantiles``, ``(rows, len(q))``. Its metadata
    contain ``feature_names`` and the probabilities ``q``, both JSON, and ``version``.

    A calibrated estimator also has the outputs ``lower`` and ``upper``, the ends of its calibrated interval, if the
    first and the last entry of ``q`` are symmetric; its level is their difference, 0.9 by default. The features of a
    :class:`TableModel` are its encoded columns; the metadata ``columns`` describe the encoding and ``missing`` lists
    the texts that count as a missing cell, both JSON.

    Results equal those of the library to float32 rounding. Quantiles are roots of the distribution function of the
    same mixture; at probabilities below 0.001 or above 0.999 rounding leaves fewer digits. Networks of linear layers,
    dropout and MP-GELU become a graph designed for them; other networks are traced by torch, which takes longer and
    gives more nodes.

    Args:
        model: A fitted estimator or table model, an ensemble, or a network of vectors.
        path: File to write.
        q: Probabilities of the quantiles as in :meth:`MPGELURegressor.predict_quantile`; may be empty.
        features: Names of the features, or their number; not needed for estimators and networks with a linear layer.
        likelihood: Likelihood of a network. The default is heteroscedastic for two outputs. A network with one output
            does not determine the noise, so ``Gaussian(noise_variance)`` is required. Estimators and ensembles have
            their own.
        moments: Type of moments that a network propagates; estimators and ensembles have their own.

    Raises:
        InputError: A probability is out of range, the likelihood does not fit the outputs, the network cannot be
            traced, or the package onnx is not installed.
        DataError: The file cannot be written.

    Example:
        >>> import mpgelu, numpy, onnxruntime
        >>> path = getfixture("tmp_path") / "network.onnx"
        >>> export_onnx(mpgelu.network(3), path)
        >>> session = onnxruntime.InferenceSession(path)
        >>> mean, stddev = session.run(["mean", "stddev"], {"features": numpy.zeros((7, 3), "float32")})
        >>> stddev.shape
        (7,)
    """
    levels = [float(probability) for probability in q]
    if not all(0 < level < 1 for level in levels):
        raise InputError(f"export_onnx: q must lie strictly between 0 and 1, got {levels}")
    try:
        from mpgelu.export.graph import Graph
    except ImportError as error:
        raise InputError(f"export_onnx: needs the package {error.name}; pip install 'mpgelu[onnx]'") from error
    about = {"q": json.dumps(levels), "version": version("mpgelu")}
    if isinstance(model, TableModel):
        about |= {
            "columns": json.dumps(_columns(model)),
            "missing": json.dumps(sorted(MISSING)),
            "target": model.target,
        }
    parts = parts_of(model, "export_onnx", features=features, likelihood=likelihood, moments=moments)
    _check_likelihood(model, parts, likelihood)
    graph = Graph()
    results = _results(graph.value("features"), parts, levels)
    stddevs = _calibrated(parts.calibration_scores, levels)
    if stddevs is not None:
        (mean, _), (stddev, _) = results["mean"], results["stddev"]
        width = stddev * stddevs
        results |= {"lower": (mean - width, ["rows"]), "upper": (mean + width, ["rows"])}
    about |= {"feature_names": json.dumps(list(parts.feature_names))}
    content = graph.model({"features": ["rows", len(parts.feature_names)]}, results, about).SerializeToString()
    write_atomically(Path(path), content)


def _results(features: Any, parts: Parts, levels: Sequence[float]) -> dict[str, Any]:
    """Return the outputs of the graph by name, each with its shape."""
    from mpgelu.export import compact, traced
    from mpgelu.export.distribution import distribution

    offset = parts.target_mean if len(parts.networks) == 1 and not levels else 0.0  # added early if that is exact
    rest = 0.0
    if compact.is_compact(parts):
        summary = compact.distribution(_centred(features, parts), parts, levels)
    elif (form := _form(parts, offset)) is None:
        summary = traced.whole(features, parts, levels)
    else:
        outputs, weights, nodes = _outputs(features, parts, form, cross=bool(levels))
        centers = parts.members.centers if parts.members is not None and form.by_member else None
        between = None if centers is None else centers.numpy()
        summary = distribution(outputs, weights, form.noise_variance, levels, nodes, between)
        rest = parts.target_mean - offset
    mean = summary.mean + rest if rest else summary.mean
    moments = summary._replace(mean=mean)._asdict()
    quantiles = moments.pop("quantiles")
    results: dict[str, Any] = {name: (value, ["rows"]) for name, value in moments.items()}
    if quantiles is not None:
        results["quantiles"] = ((quantiles + mean).op("Transpose", perm=[1, 0]), ["rows", len(levels)])
    return results


class _Form(NamedTuple):
    """The interpretation of the outputs of the mixed members in the graph.

    Attributes:
        scale: Gain of each output that expresses it in the unit of the target, ``(outputs,)``.
        shift: Shift of each output after the gain, ``(outputs,)``.
        noise_variance: Variance of the noise in the unit of the target; ``None`` if an output is its logarithm.
        by_member: Whether the graph mixes :attr:`Parts.members` instead of the outputs of the networks.
    """

    scale: Array
    shift: Array
    noise_variance: float | None
    by_member: bool


def _form(parts: Parts, offset: float) -> _Form | None:
    """Return the interpretation of the outputs for a likelihood that has a form in the graph, otherwise ``None``.

    There is one for :class:`Gaussian`, one for :class:`HeteroscedasticGaussian`, and one for mixtures of the latter.
    Types are compared exactly, because a subclass may have a different predictive distribution. For all other
    likelihoods torch traces :meth:`Likelihood.predictive`.
    """
    of_networks, kind = parts.noise is None and parts.spread == 1, type(parts.likelihood)
    if of_networks and kind is Gaussian:
        noise = float(parts.likelihood.noise(torch.zeros(1, device="cpu"))) * parts.target_scale**2
        scale, shift = map(np.array, Gaussian.in_unit(parts.target_scale, offset))
        return _Form(scale, shift, noise, by_member=False)
    own = of_networks and kind is HeteroscedasticGaussian
    if not own and parts.members is None:
        return None
    scale, shift = map(np.array, HeteroscedasticGaussian.in_unit(parts.target_scale, offset))
    return _Form(scale, shift, None, by_member=not own)


def _check_likelihood(
    model: MPGELURegressor | TableModel | Ensemble | nn.Module, parts: Parts, given: Likelihood | None
) -> None:
    """Raise if the likelihood does not fit the outputs, or if one output leaves the noise undetermined."""
    outputs = parts.likelihood.outputs
    if not isinstance(model, nn.Module) or isinstance(model, Ensemble):
        if given is not None:
            raise InputError("export_onnx: likelihood is for networks; this model has its own, leave it out")
        return
    network = parts.networks[0]
    zeros = one_row(network, len(parts.feature_names))
    with torch.no_grad():
        found = network(zeros).shape[-1]
        network(parts.moments.certain(zeros))  # plain torch modules refuse moments, with the remedy
    if found != outputs:
        other = "HeteroscedasticGaussian()" if found == 2 else "Gaussian(noise_variance)"
        raise InputError(
            f"export_onnx: {type(parts.likelihood).__name__} takes {outputs} output{'s' * (outputs > 1)}, "
            f"but the network has {found}; give likelihood={other}"
        )
    if outputs == 1 and given is None:
        raise InputError(
            "export_onnx: a network with one output does not say how large the noise is; "
            "give likelihood=Gaussian(noise_variance), the one that it was trained with"
        )


def _columns(model: TableModel) -> list[dict[str, Any]]:
    """Return what is needed to encode the columns of a table, and no more of the training data."""
    wanted = ("kind", "name", "median", "categories", "other", "indicator")
    columns = model.encoder.described()["columns"]
    return [{name: column[name] for name in wanted if name in column} for column in columns]


def _calibrated(scores: Array | None, levels: Sequence[float]) -> float | None:
    """Return half the width of the calibrated interval between the outer levels in standard deviations, or ``None``."""
    if scores is None or len(levels) < 2 or levels[0] == levels[-1] or abs(levels[0] + levels[-1] - 1) > 1e-9:
        return None
    try:
        return conformal.quantile(scores, abs(levels[-1] - levels[0]))
    except InputError as error:
        warnings.warn(f"export_onnx: lower and upper are left out: {error}", stacklevel=3)
        return None


def _centred(features: Any, parts: Parts) -> Any:
    """Return features minus their centres; the rounding errors of float32 centres are subtracted in a second step."""
    center, scale = parts.scaling.center.numpy(), parts.scaling.scale.numpy()
    rest = center - center.astype(np.float32)
    x = features - center if center.any() else features
    return x - rest if np.abs(rest / scale).max() > _ROUNDING else x


def _outputs(features: Any, parts: Parts, form: _Form, cross: bool) -> tuple[Any, Array, int]:
    """Return the moments of the mixed members in the unit of the target, their weights, and the nodes of each."""
    from mpgelu.export import perceptron, traced

    scale, shift = form.scale, form.shift
    x, unit, weights = _centred(features, parts), parts.scaling.scale.numpy(), parts.weights.numpy()
    limited = parts.scaling.limit < FARTHEST
    is_linear = not (form.by_member or limited or parts.scaling.reach)  # the scale can be folded into the weights
    layers = layers_of(parts.networks) if is_linear else None
    if layers is None or unit.min() < 1 / _FOLDED or unit.max() > _FOLDED:
        x, unit = x * (1 / unit), np.ones_like(unit)
    if layers is not None:
        layers[0] = layers[0].of_inputs(unit)
        layers[-1] = layers[-1].scaled(scale, shift)
        run = perceptron.diagonal if parts.moments is DiagonalMoments else partial(perceptron.exact, cross=cross)
        return run(x, layers), weights, NODES
    z = _limited(x, float(parts.scaling.limit)) if limited else x
    extra = _extrapolation(x, parts)
    if not form.by_member:
        return traced.outputs(z, parts, scale, shift, extra), weights, NODES
    assert parts.members is not None
    outputs = traced.member_outputs(z, parts.members, len(parts.feature_names), scale, shift, extra)
    return outputs, parts.members.weights.numpy(), 1 if parts.noise is not None else NODES


def _limited(x: Any, limit: float) -> Any:
    """Return the smooth limit of :class:`FeatureScale`."""
    z = x.op("Clip", -FARTHEST, FARTHEST)
    return z / ((z * (1 / limit)).square() + 1.0).sqrt()


def _extrapolation(x: Any, parts: Parts) -> Any | None:
    """Return the variance, in the unit of the target, of rows outside the training data; see :class:`FeatureScale`."""
    scaling, reach = parts.scaling, float(parts.scaling.reach) * parts.target_scale
    if not reach:
        return None
    z = x.op("Clip", -FARTHEST, FARTHEST)
    distance = (scaling.lower.numpy() - z).op("Relu") + (z - scaling.upper.numpy()).op("Relu")
    variances = ((distance + 1.0).op("Log") * reach).square()
    return (variances @ np.ones((len(scaling.lower), 1))).op("Squeeze", [1])  # onnxruntime does not reduce zero rows
