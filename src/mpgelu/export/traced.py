"""Any network as nodes, by torch's own exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.export.graph import OPSET, Value
from mpgelu.export.layers import Array
from mpgelu.export.perceptron import OF_FLUCTUATIONS, PAIRS, Outputs
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.networks import Parts
from mpgelu.predictive import Predictive

_NODES = 8  # of a distribution over the noise
_BISECTIONS = 40  # of a quantile, after which float32 tells no more
_REACH = 8.0  # standard deviations of a component that hold all of it
_TINY = 1e-30


def _fma(a: Any, b: Any, c: Any) -> Any:
    """``a b + c``, which torch makes of sums with a factor and does not translate."""
    from onnxscript import opset20 as op

    return op.Add(op.Mul(a, b), c)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what torch's exporter says about itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Moments(nn.Module):
    """Networks as a function of a plain tensor to plain tensors; no dimension M if there is one network."""

    def __init__(self, networks: Sequence[nn.Module], moments: type[Moments]) -> None:
        super().__init__()
        self.networks, self.kind = nn.ModuleList(networks), moments

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        each = [self._moments(network(self.kind.certain(x))) for network in self.networks]
        return each[0] if len(each) == 1 else tuple(torch.stack(part) for part in zip(*each, strict=True))

    def _moments(self, outputs: Moments) -> tuple[Tensor, ...]:
        if outputs.features == 1 or self.kind is DiagonalMoments:
            return outputs.mean, outputs.variance
        first, second = PAIRS
        return outputs.mean[..., first], outputs.covariance[..., first, second]


def outputs(x: Value, networks: Sequence[nn.Module], moments: type[Moments], scale: Array, shift: Array) -> Outputs:
    """Moments of the networks' outputs, multiplied by ``scale`` and then shifted.

    Args:
        x: Scaled features ``(rows, n)``.
        networks: M modules from moments to moments.
        moments: The type that they propagate.
        scale: ``(outputs,)``.
        shift: ``(outputs,)``.
    """
    sized = (size for module in networks[0].modules() if isinstance(size := getattr(module, "in_features", 0), int))
    mean, variance = _traced(_Moments(networks, moments).float(), x, next((size for size in sized if size), 1))
    correlated = moments is not DiagonalMoments and len(scale) == 2
    first, second = PAIRS if correlated else (slice(None), slice(None))
    order = [2, 0, 1] if len(networks) > 1 else [1, 0]
    fluctuation = scale * OF_FLUCTUATIONS[: len(scale)]
    return Outputs(
        mean=(mean * scale[first] + shift[first]).op("Transpose", perm=order),
        variance=(variance * (fluctuation[first] * fluctuation[second])).op("Transpose", perm=order),
        correlated=correlated,
    )


def member_outputs(
    x: Value, members: nn.Module, features: int, scale: Array, shift: Array, extra: Value | None
) -> Outputs:
    """Moments of what a model mixes, multiplied by ``scale`` and then shifted.

    Args:
        x: Scaled features ``(rows, n)``.
        members: From these to means and variances, ``(M, rows, 2)`` each.
        features: Number n of features.
        scale: ``(2,)``.
        shift: ``(2,)``.
        extra: Variance to add to that of each mean, ``(rows,)``; ``None`` for none.
    """
    mean, variance = _traced(members, x, features)
    variance = variance * (scale * OF_FLUCTUATIONS) ** 2
    if extra is not None:
        variance = variance + extra.reshape(-1, 1) * np.array([1.0, 0.0])
    single = len(torch.as_tensor(members.weights)) == 1
    order = [1, 0] if single else [2, 0, 1]
    parts = [part.op("Squeeze", [0]) if single else part for part in (mean * scale + shift, variance)]
    after, spread = (part.op("Transpose", perm=order) for part in parts)
    return Outputs(after, spread, correlated=False)


class _Whole(nn.Module):
    """A model with any likelihood, from raw features to the summary of its distribution."""

    def __init__(self, parts: Parts, levels: Sequence[float]) -> None:
        super().__init__()
        self.whole, self.parts, self.levels = parts.whole, parts, levels
        self.networks = nn.ModuleList(parts.networks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.whole is not None:
            predictive: Predictive = self.whole(x, None, _NODES)
        else:
            predictive = self.parts.likelihood.predictive(self.networks[0](self.parts.moments.certain(x)), _NODES)
        parts = predictive.epistemic_variance.sqrt(), predictive.aleatoric_variance.sqrt()
        summary = predictive.mean, predictive.stddev, *parts
        if not self.levels:
            return summary
        return *summary, torch.stack([_quantile(predictive, level) for level in self.levels], -1)


def _quantile(predictive: Predictive, level: float) -> Tensor:
    """By bisection between bounds that hold all components, a fixed number of steps as a graph needs."""
    reach = _REACH * predictive.variances.sqrt()
    lower, upper = (predictive.means - reach).amin(-1), (predictive.means + reach).amax(-1)
    weights, scales = predictive.log_weights.exp(), (2 * predictive.variances.clamp_min(_TINY)).sqrt()
    for _ in range(_BISECTIONS):
        middle = (lower + upper) / 2
        ratio = (middle.unsqueeze(-1) - predictive.means) / scales
        below = (weights * 0.5 * torch.erfc(-ratio)).sum(-1) < level
        lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
    return (lower + upper) / 2


def whole(x: Value, parts: Parts, levels: Sequence[float]) -> list[Value]:
    """Mean, standard deviation, its parts and quantiles of a model whose likelihood has no form of its own here.

    Slower than the forms of :mod:`mpgelu.export.distribution`: quantiles take a fixed number of bisections.

    Args:
        x: Raw features ``(rows, n)``.
        parts: The model.
        levels: Probabilities of the quantiles.
    """
    return _traced(_Whole(parts, levels), x, len(parts.feature_names))


def _traced(module: nn.Module, x: Value, features: int) -> list[Value]:
    """The nodes of a module that takes ``(rows, features)``."""
    from torch._inductor import inductor_prims

    fma = getattr(inductor_prims, "fma", None)  # newer versions of torch have it
    with _quiet():
        try:
            program = torch.onnx.export(
                module.eval().requires_grad_(False),
                (torch.zeros(7, features),),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
                opset_version=OPSET,
                verbose=False,
                custom_translation_table={fma: _fma} if fma else None,
            )
        except torch.onnx.OnnxExporterError as error:
            raise InputError(f"export_onnx: torch cannot trace this network: {str(error).splitlines()[0]}") from error
    assert program is not None
    return x.graph.include(program.model_proto, x)
