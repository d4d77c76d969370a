"""The factored covariance, layer by layer.

One row of data goes through dropout and three layers of 16 MP-GELU units. A mask adds a diagonal: randomness that no
other unit shares. The next linear map turns this diagonal into a block, and transforms the older blocks. Each block is
drawn as the matrix that it stands for; what is stored is its thin factor. Colours show the root of a covariance with
its sign, each step in its own scale: red is positive, blue negative.
"""

from __future__ import annotations

import itertools
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from style import BLUE, INK, MUTED, Motion

import mpgelu

UNITS, FEATURES, DEPTH = 16, 6, 3
SOURCES = ["dropout of\nthe input", *(f"masks of\nlayer {layer}" for layer in range(1, DEPTH + 1))]
STEPS = ["dropout", *itertools.chain(*((f"linear {n}", f"MP-GELU {n}") for n in range(1, DEPTH + 1)))]
MOTION = Motion(order=[0, *range(len(STEPS)), len(STEPS) - 1], seconds=1.5, still=len(STEPS) - 1)


def draw() -> Figure:
    """One set of axes for every matrix of every step, all in the same places."""
    figure = plt.figure(figsize=(8.8, 2.7), layout="none")
    for step, (title, moments) in enumerate(zip(STEPS, _moments(), strict=True)):
        parts = [block.dense[0].detach().numpy() for block in moments.blocks]
        if moments.residual is not None:
            parts.append(np.diag(moments.residual[0].detach().numpy()))
        _step(figure, step, title, parts, [block.rank for block in moments.blocks])
    for place, title in enumerate(STEPS):
        figure.text(_centre(place, len(STEPS)), 0.93, title, ha="center", color=MUTED, fontsize=9)
    return figure


def _moments() -> list[mpgelu.FactoredMoments]:
    """Of one row, after every layer that changes them."""
    torch.manual_seed(5)
    layers: list[torch.nn.Module] = [mpgelu.Dropout(0.3)]
    for before, after in itertools.pairwise((FEATURES, *[UNITS] * DEPTH)):
        layers += [mpgelu.Linear(before, after), mpgelu.MPGELU()]
    moments = mpgelu.FactoredMoments.certain(1.5 * torch.randn(1, FEATURES), max_rank=math.inf)
    found = []
    with torch.no_grad():
        for layer in layers:
            moments = layer(moments)
            found.append(moments)
    return found


def _centre(place: int, places: int) -> float:
    return 0.02 + 0.96 * (place + 0.5) / places


def _step(figure: Figure, step: int, title: str, parts: list[np.ndarray], ranks: list[int]) -> None:
    frame = f"frame-{step}"
    here = {"ha": "center", "weight": "bold", "color": BLUE, "fontsize": 9, "gid": f"{frame}-title"}
    figure.text(_centre(step, len(STEPS)), 0.84, "▲", **here)
    whole = sum(parts)
    limit = np.sqrt(np.abs(whole).max())
    places = DEPTH + 2
    for place, matrix in enumerate([whole, *parts]):
        axes = figure.add_axes((_centre(place, places) - 0.075, 0.24, 0.15, 0.15 * 8.8 / 2.7), gid=f"{frame}-{place}")
        axes.imshow(
            np.sign(matrix) * np.sqrt(np.abs(matrix)), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
        )
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        name = "covariance" if place == 0 else SOURCES[place - 1]
        kind = "" if place == 0 else f"rank {ranks[place - 1]}" if place <= len(ranks) else "diagonal"
        axes.set_xlabel(f"{name}\n{kind}" if kind else name, fontsize=8.5)
        if place:
            sign = "=" if place == 1 else "+"
            axes.text(-0.14, 0.5, sign, transform=axes.transAxes, ha="center", va="center", color=INK, fontsize=14)
