"""The score approaches the truth as rows grow.

A synthetic problem with known noise. The numbers are those of `results/scale/scale.json`, which
`python -m mpgelu.research.scale` measured; nothing is trained here.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from style import BLUE, MUTED, ORANGE

NUMBERS = Path(__file__).parents[2] / "results" / "scale" / "scale.json"


def draw() -> Figure:
    """Two panels: nats below the log density of the truth, and the error of the mean."""
    found = json.loads(NUMBERS.read_text(encoding="utf-8"))["growth"]
    rows = np.array([numbers["rows"] for numbers in found])
    streamed = np.array([numbers["streamed"] for numbers in found])
    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.2), sharex=True)
    for ax, name, title in (
        (axes[0], "gap", "Nats per row below the truth"),
        (axes[1], "rmse_of_mean", "Error of the mean, root mean square"),
    ):
        values = np.array([numbers[name] for numbers in found])
        ax.loglog(rows, values, color=MUTED, lw=1.2, zorder=1)
        ax.plot(rows[~streamed], values[~streamed], "o", color=BLUE, label="in memory", mew=0)
        ax.plot(rows[streamed], values[streamed], "s", color=ORANGE, label="streamed from Parquet", mew=0)
        ax.set_title(title)
        ax.set_xlabel("rows")
        ax.yaxis.set_minor_formatter(NullFormatter())
    axes[0].errorbar(rows, [n["gap"] for n in found], [2 * n["gap_se"] for n in found], fmt="none", ecolor=MUTED, lw=1)
    noise = 0.1
    axes[1].axhline(noise, color=MUTED, ls=":", lw=1.2)
    axes[1].annotate("smallest noise", (rows[-1], noise), ha="right", va="bottom", color=MUTED, fontsize=8.5)
    axes[0].legend(loc="lower left")
    return figure
