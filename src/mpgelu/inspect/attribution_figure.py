"""The figure of the result of :func:`mpgelu.attribute`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from mpgelu.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_attribution(frame: pd.DataFrame, rows: Sequence[int] | None = None) -> Figure:
    """Draw the contributions to the variance: stacked bars for some rows, and a ranking, without the noise, over all.

    Args:
        frame: The result of :func:`attribute`.
        rows: Rows to draw as bars; by default eight, at equal steps of the rank of their variance.

    Returns:
        A matplotlib figure, which is not shown.

    Raises:
        InputError: A row does not exist.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    groups = _grouped(frame)
    table = groups.pivot_table(index="row", columns="source", values="variance", aggfunc="sum")
    order = table.sum().sort_values(ascending=False).index
    if rows is None:
        by_size = table.sum(axis=1).sort_values().index
        rows = by_size[np.unique(np.linspace(0, len(by_size) - 1, min(8, len(by_size))).round().astype(int))].tolist()
    if missing := [row for row in rows if row not in table.index]:
        raise InputError(f"plot_attribution: there is no row {missing[0]}; there are {len(table)} rows")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, ranking = figure.subplots(1, 2, width_ratios=[3, 2])
    chosen, bottom = table.loc[list(rows), order], np.zeros(len(rows))
    for color, source in zip(itertools.cycle(colormaps["tab20"].colors), order, strict=False):  # type: ignore[attr-defined]
        bars.bar([str(row) for row in rows], chosen[source], bottom=bottom, label=source, color=color)
        bottom = bottom + chosen[source].to_numpy()
    bars.set(xlabel="row", ylabel="variance", title="Where the variance of some rows comes from")
    bars.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    rest = frame[frame.kind != "noise"]  # the noise is often most of the variance and would hide the others
    top = rest.assign(name=_names(rest)).groupby("name").variance.sum().nlargest(15)[::-1]
    ranking.barh(list(top.index), 100 * top / rest.variance.sum())
    noise = 1 - rest.variance.sum() / frame.variance.sum()
    ranking.set(xlabel="% of the remaining variance, over all rows", title=f"Without the noise ({noise:.0%})")
    return figure


def _grouped(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with an additional column ``source``, which joins kind and layer."""
    return frame.assign(source=(frame.kind + " " + frame.layer.where(frame.kind != "input", "")).str.strip())


def _names(frame: pd.DataFrame) -> pd.Series:
    """Return the name of the source and unit of each line."""
    return (_grouped(frame).source + " " + frame.unit).str.strip()
