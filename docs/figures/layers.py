"""Five layers.

Each layer of the package uses those to its left; inside a layer a part uses those above it.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import BLUE, GOLD, GREEN, INK, MUTED, ORANGE, VIOLET

LAYERS = {
    "mathematics": (BLUE, ("moments", "rules", "layers", "predictive", "likelihoods")),
    "networks": (GREEN, ("networks", "training")),
    "models": (ORANGE, ("estimators", "tables")),
    "instruments": (VIOLET, ("inspect", "convert", "export")),
    "surface": (GOLD, ("research", "cli")),
}


def draw() -> Figure:
    """A column for each layer, a box for each part."""
    figure, axes = plt.subplots(figsize=(8.4, 3.2))
    for column, (layer, (color, parts)) in enumerate(LAYERS.items()):
        axes.text(column + 0.4, 5.25, layer, ha="center", weight="bold", color=INK)
        for row, part in enumerate(parts):
            box = FancyBboxPatch((column + 0.02, 4.2 - row), 0.76, 0.62, boxstyle="round,pad=0.02,rounding_size=0.12")
            box.set(facecolor=color, alpha=0.25, edgecolor=color)
            axes.add_patch(box)
            axes.text(column + 0.4, 4.51 - row, part, ha="center", va="center", color=INK, fontsize=9.5)
        if column:
            arrow = {"arrowstyle": "-|>", "color": MUTED, "lw": 1.2}
            axes.annotate("", (column - 0.02, 5.35), (column - 0.2, 5.35), arrowprops=arrow)
    axes.set(xlim=(-0.05, 4.85), ylim=(0, 5.7))
    axes.axis("off")
    return figure
