"""The report as one self-contained HTML page."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from numpy.typing import NDArray
from scipy import stats

from mpgelu.estimators import conformal
from mpgelu.tables.evaluation import Evaluation, headlines, shown
from mpgelu.tables.model import TableModel
from mpgelu.tables.report import figures
from mpgelu.tables.report.groups import least_sure_groups

_SURPRISES = 12
_COLUMNS = 6  # columns of the input in the tables of rows
_LONGEST_CELL = 24
_MEANINGS = {
    "RMSE": "typical error; large ones count more",
    "MAE": "average size of the error",
    "R²": "share of the variation explained",
    "log-likelihood": "density given to what happened; higher is better",
    "CRPS": "error of the whole distribution; lower is better",
}


def page(model: TableModel, frame: pd.DataFrame, evaluation: Evaluation, level: float, data: str, name: str) -> str:
    """Return the whole page as HTML.

    Args:
        model: The evaluated model.
        frame: The rows it was evaluated on.
        evaluation: Evaluation of these rows.
        level: Level of the intervals.
        data: Name of the data in the text.
        name: Name of the model in the text.
    """
    scores = evaluation.scores()
    average = model.average(evaluation.actual, level).scores()
    groups = least_sure_groups(frame, model.encoder, evaluation.stddev)
    first = [figures.predicted_and_actual(evaluation, model.target, level)]
    trust = [
        figures.calibration(evaluation, _calibrated(model, evaluation)),
        figures.ranks(evaluation),
        figures.coverage_by_width(evaluation, level),
    ]
    doubt = [*([figures.least_sure(groups)] if groups else []), figures.parts(evaluation, model.target)]
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string((files("mpgelu.tables.report") / "page.html").read_text(encoding="utf-8"))
    return template.render(
        target=model.target,
        data=data,
        name=name,
        level=f"{100 * level:g} %",
        rows=f"{len(evaluation.actual):,}",
        trained=f"{model.rows:,}",
        verdict=_verdict(scores, average, evaluation, level, model.regressor.calibration_scores_ is not None),
        cards=_cards(scores, average, level),
        accuracy=first,
        trust=trust,
        doubt=doubt,
        surprises=_rows(_most_surprising(evaluation), model, frame, evaluation),
        unsure=_rows(np.argsort(-evaluation.stddev, kind="stable")[: _SURPRISES // 2], model, frame, evaluation),
        columns=[(column.name, column.summary) for column in model.encoder.columns],
        dropped=model.encoder.dropped,
        calibration_rows=None
        if model.regressor.calibration_scores_ is None
        else len(model.regressor.calibration_scores_),
        held_out=f"{model.regressor.score_:.3f}",
    )


def _cards(scores: dict[str, float], average: dict[str, float], level: float) -> list[tuple[str, str, str, str]]:
    """Return name, value and meaning of each score, with the value of the baseline that predicts the average."""
    meanings = _MEANINGS | {
        f"coverage of {100 * level:g} % intervals": f"should be near {100 * level:g} %",
        "mean width of intervals": "narrower is better, at the same coverage",
    }
    ours, theirs = headlines(scores, level), headlines(average, level)
    return [(name, value, meanings[name], theirs[name]) for name, value in ours.items()]


def _verdict(
    scores: dict[str, float], average: dict[str, float], evaluation: Evaluation, level: float, is_calibrated: bool
) -> list[str]:
    """Return the conclusion of the report in two or three sentences."""
    rows, inside = len(evaluation.actual), int(evaluation.inside.sum())
    gain = 1 - scores["mae"] / average["mae"] if average["mae"] else 0.0
    if gain > 0:
        accuracy = (
            f"It is off by {shown(scores['mae'], 3)} on average, {100 * gain:.0f} % less than predicting the average."
        )
    else:
        accuracy = f"It is off by {shown(scores['mae'], 3)} on average, no better than predicting the average."
    expected = round(level * rows)
    if stats.binomtest(inside, rows, level).pvalue > 0.05:
        honesty = "as promised, within chance"
    elif inside < expected:
        honesty = "too few: the model is too sure of itself"
        honesty += "" if is_calibrated else ", which mpgelu fit --calibrate 0.2 would cure"
    else:
        honesty = "more than promised: the model is too cautious"
    return [
        accuracy,
        f"Its {100 * level:g} % intervals hold {inside:,} of {rows:,} targets; promised were {expected:,}. That is "
        f"{honesty}.",
    ]


def _most_surprising(evaluation: Evaluation) -> NDArray[np.int64]:
    """Return the rows with the least expected actual values, in ascending order of density."""
    tail = np.minimum(evaluation.pit, 1 - evaluation.pit)
    distance = np.abs(evaluation.actual - evaluation.mean) / evaluation.stddev
    return np.lexsort((-distance, tail))[:_SURPRISES]


def _rows(which: NDArray[np.int64], model: TableModel, frame: pd.DataFrame, evaluation: Evaluation) -> dict[str, Any]:
    """Return a table of some rows: number, prediction, actual value, and the first columns of the input."""
    names = [column.name for column in model.encoder.columns[:_COLUMNS]]
    body = []
    for row in which:
        distance = (evaluation.actual[row] - evaluation.mean[row]) / evaluation.stddev[row]
        numbers = (evaluation.actual, evaluation.mean, evaluation.stddev, evaluation.lower, evaluation.upper)
        actual, mean, stddev, lower, upper = (shown(float(values[row])) for values in numbers)
        cells = [_cell(frame[name].iloc[row]) for name in names]
        body.append(
            [f"{frame.index[row] + 1}", actual, mean, stddev, f"{lower} to {upper}", f"{distance:+.1f}", *cells]
        )
    return {"head": ["row", "actual", "predicted", "std. dev.", "interval", "off by, std. devs.", *names], "body": body}


def _cell(value: object) -> str:
    """Return a value as the text of a table cell."""
    text = "" if pd.isna(value) else f"{value:.6g}" if isinstance(value, float) else str(value)  # type: ignore[call-overload]
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _calibrated(model: TableModel, evaluation: Evaluation) -> NDArray[np.float64] | None:
    """Return the observed coverage of calibrated intervals at :data:`figures.LEVELS`; ``None`` without calibration.

    It is NaN at levels above :math:`n / (n + 1)`, which n calibration rows cannot guarantee.
    """
    scores = model.regressor.calibration_scores_
    if scores is None:
        return None
    distance = np.abs(evaluation.actual - evaluation.mean) / evaluation.stddev
    highest = len(scores) / (len(scores) + 1)
    return np.array(
        [
            np.mean(distance <= conformal.quantile(scores, float(level))) if level <= highest else np.nan
            for level in figures.LEVELS
        ]
    )
