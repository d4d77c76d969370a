"""A target with several modes: one Gaussian beside a mixture, from the same network.

``python -m mpgelu.research.modes --page docs/compact.md`` trains both, draws the page's figure and writes its table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpgelu.layers import Linear
from mpgelu.likelihoods import GaussianMixture, HeteroscedasticGaussian, Likelihood
from mpgelu.moments import FactoredMoments
from mpgelu.networks import network
from mpgelu.predictive import Predictive
from mpgelu.storage.files import write_atomically, write_between
from mpgelu.training import fit

Array = NDArray[np.float64]

_LIKELIHOODS: dict[str, Likelihood] = {
    "one Gaussian": HeteroscedasticGaussian(),
    "mixture of five": GaussianMixture(5),
}


def branches(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """The inverse of x = y + 0.3 sin(2 pi y): up to three branches over each x; ``(rows, 1)`` and ``(rows,)``."""
    random = np.random.default_rng(seed)
    y = random.uniform(0, 1, rows)
    x = y + 0.3 * np.sin(2 * np.pi * y) + 0.03 * random.normal(size=rows)
    scaled = (torch.as_tensor(part, dtype=torch.float32) * 4 - 2 for part in (x, y))
    features, targets = scaled
    return features[:, None], targets


def trained(likelihood: Likelihood, epochs: int, rows: int = 2_000) -> torch.nn.Sequential:
    """A network of two hidden layers with a little dropout, trained by its exact moments."""
    torch.manual_seed(0)
    net = network(1, (32, 32), likelihood.outputs, rate=0.002)
    last = net[-1]
    assert isinstance(last, Linear)
    with torch.no_grad():
        likelihood.initialise(last.weight, last.bias)
    fit(net, likelihood, branches(rows, 0), epochs=epochs, batch_size=128)
    return net


def predicted(net: torch.nn.Module, likelihood: Likelihood, x: Tensor) -> Predictive:
    """Distribution of each row's target."""
    with torch.no_grad():
        return likelihood.predictive(net(FactoredMoments.certain(x)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, score on new rows, draw."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/figures"), help="Folder of the figure.")
    parser.add_argument("--page", type=Path, help="Markdown file whose table is written anew.")
    parser.add_argument("--epochs", type=int, default=150)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, y = branches(1_000, 1)
    grid, levels = torch.linspace(-2.2, 2.2, 200)[:, None], torch.linspace(-2.3, 2.3, 240)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    lines = ["| | mean log density of new rows | CRPS |", "|---|---|---|"]
    for axes, (name, likelihood) in zip(figure.subplots(1, 2, sharey=True), _LIKELIHOODS.items(), strict=True):
        net = trained(likelihood, chosen.epochs)
        found = predicted(net, likelihood, x)
        score = found.log_prob(y).mean().item()
        lines.append(f"| {name} | {score:.2f} | {found.crps(y).mean().item():.3f} |")
        density = predicted(net, likelihood, grid)[:, None].log_prob(levels[None]).exp()
        axes.pcolormesh(grid[:, 0].numpy(), levels.numpy(), density.T.numpy(), cmap="Blues", vmax=3, shading="auto")
        axes.plot(x[:, 0].numpy(), y.numpy(), ".", color="black", markersize=1.5)
        axes.set(title=f"{name}: {score:.2f} nats a row", xlabel="x", ylabel="y", xlim=(-2.2, 2.2), ylim=(-2.3, 2.3))
    picture = BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_atomically(chosen.output / "modes.png", picture.getvalue())
    if chosen.page is not None:
        write_between(chosen.page, "modes", "\n".join(lines))


if __name__ == "__main__":
    main()
