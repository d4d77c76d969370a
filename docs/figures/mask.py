"""What MP-GELU does to one unit.

A unit with mean m and variance v is kept with the probability that a Gaussian of these moments is positive. With v =
0 that is ReLU, with v = 1 the mean is GELU; ReLU of a Gaussian (dotted) has a larger mean and a smaller variance.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from style import BLUE, GREEN, INK, MUTED, ORANGE, VIOLET

import mpgelu
from mpgelu import rules


def draw() -> Figure:
    """Keep-probability, mean and standard deviation after the nonlinearity, against the mean before."""
    m = torch.linspace(-4, 4, 241)
    figure, (kept, mean, spread) = plt.subplots(1, 3, figsize=(8.8, 3.1))
    for v, color in ((0.0, INK), (0.25, GREEN), (1.0, BLUE), (4.0, ORANGE)):
        before = mpgelu.DiagonalMoments(m, torch.full_like(m, v))
        after, rectified = rules.mpgelu(before), rules.relu(before)
        kept.plot(m, rules.keep_probability(before.mean, before.variance), color=color, label=f"v = {v:g}")
        mean.plot(m, after.mean, color=color)
        mean.plot(m, rectified.mean, ":", color=color, lw=1.3)
        spread.plot(m, after.stddev, color=color)
        spread.plot(m, rectified.stddev, ":", color=color, lw=1.3)
    gelu = torch.nn.functional.gelu(m[::12])
    mean.plot(m[::12], gelu, "o", ms=3.6, color=VIOLET, mew=0, label="GELU")
    spread.plot([], [], color=MUTED, label="MP-GELU")
    spread.plot([], [], ":", color=MUTED, lw=1.3, label="ReLU of a Gaussian")
    kept.set(title="Kept with probability", xlabel="mean before")
    mean.set(title="Mean after", xlabel="mean before")
    spread.set(title="Standard deviation after", xlabel="mean before")
    kept.legend(loc="upper left")
    mean.legend(loc="upper left")
    spread.legend(loc="upper left")
    spread.set_ylim(-0.1, 2.75)
    return figure
