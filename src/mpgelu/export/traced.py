"""Networks as ONNX nodes by torch's own exporter, for architectures without a graph of their own."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpgelu.errors import InputError, MPGELUError
from mpgelu.export.distribution import SMALLEST, Distribution, quantiles_by_row
from mpgelu.export.graph import OPSET, Value
from mpgelu.export.layers import Array
from mpgelu.export.perceptron import OF_FLUCTUATIONS, PAIRS, Outputs
from mpgelu.moments import DiagonalMoments, Moments
from mpgelu.networks import Members, Parts
from mpgelu.predictive import Predictive
from mpgelu.predictive.nodes import NODES


def _fma(a: Any, b: Any, c: Any) -> Any:
    """Return ``a b + c``, which torch generates for sums with a factor and does not translate itself."""
    from onnxscript import opset20 as op

    return op.Add(op.Mul(a, b), c)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log messages and warnings of torch's exporter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Moments(nn.Module):
    """Networks as a function from a plain tensor to plain tensors, without the dimension M for a single network."""

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


def outputs(x: Value, parts: Parts, scale: Array, shift: Array, extra: Value | None) -> Outputs:
    """Return the moments of the outputs of the networks, multiplied by ``scale`` and then shifted.

    Args:
        x: Scaled features, ``(rows, n)``.
        parts: The model, with M networks from moments to moments.
        scale: Gains of the outputs, ``(outputs,)``.
        shift: Shifts of the outputs, ``(outputs,)``.
        extra: Variance to add to that of each mean, ``(rows,)``; ``None`` for zero.
    """
    networks, features = parts.networks, len(parts.feature_names)
    module = copy.deepcopy(_Moments(networks, parts.moments)).float()
    mean, variance = _traced(module, x, features, row_axis=int(len(networks) > 1))
    correlated = parts.moments is not DiagonalMoments and len(scale) == 2
    first, second = PAIRS if correlated else (slice(None), slice(None))
    order = [2, 0, 1] if len(networks) > 1 else [1, 0]
    fluctuation = scale * OF_FLUCTUATIONS[: len(scale)]
    return Outputs(
        mean=(mean * scale[first] + shift[first]).op("Transpose", perm=order),
        variance=_widened(variance * (fluctuation[first] * fluctuation[second]), extra, len(scale) + correlated).op(
            "Transpose", perm=order
        ),
        correlated=correlated,
    )


def _widened(variance: Value, extra: Value | None, columns: int) -> Value:
    """Return variances ``(..., rows, columns)`` with ``extra`` ``(rows,)`` added to the first, that of the mean."""
    return variance if extra is None else variance + extra.reshape(-1, 1) * np.eye(columns)[0]


def member_outputs(
    x: Value, members: Members, features: int, scale: Array, shift: Array, extra: Value | None
) -> Outputs:
    """Return the moments of the mixed members, multiplied by ``scale`` and then shifted.

    Args:
        x: Scaled features, ``(rows, n)``.
        members: Module from these to means and variances, ``(M, rows, 2)`` each.
        features: Number n of features.
        scale: Gains of the outputs, ``(2,)``.
        shift: Shifts of the outputs, ``(2,)``.
        extra: Variance to add to that of each mean, ``(rows,)``; ``None`` for zero.
    """
    mean, variance = _traced(members, x, features, row_axis=1)
    variance = _widened(variance * (scale * OF_FLUCTUATIONS) ** 2, extra, len(scale))
    single = len(members.weights) == 1
    order = [1, 0] if single else [2, 0, 1]
    parts = [part.op("Squeeze", [0]) if single else part for part in (mean * scale + shift, variance)]
    after, spread = (part.op("Transpose", perm=order) for part in parts)
    return Outputs(after, spread, correlated=False)


class _Whole(nn.Module):
    """A model with any likelihood, as a function from raw features to its distribution.

    Outputs are mean, standard deviation and its two parts, ``(rows,)`` each, followed by means relative to the mean of
    the mixture, standard deviations and weights of the components, ``(rows, K)`` each.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.whole, self.parts = parts.whole, parts
        self.networks = nn.ModuleList(parts.networks)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.whole is not None:
            predictive: Predictive = self.whole(x, None, NODES)
        else:
            predictive = self.parts.likelihood.predictive(self.networks[0](self.parts.moments.certain(x)), NODES)
        parts = predictive.epistemic_variance.sqrt(), predictive.aleatoric_variance.sqrt()
        components = predictive.means - predictive.mean[:, None], predictive.variances.clamp_min(SMALLEST).sqrt()
        weights = predictive.log_weights.exp().expand(predictive.means.shape)
        return predictive.mean, predictive.stddev, *parts, *components, weights


def whole(x: Value, parts: Parts, levels: Sequence[float]) -> Distribution:
    """Return the distribution of a model whose likelihood has no form of its own in the graph.

    Args:
        x: Raw features, ``(rows, n)``.
        parts: The parts of the model.
        levels: Probabilities of the quantiles.
    """
    module, features = _Whole(parts), len(parts.feature_names)
    with torch.no_grad():
        components = module(torch.zeros(1, features, device="cpu"))[-1].shape[-1]
    mean, stddev, epistemic, aleatoric, means, stddevs, weights = _traced(module, x, features, row_axis=0)
    quantiles = quantiles_by_row(means, stddevs, weights, components, stddev, levels) if levels else None
    return Distribution(mean, stddev, epistemic, aleatoric, quantiles)


def _traced(module: nn.Module, x: Value, features: int, row_axis: int) -> list[Value]:
    """The nodes of a module that takes ``(rows, features)`` and gives tensors with the rows in ``row_axis``.

    A copy is traced, in evaluation mode and without gradients: the module itself may go on training.
    """
    from torch._inductor import inductor_prims

    module = copy.deepcopy(module).eval().requires_grad_(False)
    fma = getattr(inductor_prims, "fma", None)  # newer versions of torch have it
    with _quiet():
        try:
            program = torch.onnx.export(
                _without_checks(
                    torch.export.export(
                        module,
                        (torch.zeros(7, features, device="cpu"),),
                        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
                        strict=False,
                    )
                ),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                custom_translation_table={fma: _fma} if fma else None,
            )
        except MPGELUError:
            raise
        except Exception as error:  # torch raises errors of many types here, and a network of the user's any
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise InputError(f"export_onnx: torch cannot trace this network: {reason}") from error
    assert program is not None
    found = x.graph.include(program.model_proto, _at_least_one_row(x))
    rows = x.op("Shape", end=1)
    return [part.op("Slice", [0], rows, [row_axis]) for part in found]


def _without_checks(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Remove the checks of dtypes from a traced program, which torch cannot evaluate inside ``vmap``."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _at_least_one_row(x: Value) -> Value:
    """Zeros in place of no rows: onnxruntime does not reduce arrays without entries, as traced nodes would."""
    missing = (1 - x.op("Shape", end=1)).op("Max", np.array([0]))
    return x.op("Pad", x.graph.op("Concat", np.array([0, 0]), missing, np.array([0]), axis=0))
