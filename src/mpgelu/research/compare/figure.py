"""Score against fit time, one point for each method."""

from __future__ import annotations

import io
import math
from typing import Any

import matplotlib.figure
import matplotlib.ticker
import numpy as np
import pandas as pd

from mpgelu.research.compare.methods import METHODS
from mpgelu.research.compare.ranks import compared
from mpgelu.research.compare.summary import summarise
from mpgelu.research.datasets import SETS

_OURS, _PEER = "#d95f02", "#1f78b4"
_FEW_ROWS = 2_000
_SIDES = {"data sets below 2,000 rows": (0, _FEW_ROWS), "larger data sets": (_FEW_ROWS, np.inf)}
_PLAIN = matplotlib.ticker.FormatStrFormatter("%g")
_METRICS = {"crps": "CRPS", "rmse": "RMSE"}


def places(frame: pd.DataFrame, metric: str, rows: tuple[float, float]) -> pd.DataFrame:
    """Return mean relative scores and times of the methods over data sets whose number of rows is in an interval.

    Args:
        frame: Records, as from `Store.frame`.
        metric: "crps" or "rmse".
        rows: The interval, its end excluded.

    Returns:
        One row per method: `sets`, `ratio`, the geometric mean of its score over the best score of each set, and
        `seconds`, the geometric mean of its fit time.
    """
    times = summarise(frame)[["method", "dataset", "fit_cpu_seconds"]]
    scored = compared(frame, metric).merge(times, on=["method", "dataset"])
    sizes = scored["dataset"].map({name: published.rows for name, published in SETS.items()}).astype(float)
    scored = scored[(sizes >= rows[0]) & (sizes < rows[1])]
    logs = pd.DataFrame(
        {
            "method": scored["method"],
            "ratio": np.log(scored["score"] / scored.groupby("dataset")["score"].transform("min")),
            "seconds": np.log(scored["fit_cpu_seconds"]),
        }
    )
    grouped = logs.groupby("method")
    means = grouped[["ratio", "seconds"]].mean().map(math.exp)
    return means.assign(sets=grouped.size()).reset_index()


def draw(frame: pd.DataFrame) -> bytes:
    """CRPS and RMSE, relative to the best of each data set, against fit time; a PNG file.

    Args:
        frame: Records, as from `Store.frame`.
    """
    figure = matplotlib.figure.Figure(figsize=(12, 9), layout="constrained")
    panels = figure.subplots(len(_METRICS), len(_SIDES), squeeze=False)
    for line, (metric, words) in zip(panels, _METRICS.items(), strict=True):
        for axes, (title, rows) in zip(line, _SIDES.items(), strict=True):
            found = places(frame, metric, rows)
            axes.set_visible(len(found) > 0)
            _draw_panel(axes, found)
            axes.set_title(f"{words}, {title}", fontsize=10)
            axes.set_ylabel(f"{words} over the best of each set", fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()


def _draw_panel(axes: Any, found: pd.DataFrame) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(_PLAIN)
    axes.margins(x=0.2)
    axes.set_xlabel("fit, seconds of one processor (geometric mean)", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    most = found["sets"].max()
    for _, row in found.iterrows():
        recipe = METHODS[row["method"]]
        few = "" if row["sets"] == most else f" ({row['sets']} of {most} sets)"
        colour = _OURS if recipe.ours else _PEER
        axes.plot(row["seconds"], row["ratio"], "o", color=colour)
        axes.annotate(
            f"{recipe.title}{few}", (row["seconds"], row["ratio"]), (4, 4), textcoords="offset points", fontsize=8
        )
