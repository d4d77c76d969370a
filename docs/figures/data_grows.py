"""What more data do.

The same problem with 15, 60 and 240 points, whose noise has a standard deviation of 0.25; the numbers under the panels
are averages. With few points the model cannot tell noise from not knowing, and says too much of both. With more, the
epistemic part goes on falling, and the aleatoric part settles at the noise.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from style import BLUE, INK, MUTED, ORANGE

from mpgelu import MPGELURegressor

NOISE = 0.25


def draw() -> Figure:
    """Three panels, and the two parts averaged over the data."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-3, 3, 240)
    y = np.sin(1.6 * x) + NOISE * generator.normal(size=240)
    grid = np.linspace(-3, 3, 121)
    figure, axes = plt.subplots(1, 3, figsize=(8.8, 3.4), sharey=True)
    for ax, rows in zip(axes, (15, 60, 240), strict=True):
        model = MPGELURegressor(random_state=0, noise="homoscedastic").fit(x[:rows, None], y[:rows])
        mean, epistemic, aleatoric = model.predict_parts(grid[:, None])
        total = np.hypot(epistemic, aleatoric)
        ax.fill_between(grid, mean - 2 * total, mean + 2 * total, color=ORANGE, alpha=0.28, lw=0, label="total, ± 2 sd")
        ax.fill_between(
            grid, mean - 2 * epistemic, mean + 2 * epistemic, color=BLUE, alpha=0.42, lw=0, label="epistemic, ± 2 sd"
        )
        ax.plot(grid, np.sin(1.6 * grid), ":", color=MUTED, lw=1.2, label="truth")
        ax.plot(grid, mean, color=BLUE, label="mean")
        ax.plot(x[:rows], y[:rows], ".", ms=4, color=INK, alpha=0.5, mew=0, label="data")
        ax.set_title(f"{rows} points")
        said = f"x\nepistemic {np.mean(epistemic):.2f}, aleatoric {np.mean(aleatoric):.2f}"
        ax.set_xlabel(said, fontsize=9)
    axes[0].set(ylim=(-2.4, 2.4), ylabel="y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, columnspacing=1.4)
    return figure
