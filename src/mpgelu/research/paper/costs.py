"""What the experiments cost, from the seconds that the records carry."""

from __future__ import annotations

import math

import pandas as pd

from mpgelu.research.paper.layout import markdown, show_number
from mpgelu.research.paper.tables import NETWORKS, PAPER_SPLITS, PUBLISHED_SPLITS, RATES

_LARGE = ("kin8nm", "naval", "power", "protein")
_VALIDATION_SHARE = 0.8  # of the training rows, hence of the time, that a model of the grid search takes
_COVARIANCES = ("diagonal", "full")


def costs(frame: pd.DataFrame) -> str:
    """Minutes that training the models of seed 0 took, and what the complete protocol would take.

    Minutes are those of the wall clock of one process, divided over the models of a stack, so that they are longer
    where other work shared the machine. Complete means the grid search and the test on every published split, both
    numbers of outputs, estimated from the mean seconds of the models there are. A cell without its own grid search is
    extrapolated from the models that it was tested with.

    Args:
        frame: The records of a store.

    Returns:
        A section in Markdown.
    """
    models = frame[frame["kind"].isin(("validation", "test")) & (frame["seed"] == 0)]
    models = models.assign(group=models["dataset"].where(models["dataset"].isin(_LARGE), "small sets"))
    taken = models.groupby(["group", "nonlinearity", "covariance"])["seconds"].sum() / 60
    complete = _complete(models).groupby(["group", "nonlinearity", "covariance"]).sum() / 60
    columns = [(network, covariance) for network in NETWORKS for covariance in _COVARIANCES]
    head = ["", *(f"{NETWORKS[network]}, {covariance}" for network, covariance in columns)]
    body = [
        [group, *(_cell(taken, complete, (group, *column)) for column in columns)]
        for group in ("small sets", *_LARGE)
        if group in set(models["group"])
    ]
    note = (
        "Minutes by the wall clock that one single-threaded process spent on the models of seed 0, searches included; "
        "they were trained with different versions of the kernels, and other work shared the machine, so that they are "
        "upper bounds. In brackets an estimate of the paper's whole protocol, the search and the test on every "
        "published split, from the mean minutes of the models there are."
    )
    total = f"Together {taken.sum() / 60:.1f} hours, and {complete.sum() / 60:.1f} for the whole protocol."
    return f"## What it costs\n\n{note}\n\n{markdown(head, body)}\n\n{total}\n"


def _complete(models: pd.DataFrame) -> pd.Series:
    """Seconds of the complete protocol, for each cell that has a tested model."""
    cell = ["group", "dataset", "nonlinearity", "covariance", "outputs"]
    mean = models.groupby([*cell, "kind"])["seconds"].mean().unstack("kind").reindex(columns=["validation", "test"])
    mean = mean.dropna(subset=["test"])
    splits = mean.index.get_level_values("dataset").map(lambda name: PUBLISHED_SPLITS.get(name, PAPER_SPLITS))
    validation = mean["validation"].fillna(_VALIDATION_SHARE * mean["test"])
    return splits * (mean["test"] + len(RATES) * validation)


def _cell(taken: pd.Series, complete: pd.Series, key: tuple[str, str, str]) -> str:
    return f"{show_number(taken.get(key, math.nan), '.0f')} ({show_number(complete.get(key, math.nan), '.0f')})"
