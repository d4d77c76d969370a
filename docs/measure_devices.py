"""Measure what docs/devices.md says about bfloat16 and torch.compile, and write it there.

``python docs/measure_devices.py precision`` needs the UCI set power; ``compile`` takes minutes of a C++ compiler.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpgelu as mp
from mpgelu.research.datasets import load_uci
from mpgelu.storage.files import write_between

PAGE = Path(__file__).with_name("devices.md")
KINDS: dict[str, Any] = {"diagonal": mp.DiagonalMoments, "factored": mp.FactoredMoments, "full": mp.FullMoments}
LIKELIHOOD = mp.HeteroscedasticGaussian()
ROUNDS = 7


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


def compiled() -> str:
    """Time of compiled networks as a multiple of that of eager ones, in turns, one thread, best of several rounds."""
    torch.set_num_threads(1)
    lines = ["| 3 x 512 units | forward | training step | compiled in |", "|---|---|---|---|"]
    for name, rows in (("diagonal", 256), ("factored", 32)):
        started = time.perf_counter()
        network, x, y = mp.network(16, (512, 512, 512)), torch.randn(rows, 16), torch.randn(rows)
        forward = _forward(network, KINDS[name], x)
        step = _step(network, KINDS[name], x, y)
        runs = [forward, torch.compile(forward), step, torch.compile(step)]
        for run in runs:
            run()
        seconds, times = time.perf_counter() - started, [_best(runs) for _ in range(ROUNDS)]
        plain, fast, step_plain, step_fast = (min(column) for column in zip(*times, strict=True))
        ratios = f"{fast / plain:.2f} of eager | {step_fast / step_plain:.2f} of eager"
        lines.append(f"| {name}, {rows} rows | {ratios} | {seconds:.0f} s |")
    return "\n".join(lines)


def _forward(network: nn.Module, kind: Any, x: torch.Tensor) -> Callable[[], Any]:
    def run() -> torch.Tensor:
        with torch.no_grad():
            outputs = network(kind.certain(x))
            result: torch.Tensor = outputs.mean + outputs.variance
            return result

    return run


def _step(network: nn.Module, kind: Any, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    def run() -> None:
        loss = -LIKELIHOOD.expected_log_prob(network(kind.certain(x)), y).mean()
        loss.backward()  # type: ignore[no-untyped-call]

    return run


def _best(runs: list[Callable[[], Any]]) -> list[float]:
    times = []
    for run in runs:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    for what in sys.argv[1:]:
        write_between(PAGE, what, {"precision": precision, "compile": compiled}[what]())
