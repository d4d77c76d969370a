"""When a sum is not Gaussian.

A unit that sums few masked inputs, or many of which a few dominate, is far from the Gaussian that ReLU assumes
(orange line). A sum of many like inputs is close. Below: the mean after ReLU, sampled and by the Gaussian formula.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from style import BLUE, MUTED, ORANGE

import mpgelu
from mpgelu import rules


def draw() -> Figure:
    """Histograms of three sums of masked inputs with the same mean and variance formula."""
    torch.manual_seed(0)
    cases = {
        "3 inputs": torch.tensor([0.8, -1.4, 0.5]),
        "60 inputs, one large": torch.cat([torch.tensor([-1.6]), 0.01 + 0.04 * torch.randn(59)]),
        "60 inputs alike": 0.14 * torch.randn(60) - 0.01,
    }
    figure, axes = plt.subplots(1, 3, figsize=(8.8, 3.0))
    for ax, (title, weight) in zip(axes, cases.items(), strict=True):
        inputs = torch.ones(1, len(weight))
        masked = rules.dropout(mpgelu.FullMoments.certain(inputs), 0.3)
        before = rules.linear(masked, weight[None])
        samples = ((torch.rand(200_000, len(weight)) < 0.7) / 0.7) @ weight
        mean, stddev = before.mean.item(), before.stddev.item()
        ax.hist(samples.numpy(), bins=48, density=True, color=BLUE, alpha=0.6, lw=0)
        grid = torch.linspace(mean - 4 * stddev, mean + 4 * stddev, 200)
        ax.plot(grid, torch.exp(-0.5 * ((grid - mean) / stddev) ** 2) / stddev / (2 * torch.pi) ** 0.5, color=ORANGE)
        formula = rules.relu(before).mean.item()
        said = f"mean after ReLU: {samples.relu().mean():.3f}, formula {formula:.3f}"
        ax.set_xlabel("sum, before ReLU")
        ax.text(0.5, -0.3, said, transform=ax.transAxes, fontsize=9, color=MUTED, ha="center")
        ax.set(title=title, yticks=[], ylim=(0, 2.6 / (stddev * 2.5)))
    axes[0].set_ylabel("density")
    return figure
