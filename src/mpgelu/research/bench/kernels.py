"""Compiled kernels beside the rules in torch, against the width of layers: up to where a kernel is to be used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mpgelu import native
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import Stack, network
from mpgelu.networks.perceptron import WIDEST
from mpgelu.research.bench.measure import in_turns
from mpgelu.research.bench.sections import FEATURES, RATE, Rows, Settings

_ROWS = 256  # the estimator's batch


def kernels(settings: Settings) -> Rows:
    """One network of two hidden layers: a prediction, and a prediction with gradients of all parameters.

    A kernel is used where it is the faster one: diagonal moments at any width, exact ones up to ``WIDEST`` units.
    """
    table: Rows = []
    widths = (8,) if settings.quick else (64, 128, 256, 512)
    for kind in (DiagonalMoments, FactoredMoments):
        for width in widths:
            if kind is FactoredMoments and width > WIDEST:
                continue  # no kernel is used
            torch.manual_seed(0)
            stack = Stack([network(FEATURES, (width, width), rate=RATE)])
            value = kind.certain(torch.randn(1, 8 if settings.quick else _ROWS, FEATURES))
            calls: dict[str, Callable[[], object]] = {
                "prediction": partial(_outputs, stack, value),
                "gradients": partial(_gradients, stack, value),
            }
            rules: dict[str, Callable[[], object]] = {
                f"{name}, torch only": partial(_in_torch, call) for name, call in calls.items()
            }
            times = in_turns(calls | rules, settings.rounds)
            for name in calls:
                kernel, plain = times[name].best, times[f"{name}, torch only"].best
                row = {"moments": kind.__name__, "width": width, "task": name}
                table.append({**row, "ms": 1e3 * kernel, "torch only, ms": 1e3 * plain, "times faster": plain / kernel})
    return table


def _outputs(stack: Stack, value: Moments) -> Tensor:
    with torch.no_grad():
        mean: Tensor = stack(value).mean
        return mean


def _gradients(stack: Stack, value: Moments) -> None:
    outputs = stack(value)
    (outputs.mean.sum() + outputs.variance.sum()).backward()


def _in_torch(call: Callable[[], object]) -> None:
    with native.disabled():
        call()
