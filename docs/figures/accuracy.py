"""Error against time: sampling of masks with more and more draws, and propagated moments.

Two hidden layers of 64 units on diabetes data. Monte Carlo dropout is in its fastest form. The numbers are those of
`results/bench/bench.json`, which `mpgelu bench --sections accuracy` measured; nothing is timed here.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from style import BLUE, GREEN, MUTED, ORANGE, VIOLET

NUMBERS = Path(__file__).parents[2] / "results" / "bench" / "bench.json"
COLOURS = {
    "MP-GELU exact (factored)": ORANGE,
    "MP-GELU diagonal": BLUE,
    "ReLU moments, exact covariance": GREEN,
    "ReLU moments, diagonal": VIOLET,
}


def draw() -> Figure:
    """Two panels: the error of the mean and that of the standard deviation."""
    rows = json.loads(NUMBERS.read_text(encoding="utf-8"))["accuracy"]
    sampled = [row for row in rows if row["method"].startswith("MC dropout")]
    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.6), sharex=True, sharey=True)
    for ax, error, title in (
        (axes[0], "mean error", "Error of the mean, in std"),
        (axes[1], "stddev error", "Relative error of the std"),
    ):
        ax.loglog(*_curve(sampled, error), "o-", color=MUTED, ms=4, mew=0, lw=1.2, label="MC dropout")
        for row, side, above in ((sampled[0], "left", 8), (sampled[-1], "right", -14)):
            words, at = row["method"].removeprefix("MC dropout, "), (row["ms"], row[error])
            ax.annotate(words, at, (0, above), textcoords="offset points", ha=side, color=MUTED, fontsize=8.5)
        for method, colour in COLOURS.items():
            row = next(row for row in rows if row["method"] == method)
            ax.plot(row["ms"], row[error], "s", color=colour, ms=7, mew=0, label=method)
        ax.set_title(title)
        ax.set_xlabel(f"milliseconds for {rows[0]['rows']} rows")
    axes[0].set_ylim(top=3)
    axes[0].legend(loc="center right", bbox_to_anchor=(1, 0.4))
    return figure


def _curve(rows: list[dict[str, float]], error: str) -> tuple[list[float], list[float]]:
    return [row["ms"] for row in rows], [row[error] for row in rows]
