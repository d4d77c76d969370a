"""Errors of the features: the estimator's ``input_std`` beside averages over random inputs of the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpgelu.estimators import MPGELURegressor
from mpgelu.research.bench.sections import Rows, Settings
from mpgelu.research.datasets import Dataset, load_diabetes, load_uci

DATASETS = ("boston", "energy", "yacht")
ERRORS = (0.05, 0.2, 0.5)
DRAWS, ROWS = 20_000, 20
_AT_ONCE = 5_000  # random inputs


def feature_errors(settings: Settings) -> Rows:
    """Mean and standard deviation of predictions with errors of all features, against random inputs.

    A default model of each set, fitted to the training rows of split 0, predicts the first test rows. The
    errors are in standard deviations of the features. Differences of means are in standard deviations of the
    prediction, those of standard deviations relative: largest and average over the rows, beside the largest standard
    error of the random inputs themselves.
    """
    table: Rows = []
    for name, (X, y), rows in _tables(settings.quick):
        steps, draws = (20, 200) if settings.quick else (None, DRAWS)
        model = MPGELURegressor(steps=steps, random_state=0).fit(X, y)
        for error in ERRORS[:1] if settings.quick else ERRORS:
            found = _compared(model, rows, error * X.std(0), draws)
            table.append(
                {"set": name, "error": error, "rows": len(rows), "draws": draws, "steps": model.n_iter_, **found}
            )
    return table


def by_set(rows: Rows) -> Rows:
    """The table of the documentation: a line for each error and quantity, a column for each set.

    Args:
        rows: The result of :func:`feature_errors`.
    """
    table: Rows = []
    for error in dict.fromkeys(row["error"] for row in rows):
        for quantity, form in (("mean", "{:.3f}"), ("stddev", "{:.1%}")):
            words = "mean, in standard deviations" if quantity == "mean" else "standard deviation"
            line: dict[str, Any] = {"error": f"{error:g}: {words}"}
            for row in (row for row in rows if row["error"] == error):
                worst, average, unsure = (form.format(row[f"{quantity} {name}"]) for name in ("worst", "average", "se"))
                line[row["set"].capitalize()] = f"{worst} ({average}; {unsure})"
            table.append(line)
    return table


def _tables(quick: bool) -> Iterator[tuple[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], Any]]:
    """Name, training rows and the test rows to predict, of each set."""
    if quick:
        data: Dataset = load_diabetes()
        yield "diabetes", (data.X[:60], data.y[:60]), data.X[60:62]
        return
    for name in DATASETS:
        data = load_uci(name)
        train, test = data.splits[0].train, data.splits[0].test
        yield name, (data.X[train], data.y[train]), data.X[test][:ROWS]


def _compared(model: MPGELURegressor, X: Any, input_std: Any, draws: int) -> dict[str, float]:
    """Largest and average differences over the rows, and the largest standard errors."""
    mean, stddev = (torch.as_tensor(part) for part in model.predict(X, return_std=True, input_std=input_std))
    rng = np.random.default_rng(0)
    sampled = [_sampled(model, row + input_std * rng.standard_normal((draws, len(row)))) for row in X]
    true_mean, true_stddev, mean_se, stddev_se = torch.stack(sampled).unbind(-1)
    return {
        **_summary("mean", (mean - true_mean).abs() / true_stddev, mean_se / true_stddev),
        **_summary("stddev", (stddev / true_stddev - 1).abs(), stddev_se / true_stddev),
    }


def _summary(name: str, errors: Tensor, se: Tensor) -> dict[str, float]:
    found = {"worst": errors.max(), "average": errors.mean(), "se": se.max()}
    return {f"{name} {word}": value.item() for word, value in found.items()}


def _sampled(model: MPGELURegressor, inputs: Any) -> Tensor:
    """Mean and standard deviation of the target over random inputs of one row, and the standard errors of both."""
    parts: Sequence[Any] = [model.predict(some, return_std=True) for some in np.split(inputs, _cuts(len(inputs)))]
    means, stddevs = (torch.as_tensor(np.concatenate(part)) for part in zip(*parts, strict=True))
    mean = means.mean()
    squares = (means - mean).square() + stddevs.square()
    stddev, root = squares.mean().sqrt(), len(means) ** 0.5
    return torch.stack([mean, stddev, means.std() / root, squares.std() / root / (2 * stddev)])


def _cuts(count: int) -> list[int]:
    return list(range(_AT_ONCE, count, _AT_ONCE))
