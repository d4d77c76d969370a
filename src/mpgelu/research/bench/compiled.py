"""``torch.compile`` of wide networks, beside the same networks in torch as it is and, where they apply, by kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpgelu import native
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import network
from mpgelu.networks.perceptron import WIDEST, as_function
from mpgelu.research.bench.measure import in_turns
from mpgelu.research.bench.sections import FEATURES, RATE, Rows, Settings

# Title, moments, units, rows, and settings of the network.
_CASES: tuple[tuple[str, type[Moments], int, int, dict[str, Any]], ...] = (
    ("diagonal", DiagonalMoments, 512, 256, {}),
    ("diagonal", DiagonalMoments, 1024, 256, {}),
    ("diagonal, Gaussian weights", DiagonalMoments, 512, 256, {"gaussian_weights": True}),
    ("factored", FactoredMoments, 512, 32, {}),
)


def compiled(settings: Settings) -> Rows:
    """Networks of two wide layers: a prediction, and a training step without the update, in processor time.

    Compilation is measured apart, from the start of the first call to its end, for each of the two.
    """
    if not (settings.compiled and native.can_compile()):
        return []
    return [row for case in _CASES for row in _case(*case, settings)]


def _case(title: str, kind: type[Moments], width: int, rows: int, options: dict[str, Any], settings: Settings) -> Rows:
    torch.manual_seed(0)
    torch.compiler.reset()  # of one function only a few versions are kept
    width, rows = (8, 4) if settings.quick else (width, rows)
    trained = network(FEATURES, (width, width), rate=RATE, **options)
    x, y = torch.randn(rows, FEATURES), torch.randn(rows)
    has_kernel = not options and (kind is DiagonalMoments or width <= WIDEST)
    forwards: dict[str, Callable[[Any], Any]] = {"eager": trained, "compiled": torch.compile(trained, fullgraph=True)}
    forwards |= {"kernel": as_function(trained)} if has_kernel else {}
    table: Rows = []
    for task, run in (("prediction", _predict), ("training step", _step)):
        calls: dict[str, Callable[[], object]] = {
            name: partial(run, forward, kind, x, y, name == "kernel") for name, forward in forwards.items()
        }
        started = time.process_time()
        calls["compiled"]()
        seconds = time.process_time() - started
        ms = {name: 1e3 * timing.best for name, timing in in_turns(calls, settings.rounds, time.process_time).items()}
        row = {"moments": title, "width": width, "rows": rows, "task": task, "eager, ms": ms["eager"]}
        row |= {"kernel, ms": ms.get("kernel", "-"), "compiled, ms": ms["compiled"]}
        table.append({**row, "times faster than eager": ms["eager"] / ms["compiled"], "compilation, s": seconds})
    return table


def _predict(forward: Callable[[Any], Any], kind: Any, x: Tensor, y: Tensor, kernels: bool) -> Tensor:
    with torch.no_grad(), nullcontext() if kernels else native.disabled():
        outputs = forward(kind.certain(x))
        found: Tensor = outputs.mean + outputs.variance
        return found


def _step(forward: Callable[[Any], Any], kind: Any, x: Tensor, y: Tensor, kernels: bool) -> None:
    with nullcontext() if kernels else native.disabled():
        loss = -HeteroscedasticGaussian().expected_log_prob(forward(kind.certain(x)), y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
