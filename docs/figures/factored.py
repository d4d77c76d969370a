"""The factored covariance, drawn.

The covariance of 24 units after three layers of an MP-GELU network, for one row: a sum of a few blocks, one for every
place where randomness entered, and a diagonal. No block is ever formed as a matrix; what is kept is its thin factor.
(Colours show the root of a covariance with its sign: red positive, blue negative.)
"""

from __future__ import annotations

import itertools
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from style import INK

import mpgelu


def draw() -> Figure:
    """The whole matrix and its blocks, in one scale."""
    torch.manual_seed(5)
    n = 24
    widths = (6, n, n, n)
    layers: list[torch.nn.Module] = [mpgelu.Dropout(0.3)]
    for before, after in itertools.pairwise(widths):
        layers += [mpgelu.Linear(before, after), mpgelu.MPGELU()]
    with torch.no_grad():
        h = torch.nn.Sequential(*layers)(mpgelu.FactoredMoments.certain(1.5 * torch.randn(1, 6), max_rank=math.inf))
    parts = [block.dense[0].detach().numpy() for block in h.blocks]
    residual = np.diag(h.residual[0].detach().numpy())
    titles = ["covariance", "dropout of the input", "masks of layer 1", "masks of layer 2", "masks of layer 3"]
    pictures = [sum(parts) + residual, *parts, residual]
    pictures = [np.sign(picture) * np.sqrt(np.abs(picture)) for picture in pictures]
    limit = 0.8 * np.abs(pictures[0]).max()

    figure, axes = plt.subplots(1, len(pictures), figsize=(9.0, 1.95))
    for place, (ax, picture, title) in enumerate(zip(axes, pictures, titles, strict=True)):
        ax.imshow(picture, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        ax.set_title(title, fontsize=8.5, loc="center")
        ax.set(xticks=[], yticks=[])
        ax.grid(visible=False)
        rank = "" if place == 0 else f"rank {h.blocks[place - 1].rank}" if place <= len(parts) else "diagonal"
        ax.set_xlabel(rank, fontsize=8.5)
        if place:
            ax.text(
                -0.16,
                0.5,
                "=" if place == 1 else "+",
                transform=ax.transAxes,
                ha="center",
                va="center",
                color=INK,
                fontsize=15,
            )
    return figure
