"""A converted torch network beside Monte-Carlo dropout of the original: time, and how far they agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mpgelu.convert import from_torch
from mpgelu.networks import propagate
from mpgelu.research.bench.measure import in_turns
from mpgelu.research.bench.sections import Rows, Settings
from mpgelu.research.datasets import load_diabetes

SAMPLES = 20_000
_AT_ONCE = 500  # draws for all rows, whose numbers still fit into the cache
_WIDTH, _RATE, _EPOCHS, _ROWS = 64, 0.2, 40, 100


def conversion(settings: Settings) -> Rows:
    """Predictions of a ReLU network that was trained with dropout, on the diabetes data.

    Errors of the mean are in predictive standard deviations, those of the standard deviation relative to itself: root
    mean square over the rows, and in the worst of them. They include those of sampling, 0.7 and 0.5 %.
    """
    X, y = standardised_diabetes()
    torch.manual_seed(0)
    hidden = [nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Dropout(_RATE)]
    first = [nn.Linear(X.shape[1], _WIDTH), nn.ReLU(), nn.Dropout(_RATE)]
    network = trained(nn.Sequential(*first, *hidden, nn.Linear(_WIDTH, 1)), X, y, 2 if settings.quick else _EPOCHS)
    x = X[:_ROWS]
    samples = 2 * _AT_ONCE if settings.quick else SAMPLES
    converted, _ = from_torch(network, example=x)
    sampled = f"MC dropout, {samples:,} samples"
    runs: dict[str, Callable[[], object]] = {
        sampled: partial(monte_carlo, network, x, samples),
        "converted": partial(propagate, converted, x),
    }
    timings = in_turns(runs, max(1, settings.rounds // 3))
    (mean, stddev), moments = monte_carlo(network, x, samples), propagate(converted, x)
    of_mean, of_stddev = (moments.mean[:, 0] - mean) / stddev, moments.variance[:, 0].sqrt() / stddev - 1
    errors: dict[str, float] = {}
    for name, error in (("mean", of_mean), ("stddev", of_stddev)):
        errors[f"{name} error"] = float(error.square().mean().sqrt())
        errors[f"{name} error, worst row"] = float(error.abs().max())
    rows: Rows = [{"method": name, "rows": len(x), "ms": 1e3 * timing.best} for name, timing in timings.items()]
    rows[1] |= {"times faster": timings[sampled].best / timings["converted"].best, **errors}
    return rows


def standardised_diabetes() -> tuple[Tensor, Tensor]:
    """Features and target of the diabetes data, in standard deviations from their means."""
    data = load_diabetes()
    X, y = (torch.tensor(part, dtype=torch.float32) for part in (data.X, data.y))
    return (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()


def trained(network: nn.Module, X: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """With dropout, as anyone would."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(X)), 64):
            optimizer.zero_grad()
            (network(X[rows])[:, 0] - y[rows]).square().mean().backward()
            optimizer.step()
    return network


def monte_carlo(network: nn.Module, x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the first output of each row over random masks."""
    network.train()
    repeated = x.repeat(_AT_ONCE, 1)
    with torch.no_grad():
        draws = torch.cat([network(repeated)[:, 0].view(_AT_ONCE, -1) for _ in range(samples // _AT_ONCE)])
    return draws.double().mean(0), draws.double().std(0)
