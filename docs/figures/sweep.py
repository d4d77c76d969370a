"""One unit through MP-GELU, moving.

The mean of a Gaussian unit with variance 1 moves from -3 to 3 and back. Left: the probability that the unit is
positive. Middle: with this probability the unit is kept, whatever its value is, negative ones included; otherwise it is
set to zero (the bar, whose height is a probability). Right: the mean of the result, plus and minus one standard
deviation.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from style import BLUE, GREEN, INK, MUTED, ORANGE, Motion

import mpgelu
from mpgelu import rules

FRAMES = 25
MOTION = Motion(order=[*range(FRAMES), *range(FRAMES - 2, 0, -1)], seconds=0.16, still=15)


def draw() -> Figure:
    """Density before, density after, and the curve of the mean, with one set of artists for each frame."""
    means = torch.linspace(-3, 3, FRAMES)
    before = mpgelu.DiagonalMoments(means, torch.ones(FRAMES))
    keep = rules.keep_probability(before.mean, before.variance)
    after = rules.mpgelu(before)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8.8, 3.2))
    _curve(right)
    for frame in range(FRAMES):
        values = {"mean": means[frame], "keep": keep[frame], "after": after.mean[frame], "stddev": after.stddev[frame]}
        _frame(f"frame-{frame}", (left, middle, right), **{name: value.item() for name, value in values.items()})
    left.text(1.7, 0.5, "positive", color=GREEN, ha="right")
    middle.text(-2.3, 1.16, "kept", color=GREEN, ha="right")
    middle.text(3.7, 1.16, "zero", color=ORANGE, ha="right")
    left.set(title="Before", xlabel="value of the unit", ylabel="density", xlim=(-6.4, 6.4), ylim=(0, 0.55), yticks=[])
    middle.set(title="After the mask", xlabel="value of the unit", xlim=(-6.4, 6.4), ylim=(0, 1.28), yticks=[])
    right.set(title="Mean after, ± one sd", xlabel="mean before", xlim=(-3.2, 3.2), ylim=(-1.6, 4.2))
    return figure


def _curve(axes: plt.Axes) -> None:
    m = torch.linspace(-3, 3, 61)
    moments = rules.mpgelu(mpgelu.DiagonalMoments(m, torch.ones(61)))
    low, high = moments.mean - moments.stddev, moments.mean + moments.stddev
    axes.fill_between(m, low, high, color=BLUE, alpha=0.15, lw=0)
    axes.plot(m, moments.mean, color=BLUE, label="MP-GELU")
    axes.plot(m, m.relu(), ":", color=MUTED, lw=1.3, label="ReLU of the mean")
    axes.legend(loc="upper left")


def _frame(frame: str, axes: tuple[plt.Axes, ...], *, mean: float, keep: float, after: float, stddev: float) -> None:
    left, middle, right = axes
    value = torch.linspace(mean - 3.2, mean + 3.2, 41)
    density = _density(value - mean)
    positive = torch.linspace(max(0, mean - 3.2), mean + 3.2, 41)
    above = torch.cat([torch.zeros(1), _density(positive - mean), torch.zeros(1)])
    positive = torch.cat([positive[:1], positive, positive[-1:]])
    left.fill(positive, above, color=GREEN, alpha=0.35, lw=0, gid=f"{frame}-kept")
    left.plot(value, density, color=INK, lw=1.4, gid=f"{frame}-density")
    left.text(2.0, 0.5, f"{keep:.2f}", color=GREEN, gid=f"{frame}-keep")
    middle.fill(value, keep * density, color=GREEN, alpha=0.35, lw=0, gid=f"{frame}-value")
    middle.plot(value, keep * density, color=INK, lw=1.4, gid=f"{frame}-scaled")
    middle.plot([0, 0], [0, 1 - keep], color=ORANGE, lw=4, gid=f"{frame}-zero")
    middle.text(-2.0, 1.16, f"{keep:.2f}", color=GREEN, gid=f"{frame}-share")
    middle.text(4.0, 1.16, f"{1 - keep:.2f}", color=ORANGE, gid=f"{frame}-rest")
    right.plot([mean, mean], [after - stddev, after + stddev], color=ORANGE, lw=2, gid=f"{frame}-bar")
    right.plot([mean], [after], "o", color=ORANGE, ms=7, gid=f"{frame}-point")


def _density(deviation: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * deviation**2) / (2 * torch.pi) ** 0.5
