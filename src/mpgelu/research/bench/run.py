"""Runs the sections of the benchmark one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from rich.console import Console

from mpgelu import native
from mpgelu.research.bench.accuracy import accuracy
from mpgelu.research.bench.compiled import compiled as compilation
from mpgelu.research.bench.conversion import conversion
from mpgelu.research.bench.deployment import onnx_latency
from mpgelu.research.bench.estimator import imports, prediction
from mpgelu.research.bench.estimator import threads as thread_scaling
from mpgelu.research.bench.feature_errors import feature_errors
from mpgelu.research.bench.kernels import kernels
from mpgelu.research.bench.many_rows import many_rows
from mpgelu.research.bench.memory import memory
from mpgelu.research.bench.report import Results, environment
from mpgelu.research.bench.sections import FEATURES, Rows, Settings
from mpgelu.research.bench.sections import SECTIONS as IN_TORCH
from mpgelu.research.bench.workers import workers

SECTIONS: dict[str, Callable[[Settings], Rows]] = {
    **IN_TORCH,
    "conversion": conversion,
    "accuracy": accuracy,
    "feature-errors": feature_errors,
    "onnx": onnx_latency,
    "prediction": prediction,
    "threads": thread_scaling,
    "imports": imports,
    "workers": workers,
    "kernels": kernels,
    "memory": memory,
    "compile": compilation,
    "rows": many_rows,
}


def run(
    sections: Sequence[str], *, rounds: int = 9, threads: int = 1, compiled: bool = True, quick: bool = False
) -> Results:
    """Measure the chosen sections and return their tables with what they depend on.

    Args:
        sections: names out of :data:`SECTIONS`.
        rounds: turns of every method.
        threads: of torch, for the whole process.
        compiled: measure ``torch.compile`` too.
        quick: a smoke run on tiny sizes.
    """
    torch.set_num_threads(threads)
    native.keep_freed_memory()
    settings = Settings(rounds, (8, 16), compiled, quick) if quick else Settings(rounds, compiled=compiled)
    results: Results = {
        "environment": environment(threads),
        "rounds": rounds,
        "predicted_rows": settings.rows,
        "features": FEATURES,
    }
    with Console(stderr=True).status("") as status:
        for name in sections:
            if name == "onnx" and find_spec("onnxruntime") is None:
                status.console.print("onnx skipped: onnxruntime is not installed; pip install 'mpgelu[onnx]' brings it")
                continue
            status.update(f"measuring {name}")
            results[name] = SECTIONS[name](settings)
    return results
