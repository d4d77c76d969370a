"""The paper's toy problem: both networks on one hundred points, drawn where there is data and where there is none."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import matplotlib.ticker
import torch
from matplotlib.axes import Axes
from torch import Tensor

from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import FactoredMoments
from mpgelu.networks import Nonlinearity, paper_network
from mpgelu.predictive import Predictive
from mpgelu.storage.files import write_atomically, write_between
from mpgelu.training import fit

TITLES: dict[Nonlinearity, str] = {"relu": "ReLU", "mpgelu": "MP-GELU"}

_POINTS = 100
_RATE = 0.001
_LEARNING_RATE = 0.1
_EDGE = 0.5  # the training range is [-0.5, 0.5]
_ORANGE, _BLUE, _GREY = "#d95f02", "#1f4e79", "#555555"


@dataclass(frozen=True, eq=False)
class ToyResult:
    """Predictions of one network on a grid over [-1, 1], and its training data."""

    nonlinearity: Nonlinearity
    x: Tensor
    y: Tensor
    grid: Tensor
    predictive: Predictive

    def summary(self) -> dict[str, float]:
        """Mean predictive standard deviation inside and outside the training range, and its epistemic part.

        The share is that of the epistemic in the total variance, both averaged over the range.
        """
        inside = self.grid.abs() <= _EDGE
        total, epistemic = self.predictive.stddev, self.predictive.epistemic_variance.sqrt()
        return {
            "stddev_inside": total[inside].mean().item(),
            "stddev_outside": total[~inside].mean().item(),
            "epistemic_std_inside": epistemic[inside].mean().item(),
            "epistemic_std_outside": epistemic[~inside].mean().item(),
            "epistemic_share_inside": (epistemic[inside].square().mean() / total[inside].square().mean()).item(),
            "epistemic_share_outside": (epistemic[~inside].square().mean() / total[~inside].square().mean()).item(),
        }


def truth(x: Tensor) -> Tensor:
    """The function behind the data, sin(2x) cos(7x)."""
    return torch.sin(2 * x) * torch.cos(7 * x)


def toy_data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """One hundred x, uniform on [-0.5, 0.5], and y with noise of standard deviation ``abs(sin x)``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(_POINTS, generator=generator) - _EDGE
    return x, truth(x) + torch.sin(x).abs() * torch.randn(_POINTS, generator=generator)


def run_toy(nonlinearity: Nonlinearity, *, epochs: int = 1000, seed: int = 0, progress: bool = True) -> ToyResult:
    """Train one network of the paper as the paper does: SGD, learning rate 0.1, full batches, full covariance."""
    x, y = toy_data(seed)
    torch.manual_seed(seed)
    network, likelihood = paper_network(1, nonlinearity=nonlinearity, rate=_RATE), HeteroscedasticGaussian()
    history = fit(
        network,
        likelihood,
        (x[:, None], y),
        epochs=epochs,
        batch_size=_POINTS,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_LEARNING_RATE),
        seed=seed,
        progress=progress,
    )
    if history.interrupted:  # a half-trained network is no result
        raise KeyboardInterrupt
    grid = torch.linspace(-1, 1, 401)
    with torch.no_grad():
        predictive = likelihood.predictive(network(FactoredMoments.certain(grid[:, None])))
    return ToyResult(nonlinearity, x, y, grid, predictive)


def draw(results: Sequence[ToyResult], path: Path) -> None:
    """The paper's figure: predictive bands above, their epistemic and aleatoric parts below; a PNG file."""
    figure = matplotlib.figure.Figure(figsize=(5.2 * len(results), 7.2), layout="constrained")
    axes = figure.subplots(2, len(results), sharex=True, sharey="row", squeeze=False)
    for column, result in enumerate(results):
        _draw_bands(axes[0, column], result)
        _draw_parts(axes[1, column], result)
    axes[0, 0].set_ylabel("y")
    axes[0, 0].legend(loc="upper left", fontsize=8, framealpha=0.9)
    axes[1, 0].set_ylabel("standard deviation")
    axes[1, 0].legend(loc="upper center", fontsize=8, framealpha=0.9)
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    write_atomically(path, image.getvalue())


def write_summary(results: Sequence[ToyResult], path: Path) -> None:
    """The numbers of the figure as JSON."""
    numbers = {result.nonlinearity: result.summary() for result in results}
    write_atomically(path, json.dumps(numbers, indent=2) + "\n")


def update_docs(numbers: Mapping[str, Mapping[str, float]], page: Path) -> None:
    """Replace the table between the marks ``toy`` of a page.

    Args:
        numbers: The numbers that :func:`write_summary` writes: for each network its :meth:`ToyResult.summary`.
        page: A page with the marks.
    """
    lines = ["| network | standard deviation inside | outside | epistemic share of the variance inside | outside |"]
    lines.append("|" + "---|" * 5)
    for nonlinearity, title in TITLES.items():
        found = numbers[nonlinearity]
        sizes = [f"{found[f'stddev_{place}']:.2f}" for place in ("inside", "outside")]
        shares = [f"{found[f'epistemic_share_{place}']:.1%}" for place in ("inside", "outside")]
        lines.append(f"| {' | '.join([title, *sizes, *shares])} |")
    write_between(page, "toy", "\n".join(lines))


def _draw_bands(axes: Axes, result: ToyResult) -> None:
    mean, stddev = result.predictive.mean, result.predictive.stddev
    for width in (4, 3, 2, 1):
        axes.fill_between(result.grid, mean - width * stddev, mean + width * stddev, color=_ORANGE, alpha=0.16, lw=0)
    axes.plot(result.grid, truth(result.grid), color=_BLUE, lw=1.6, label="true function")
    axes.plot(result.grid, mean, "--", color=_ORANGE, lw=1.8, label="predictive mean, bands of 1 to 4 s.d.")
    axes.plot(result.x, result.y, "x", color=_BLUE, ms=4.5, alpha=0.8, label="training data")
    axes.set_title(f"{TITLES[result.nonlinearity]} network")
    axes.set_xlim(-1, 1)
    axes.set_ylim(-4, 4)


def _draw_parts(axes: Axes, result: ToyResult) -> None:
    aleatoric = result.predictive.aleatoric_variance.sqrt()
    epistemic = result.predictive.epistemic_variance.sqrt()
    axes.axvspan(-_EDGE, _EDGE, color=_GREY, alpha=0.08, lw=0, label="training range")
    axes.plot(result.grid, aleatoric, color=_ORANGE, lw=1.8, label="aleatoric (noise in the data)")
    axes.plot(result.grid, epistemic, color=_BLUE, lw=1.8, label="epistemic (uncertain weights)")
    axes.plot(result.grid, torch.sin(result.grid).abs(), ":", color=_GREY, lw=1.4, label="true noise")
    axes.set_yscale("log")
    axes.set_ylim(3e-3, 10)
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("x")
