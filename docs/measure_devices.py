"""Measure what docs/devices.md says about bfloat16, on the UCI set power, and write it there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import mpgelu as mp
from mpgelu.research.datasets import load_uci
from mpgelu.storage.files import write_between

PAGE = Path(__file__).with_name("devices.md")
KINDS: dict[str, Any] = {"diagonal": mp.DiagonalMoments, "factored": mp.FactoredMoments, "full": mp.FullMoments}
LIKELIHOOD = mp.HeteroscedasticGaussian()


def precision() -> str:
    """Errors inside autocast of a network trained on the power set, against the same network in float64."""
    torch.manual_seed(0)
    dataset = load_uci("power")
    X, y = torch.as_tensor(dataset.X), torch.as_tensor(dataset.y)
    X, y = ((X - X.mean(0)) / X.std(0)).float(), ((y - y.mean()) / y.std()).float()
    network = mp.network(X.shape[1], (64, 64), rate=0.05)
    mp.fit(network, LIKELIHOOD, (X[1000:], y[1000:]), epochs=10, clip=10, progress=False)
    exact = copy.deepcopy(network).double()
    lines = [
        "| moments | mean, as a share of the target's scale | standard deviation of h | of y |",
        "|---|---|---|---|",
    ]
    for name, kind in KINDS.items():
        with torch.no_grad():
            wanted = exact(kind.certain(X[:1000].double()))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = network(kind.certain(X[:1000]))
            mean = (found.mean - wanted.mean)[:, 0].abs().mean()
            spread = (found.stddev / wanted.stddev - 1)[:, 0].abs().mean()
            of_y = (LIKELIHOOD.predictive(found).stddev / LIKELIHOOD.predictive(wanted).stddev - 1).abs().mean()
        lines.append(f"| {name} | {mean:.2%} | {spread:.2%} | {of_y:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    write_between(PAGE, "precision", precision())
