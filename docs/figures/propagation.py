"""A cloud through a layer.

Left: an uncertain input. Middle: after a linear map the ellipse is exact. Right: after the masks of MP-GELU the cloud
is no Gaussian any more, and its mean and covariance, the ellipse of two standard deviations, are still exact.
Crosses: sample means.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from style import BLUE, INK, ORANGE

import mpgelu


def draw() -> Figure:
    """The same 1,500 samples, and the moments that were propagated, three times."""
    torch.manual_seed(1)
    start = mpgelu.FullMoments.of(torch.tensor([[0.6, -0.3]]), torch.tensor([[[0.5, 0.25], [0.25, 0.3]]]))
    layer = mpgelu.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.3, -0.6], [0.7, 1.2]]))
        layer.bias.copy_(torch.tensor([-0.3, 0.4]))
        mapped = layer(start)
        masked = mpgelu.MPGELU()(mapped)
        samples = torch.distributions.MultivariateNormal(start.mean[0], start.covariance[0]).sample((1500,))
        after = layer(samples)
        keep = torch.special.ndtr(mapped.mean / mapped.stddev)
        dropped = after * (torch.rand(1500, 2) < keep)
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 3.1), sharex=True, sharey=True)
    _cloud(axes[0], samples, start, "Input")
    _cloud(axes[1], after, mapped, "Linear")
    _cloud(axes[2], dropped, masked, "MP-GELU")
    axes[0].set(xlim=(-3.2, 4.2), ylim=(-3, 3.6), ylabel="second unit")
    for ax in axes:
        ax.set_xlabel("first unit")
    return figure


def _cloud(axes: Axes, samples: torch.Tensor, moments: mpgelu.FullMoments, title: str) -> None:
    axes.plot(*samples.T, ".", ms=2.2, color=BLUE, alpha=0.5, mew=0, rasterized=True)
    values, vectors = np.linalg.eigh(moments.covariance[0].numpy())
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    centre = moments.mean[0].tolist()
    width, height = 4 * np.sqrt(values[::-1])
    axes.add_patch(Ellipse(centre, width, height, angle=angle, fill=False, color=ORANGE, lw=2))
    axes.plot(*centre, "o", ms=6, color=ORANGE)
    axes.plot(*samples.mean(0), "x", ms=7, color=INK, mew=1.4)
    axes.set_title(title)
