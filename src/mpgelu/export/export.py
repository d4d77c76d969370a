"""One file that holds everything between raw features and the predictive distribution."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mpgelu.errors import InputError
from mpgelu.estimators import conformal
from mpgelu.estimators.ensemble import Ensemble
from mpgelu.estimators.recipe import Covariance
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.inspect.parts import Parts, parts_of
from mpgelu.likelihoods import Gaussian, HeteroscedasticGaussian
from mpgelu.storage.files import write_atomically
from mpgelu.tables.cells import MISSING
from mpgelu.tables.model import TableModel

_ROUNDING = 1e-7  # of a standardised feature
_FOLDED = 1e6  # larger scales of features are not left to weights, lest squares overflow
_NODES = 32  # components of each network's mixture over the noise, as in the library


def export_onnx(
    model: MPGELURegressor | TableModel | Ensemble | nn.Module,
    path: str | os.PathLike[str],
    levels: Sequence[float] = (0.05, 0.5, 0.95),
    *,
    features: int | Sequence[str] | None = None,
    likelihood: Gaussian | HeteroscedasticGaussian | None = None,
    covariance: Covariance = "exact",
) -> None:
    """Write a model as one ONNX graph, which onnxruntime runs without torch and without this library.

    The graph takes ``features``, raw ones, float32 ``(rows, n)``, any number of rows at a time. Scales, networks,
    moments and likelihood are inside. It gives, float32 and in the unit of the target, ``mean``, ``stddev``,
    ``epistemic`` and ``aleatoric`` (variances), each ``(rows,)``, and ``quantiles`` ``(rows, len(levels))``. Its
    metadata hold the texts ``feature_names`` and ``levels``, both JSON, and ``version``.

    A calibrated estimator also gives ``lower`` and ``upper``, the ends of its calibrated interval, whose level is what
    lies between the first of the levels and the last, so long as these are symmetric: 0.9 by default. The features of
    a :class:`TableModel` are its encoded columns; how they are made is in the metadata as ``columns``, and what counts
    as a missing cell as ``missing``, both JSON.

    The numbers are the library's to float32 rounding. Quantiles are roots of the distribution function of the same
    mixture; at levels below 0.001 or above 0.999 rounding leaves them fewer digits.

    Networks of linear layers, dropout and MP-GELU become a graph made for them; others are traced by torch, which
    takes longer and gives more nodes.

    Args:
        model: a fitted estimator or model of a table, an ensemble, or a network.
        path: of the file.
        levels: probabilities of the quantiles, strictly between 0 and 1; may be empty.
        features: names of the features, or how many; estimators and networks with a linear layer know how many.
        likelihood: of a network; by default heteroscedastic for two outputs, Gaussian of unit noise for one.
        covariance: how a network propagates moments; an estimator or ensemble knows.

    Example:
        >>> import mpgelu, numpy, onnxruntime
        >>> path = getfixture("tmp_path") / "network.onnx"
        >>> export_onnx(mpgelu.network(3), path)
        >>> session = onnxruntime.InferenceSession(path)
        >>> mean, stddev = session.run(["mean", "stddev"], {"features": numpy.zeros((7, 3), "float32")})
        >>> stddev.shape
        (7,)
    """
    levels = [float(level) for level in levels]
    if not all(0 < level < 1 for level in levels):
        raise InputError(f"export_onnx: levels must lie strictly between 0 and 1, got {levels}")
    try:
        from mpgelu.export.distribution import distribution
        from mpgelu.export.graph import Graph
    except ImportError as error:
        raise InputError(f"export_onnx: needs the package {error.name}; pip install 'mpgelu[onnx]'") from error
    about = {"levels": json.dumps(levels), "version": version("mpgelu")}
    if isinstance(model, TableModel):
        about |= {
            "columns": json.dumps(_columns(model)),
            "missing": json.dumps(sorted(MISSING)),
            "target": model.target,
        }
        model, features = model.regressor, model.encoder.features
    parts = parts_of("export_onnx", model, features=features, likelihood=likelihood, covariance=covariance)
    graph = Graph()
    offset = parts.target_mean if len(parts.networks) == 1 and not levels else 0.0  # where no digits are lost by it
    outputs = _outputs(graph.value("features"), parts, offset, cross=bool(levels))
    noise = None
    if isinstance(parts.likelihood, Gaussian):
        noise = parts.likelihood.noise_variance.item() * parts.target_scale**2
    found = distribution(outputs, parts.weights.numpy(), noise, levels, _NODES)
    rest = parts.target_mean - offset
    mean = found.mean + rest if rest else found.mean
    results: dict[str, Any] = {"mean": (mean, ["rows"])}
    results |= {name: (getattr(found, name), ["rows"]) for name in ("stddev", "epistemic", "aleatoric")}
    if found.quantiles is not None:
        results["quantiles"] = ((found.quantiles + mean).op("Transpose", perm=[1, 0]), ["rows", len(levels)])
    stddevs = _calibrated(getattr(model, "calibration_scores_", None), levels)
    if stddevs is not None:
        width = found.stddev * stddevs
        results |= {"lower": (mean - width, ["rows"]), "upper": (mean + width, ["rows"])}
    about |= {"feature_names": json.dumps(list(parts.feature_names))}
    content = graph.model({"features": ["rows", len(parts.feature_names)]}, results, about).SerializeToString()
    write_atomically(Path(path), content)


def _columns(model: TableModel) -> list[dict[str, Any]]:
    """What is needed to encode the columns of a table, and no more of the training data."""
    wanted = ("kind", "name", "median", "categories", "other", "indicator")
    columns = model.encoder.described()["columns"]
    return [{name: column[name] for name in wanted if name in column} for column in columns]


def _calibrated(scores: NDArray[np.float64] | None, levels: Sequence[float]) -> float | None:
    """Half the width of the calibrated interval between the outer levels in standard deviations, if there is one."""
    if scores is None or len(levels) < 2 or levels[0] == levels[-1] or abs(levels[0] + levels[-1] - 1) > 1e-9:
        return None
    try:
        return conformal.quantile(scores, abs(levels[-1] - levels[0]))
    except InputError as error:
        warnings.warn(f"export_onnx: lower and upper are left out: {error}", stacklevel=3)
        return None


def _centred(features: Any, parts: Parts) -> Any:
    """Features without their means; where float32 rounds a mean, the rest is subtracted from the difference."""
    mean, scale = parts.feature_mean.numpy(), parts.feature_scale.numpy()
    rest = mean - mean.astype(np.float32)
    x = features - mean if mean.any() else features
    return x - rest if np.abs(rest / scale).max() > _ROUNDING else x


def _outputs(features: Any, parts: Parts, offset: float, cross: bool) -> Any:
    """Moments of the networks' outputs in the target's unit: the mean times its scale, the log-variance shifted."""
    from mpgelu.export import perceptron, traced
    from mpgelu.export.layers import layers_of

    two = isinstance(parts.likelihood, HeteroscedasticGaussian)
    scale = np.array([parts.target_scale, 1.0] if two else [parts.target_scale])
    shift = np.array([offset, 2 * np.log(parts.target_scale)] if two else [offset])
    x, unit = _centred(features, parts), parts.feature_scale.numpy()
    layers = layers_of(parts.networks)
    if layers is None or unit.min() < 1 / _FOLDED or unit.max() > _FOLDED:
        x, unit = x * (1 / unit), np.ones_like(unit)
    if layers is None:
        return traced.outputs(x, parts.networks, parts.covariance, scale, shift)
    layers[0] = layers[0].of_inputs(unit)
    layers[-1] = layers[-1].scaled(scale, shift)
    return perceptron.exact(x, layers, cross) if parts.covariance == "exact" else perceptron.diagonal(x, layers)
