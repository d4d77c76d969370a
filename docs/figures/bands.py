"""Two kinds of not knowing.

One model of 240 noisy points with a gap. The noise grows to the right, and the aleatoric part follows it. In the gap and
outside the data the model does not know the function, and the epistemic part says so.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from style import BLUE, INK, MUTED, ORANGE

from mpgelu import MPGELURegressor


def data() -> tuple[np.ndarray, np.ndarray]:
    """A wave with growing noise, measured on two sides of a gap."""
    generator = np.random.default_rng(4)
    x = np.concatenate([generator.uniform(-4, -0.6, 120), generator.uniform(1.0, 4, 120)])
    return x, truth(x) + (0.04 + 0.05 * (x + 4)) * generator.normal(size=240)


def truth(x: np.ndarray) -> np.ndarray:
    """The function behind the data."""
    return np.sin(1.4 * x) + 0.15 * x


def draw() -> Figure:
    """Bands of two standard deviations above, the two parts below."""
    x, y = data()
    model = MPGELURegressor(random_state=0).fit(x[:, None], y)
    grid = np.linspace(-6, 6, 241)
    mean, epistemic, aleatoric = model.predict_parts(grid[:, None])
    total = np.hypot(epistemic, aleatoric)

    figure, (bands, parts) = plt.subplots(2, 1, figsize=(8.4, 4.6), sharex=True, height_ratios=(2.4, 1))
    bands.fill_between(grid, mean - 2 * total, mean + 2 * total, color=ORANGE, alpha=0.28, lw=0, label="with the noise")
    inner = (mean - 2 * epistemic, mean + 2 * epistemic)
    bands.fill_between(grid, *inner, color=BLUE, alpha=0.42, lw=0, label="of the function")
    bands.plot(grid, truth(grid), ":", color=MUTED, lw=1.3, label="truth")
    bands.plot(grid, mean, color=BLUE, lw=2, label="mean")
    bands.plot(x, y, ".", ms=3.6, color=INK, alpha=0.55, mew=0, label="data")
    bands.set(ylim=(-3.6, 3.6), xlim=(-6, 6), title="What the model says, ± 2 standard deviations")
    bands.legend(ncols=5, loc="lower center", fontsize=8.5, columnspacing=1.4)
    parts.plot(grid, aleatoric, color=ORANGE, label="aleatoric: noise, stays")
    parts.plot(grid, epistemic, color=BLUE, label="epistemic: more data remove it")
    parts.set(ylim=(0, None), title="Its two parts", xlabel="x")
    parts.legend(ncols=2, loc="upper center", fontsize=8.5)
    return figure
