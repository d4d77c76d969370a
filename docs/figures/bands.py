"""Two kinds of not knowing.

Ten small networks, trained as one, on 220 noisy points with a gap. The noise grows to the right, and the aleatoric
part follows it. In the gap and outside the data nobody knows the function, and the epistemic part says so. No
sampling anywhere.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from style import BLUE, INK, MUTED, ORANGE

import mpgelu

MEMBERS, POINTS, SCALE = 10, 220, 1.5


def truth(x: torch.Tensor) -> torch.Tensor:
    """The function behind the data."""
    return torch.sin(1.4 * x) + 0.15 * x


def noise(x: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the data."""
    return 0.05 + 0.05 * (x + 4)


def predicted(x: torch.Tensor, y: torch.Tensor, grid: torch.Tensor) -> mpgelu.Predictive:
    """The mixture of networks that have each seen their own resampled rows."""
    stack = mpgelu.Stack([mpgelu.network(1, hidden=(64, 64), rate=0.002) for _ in range(MEMBERS)])
    likelihood = mpgelu.HeteroscedasticGaussian()
    rows = torch.randint(POINTS, (MEMBERS, POINTS))
    start = mpgelu.DiagonalMoments.certain
    mpgelu.fit(stack, likelihood, (SCALE * x[rows, None], y[rows]), epochs=600, clip=10, moments=start, progress=False)
    inputs = SCALE * grid[:, None].expand(MEMBERS, -1, -1)
    with torch.no_grad():
        return likelihood.predictive(stack(mpgelu.FactoredMoments.certain(inputs))).mixture_over(0)


def draw() -> Figure:
    """Bands of two standard deviations above, the two parts below."""
    torch.manual_seed(0)
    side = torch.rand(POINTS // 2, 2) * 2.8 + 1.2
    x = torch.cat([-side[:, 0], side[:, 1]])
    y = truth(x) + noise(x) * torch.randn(POINTS)
    grid = torch.linspace(-6, 6, 241)
    p = predicted(x, y, grid)
    mean, total, epistemic, aleatoric = p.mean, p.stddev, p.epistemic_variance.sqrt(), p.aleatoric_variance.sqrt()

    figure, (bands, parts) = plt.subplots(2, 1, figsize=(8.4, 4.7), sharex=True, height_ratios=(2.4, 1))
    bands.fill_between(grid, mean - 2 * total, mean + 2 * total, color=ORANGE, alpha=0.28, lw=0, label="total")
    inner = (mean - 2 * epistemic, mean + 2 * epistemic)
    bands.fill_between(grid, *inner, color=BLUE, alpha=0.42, lw=0, label="epistemic")
    bands.plot(grid, truth(grid), ":", color=MUTED, lw=1.3, label="truth")
    bands.plot(grid, mean, color=BLUE, lw=2, label="mean")
    bands.plot(x, y, ".", ms=4, color=INK, alpha=0.6, mew=0, label="data")
    bands.set(ylim=(-4.6, 4.2), xlim=(-6, 6), title="What the model says, ± 2 standard deviations")
    bands.legend(ncols=5, loc="lower center", fontsize=8.5, columnspacing=1.4)
    parts.plot(grid, aleatoric, color=ORANGE, label="aleatoric: noise, more data do not help")
    parts.plot(grid, epistemic, color=BLUE, label="epistemic: more data remove it")
    parts.plot(x.sort().values, noise(x.sort().values), ":", color=MUTED, lw=1.3, label="true noise")
    parts.set(ylim=(0, 1.25), title="Its two parts, standard deviations", xlabel="x")
    parts.legend(ncols=3, loc="upper center", fontsize=8.5)
    return figure
