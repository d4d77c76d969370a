"""Timing functions in turns, and counting the special functions that they evaluate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WARM_UP = 2
_SPECIAL = ("erf", "erfc", "exp", "sqrt", "rsqrt", "asin", "sin", "cos", "log")


@dataclass(frozen=True)
class Timing:
    """Seconds of one function over the rounds."""

    best: float
    median: float
    p99: float


def in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Time every function once in every round, after a warm-up that does not count.

    Taking turns lets a slow moment of the machine hit all of them alike, so that their ratios mean something.

    Args:
        functions: What is timed, by name.
        rounds: Number of rounds.
        clock: Clock in seconds; ``time.process_time`` does not count the time of other programs.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(_WARM_UP + rounds):
        for name, function in functions.items():
            started = clock()
            function()
            seconds = clock() - started
            if turn >= _WARM_UP:
                samples[name].append(seconds)
    return {
        name: Timing(min(times), float(np.median(times)), float(np.quantile(times, 0.99)))
        for name, times in samples.items()
    }


class _Counting(TorchDispatchMode):
    """Adds up the elements that pass through each special function."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _SPECIAL and isinstance(result, Tensor):
            self.counts[name] += result.numel()
        return result


def special_functions(function: Callable[[], object]) -> dict[str, int]:
    """Return the number of values of each special function that a call evaluates, counted during the call."""
    with _Counting() as mode:
        function()
    return dict(sorted(mode.counts.items()))
