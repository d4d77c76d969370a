"""Where there are no data.

Left: one network with dropout. Its band grows with the size of the activations and knows nothing of the gap. Middle:
eight networks disagree in the gap. Right: the estimator, which also counts the distance from the training range.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, INK, MUTED, ORANGE

import mpgelu


def draw() -> Figure:
    """The same 120 points, three models."""
    generator = np.random.default_rng(2)
    x = np.concatenate([generator.uniform(-3, -0.9, 60), generator.uniform(0.9, 3, 60)])
    y = np.sin(2 * x) + 0.12 * generator.normal(size=120)
    grid = np.linspace(-5, 5, 181)
    figure, axes = plt.subplots(1, 3, figsize=(8.8, 3.4), sharey=True)
    model = mpgelu.MPGELURegressor(random_state=0, noise="homoscedastic").fit(x[:, None], y)
    parts = model.predict_parts(grid[:, None])
    _panel(axes[0], "One network", x, y, grid, *_networks(x, y, grid, 1))
    _panel(axes[1], "Eight networks", x, y, grid, *_networks(x, y, grid, 8))
    _panel(axes[2], "The estimator", x, y, grid, *parts)
    axes[0].set_ylabel("y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, columnspacing=1.4)
    return figure


def _networks(x: np.ndarray, y: np.ndarray, grid: np.ndarray, members: int) -> list[np.ndarray]:
    torch.manual_seed(0)
    stack = mpgelu.Stack([mpgelu.network(1, (64, 64), rate=0.005) for _ in range(members)])
    likelihood = mpgelu.HeteroscedasticGaussian()
    rows = (2 * torch.tensor(x, dtype=torch.float32)[:, None], torch.tensor(y, dtype=torch.float32))
    mpgelu.fit(
        stack,
        likelihood,
        tuple(t.expand(members, *t.shape) for t in rows),
        epochs=500,
        clip=10,
        progress=False,
        moments=mpgelu.DiagonalMoments.certain,
    )
    inputs = 2 * torch.tensor(grid, dtype=torch.float32)[:, None].expand(members, -1, -1)
    with torch.no_grad():
        p = likelihood.predictive(stack(mpgelu.FactoredMoments.certain(inputs))).mixture_over(0)
    return [t.numpy() for t in (p.mean, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt())]


def _panel(ax: Axes, title: str, x: np.ndarray, y: np.ndarray, grid: np.ndarray, *parts: np.ndarray) -> None:
    mean, epistemic, aleatoric = parts
    total = np.hypot(epistemic, aleatoric)
    ax.fill_between(grid, mean - 2 * total, mean + 2 * total, color=ORANGE, alpha=0.28, lw=0, label="total, ± 2 sd")
    ax.fill_between(
        grid, mean - 2 * epistemic, mean + 2 * epistemic, color=BLUE, alpha=0.42, lw=0, label="epistemic, ± 2 sd"
    )
    ax.plot(grid, np.sin(2 * grid), ":", color=MUTED, lw=1.2, label="truth")
    ax.plot(grid, mean, color=BLUE, label="mean")
    ax.plot(x, y, ".", ms=3, color=INK, alpha=0.5, mew=0, label="data")
    ax.set(title=title, ylim=(-2.4, 3.0), xlim=(-5, 5), xlabel="x")
