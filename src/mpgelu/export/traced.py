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
from numpy.typing import NDArray
from torch import Tensor, nn

from mpgelu.errors import InputError
from mpgelu.estimators.recipe import Covariance
from mpgelu.export.graph import OPSET, Value
from mpgelu.export.perceptron import OF_FLUCTUATIONS, PAIRS, Outputs
from mpgelu.moments import DiagonalMoments, FactoredMoments, Moments


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

    def __init__(self, networks: Sequence[nn.Module], covariance: Covariance) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.kind = FactoredMoments if covariance == "exact" else DiagonalMoments

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        each = [self._moments(network(self.kind.certain(x))) for network in self.networks]
        return each[0] if len(each) == 1 else tuple(torch.stack(part) for part in zip(*each, strict=True))

    def _moments(self, outputs: Moments) -> tuple[Tensor, ...]:
        if outputs.features == 1 or self.kind is DiagonalMoments:
            return outputs.mean, outputs.variance
        first, second = PAIRS
        return outputs.mean[..., first], outputs.covariance[..., first, second]


def outputs(
    x: Value,
    networks: Sequence[nn.Module],
    covariance: Covariance,
    scale: NDArray[np.float64],
    shift: NDArray[np.float64],
) -> Outputs:
    """Moments of the networks' outputs, multiplied by ``scale`` and then shifted.

    Args:
        x: standardised features ``(rows, n)``.
        networks: M modules from moments to moments.
        covariance: of the moments.
        scale: ``(outputs,)``.
        shift: ``(outputs,)``.
    """
    from torch._inductor import inductor_prims

    fma = getattr(inductor_prims, "fma", None)  # newer versions of torch have it
    wanted = next((module.in_features for module in networks[0].modules() if isinstance(module, nn.Linear)), 1)
    module = _Moments(networks, covariance).float().eval().requires_grad_(False)
    rows = {0: torch.export.Dim.DYNAMIC}
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                (torch.zeros(7, wanted),),
                dynamo=True,
                dynamic_shapes=(rows,),
                opset_version=OPSET,
                verbose=False,
                custom_translation_table={fma: _fma} if fma else None,
            )
        except torch.onnx.OnnxExporterError as error:
            raise InputError(f"export_onnx: torch cannot trace this network: {str(error).splitlines()[0]}") from error
    assert program is not None
    mean, variance = x.graph.include(program.model_proto, x)
    correlated = covariance == "exact" and len(scale) == 2
    first, second = PAIRS if correlated else (slice(None), slice(None))
    order = [2, 0, 1] if len(networks) > 1 else [1, 0]
    fluctuation = scale * OF_FLUCTUATIONS[: len(scale)]
    return Outputs(
        mean=(mean * scale[first] + shift[first]).op("Transpose", perm=order),
        variance=(variance * (fluctuation[first] * fluctuation[second])).op("Transpose", perm=order),
        correlated=correlated,
    )
