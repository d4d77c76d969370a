"""Printed output of the commands for tables: columns, training, scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:  # torch takes seconds to import, which --help need not wait for
    from mpgelu.tables import TableEncoder
    from mpgelu.tables.evaluation import Evaluation
    from mpgelu.tables.model import TableModel


def print_columns(encoder: TableEncoder) -> None:
    """Print how each column is encoded, or why it is not used."""
    rows = {column.name: column.summary for column in encoder.columns}
    rows |= {name: f"not used: {reason}" for name, reason in encoder.dropped.items()}
    width = max(map(len, rows))
    for name, what in rows.items():
        typer.echo(f"  {name:{width}}  {what}")


def print_training(model: TableModel) -> None:
    r"""Print the number of training rows and the cross-validated log-likelihood of a model.

    It is compared with that of a Gaussian with mean and standard deviation s of the training targets,
    :math:`-\log s - \tfrac12 \log(2 \pi e)` per row.
    """
    from mpgelu.estimators.distillation import COMPACT

    average = -math.log(float(model.regressor.ensemble_.target_scale)) - 0.5 * math.log(2 * math.pi * math.e)
    typer.echo(
        f"trained on {model.rows:,} rows; cross-validated log-likelihood {model.regressor.score_:.3f} "
        f"(predicting the average: {average:.3f})"
    )
    if COMPACT in model.regressor.kind_weights_:
        typer.echo("one network, distilled: its score is the ensemble's less an estimate of what distilling lost")
    if (scores := model.regressor.calibration_scores_) is not None:
        typer.echo(f"intervals calibrated on {len(scores):,} further rows")


def print_scores(model: TableModel, evaluation: Evaluation, level: float) -> dict[str, dict[str, float]]:
    """Print the scores of a model and of predicting the average of the training targets.

    Args:
        model: The model.
        evaluation: Its predictions and the targets.
        level: Probability of the intervals.

    Returns:
        Scores by name, for ``"model"`` and for ``"average"``.
    """
    from mpgelu.tables.evaluation import headlines

    scores = {
        "model": evaluation.scores(),
        "average": model.average(evaluation.actual, level).scores(),
    }
    ours, average = (headlines(part, level) for part in scores.values())
    width = max(map(len, ours))
    typer.echo(f"{'':{width}}  {'model':>12}  {'predicting the average':>22}")
    for name in ours:
        typer.echo(f"{name:{width}}  {ours[name]:>12}  {average[name]:>22}")
    return scores
