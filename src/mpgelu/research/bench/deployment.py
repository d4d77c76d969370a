"""Latency of exported graphs in onnxruntime, beside plain deterministic networks of the same sizes and number."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpgelu.estimators.ensemble import Ensemble
from mpgelu.layers import Linear
from mpgelu.likelihoods import HeteroscedasticGaussian
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments
from mpgelu.networks import FeatureScale, Stack, network
from mpgelu.research.bench.measure import in_turns
from mpgelu.research.bench.sections import FEATURES, RATE, Rows, Settings

# Units of the two hidden layers and networks: one small network, an ensemble, the estimator's own sizes, a large one.
SIZES = ((48, 1), (48, 5), (48, 30), (256, 1), (256, 5))
LEVELS = (0.05, 0.5, 0.95)


def onnx_latency(settings: Settings) -> Rows:
    """One row in onnxruntime on one thread: plain networks, and ours.

    Ours give mean, standard deviation, its epistemic and aleatoric parts, and where it says so three quantiles. Neither
    scales features or target: the plain ones have nothing to do it, ours nothing to do.
    """
    table: Rows = []
    for width, members in ((8, 2),) if settings.quick else SIZES:
        torch.manual_seed(0)
        networks = [network(FEATURES, (width, width), rate=RATE) for _ in range(members)]
        x = torch.randn(1, FEATURES).numpy()
        graphs = {"deterministic": _deterministic(networks)}
        with tempfile.TemporaryDirectory() as folder:
            for name, moments in (("exact", FactoredMoments), ("diagonal", DiagonalMoments)):
                for words, levels in (("", ()), (", quantiles", LEVELS)):
                    path = Path(folder) / "model.onnx"
                    _export(networks, moments, levels, path)
                    graphs[f"MP-GELU {name}{words}"] = path.read_bytes()
        sessions = {name: _session(content) for name, content in graphs.items()}
        runs = {name: partial(session.run, None, {"features": x}) for name, session in sessions.items()}
        timings = in_turns(runs, 20 if settings.quick else 100 * settings.rounds)
        plain = timings["deterministic"].best
        table += [
            {
                **{"width": width, "networks": members, "method": name, "nodes": _nodes(graphs[name])},
                **{"us": 1e6 * t.best, "median us": 1e6 * t.median, "over deterministic": t.best / plain},
            }
            for name, t in timings.items()
        ]
    return table


def _export(networks: Sequence[torch.nn.Module], moments: type[Moments], levels: Sequence[float], path: Path) -> None:
    from mpgelu.export import export_onnx

    zero, one, count = torch.zeros(()), torch.ones(()), len(networks)
    weights, scaling = torch.full((count,), 1 / count), FeatureScale.identity(FEATURES)
    ensemble = Ensemble([Stack(networks)], weights, HeteroscedasticGaussian(), scaling, zero, one, moments)
    export_onnx(ensemble, path, levels)


def _deterministic(networks: Sequence[torch.nn.Module]) -> bytes:
    """Deterministic networks of the same shape, with ReLU and without moments, whose outputs are averaged."""
    from mpgelu.export.graph import Graph

    graph = Graph()
    value = graph.value("features")
    layers = [[layer for layer in net.modules() if isinstance(layer, Linear)] for net in networks]
    for position, same in enumerate(zip(*layers, strict=True)):
        value = value.op("Relu") if position else value
        weights, biases = _stacked([layer.weight.mT for layer in same]), _stacked([layer.bias[None] for layer in same])
        value = value.op("Gemm", weights, biases[0]) if len(networks) == 1 else value @ weights + biases
    if len(networks) > 1:
        value = value.op("ReduceMean", [0], keepdims=0)
    content: bytes = graph.model({"features": ["rows", FEATURES]}, {"y": (value, ["rows", 2])}, {}).SerializeToString()
    return content


def _stacked(parts: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    array: np.ndarray[Any, np.dtype[np.float64]] = torch.stack(list(parts)).detach().double().numpy()
    return array[0] if len(parts) == 1 else array


def _nodes(content: bytes) -> int:
    import onnx

    return len(onnx.load_from_string(content).graph.node)


def _session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options)
