"""Every layer, and the whole predictive distribution, as one graph: torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from every_layer import LAYERS as EVERY_LAYER
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, layers, native
from mpgelu.moments import Moments
from mpgelu.networks import FeatureScale

KINDS = [DiagonalMoments, FactoredMoments, FullMoments]
# A container, whose branches full moments refuse to join, is left out.
LAYERS = {name: layer for name, layer in EVERY_LAYER.items() if name != "Beside"}


class Plain(nn.Module):
    """A layer from tensors to tensors."""

    def __init__(self, layer: nn.Module, kind: Any) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind is FactoredMoments:
            moments = self.kind(mean, residual=variance)
        else:
            moments = self.kind(mean, torch.diag_embed(variance) if self.kind is FullMoments else variance)
        output = self.layer(moments)
        return output.mean, output.covariance


def test_every_layer_is_here() -> None:
    assert set(EVERY_LAYER) == set(layers.__all__) - {"layers"}  # the registry


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it itself
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, kind: Any) -> None:
    module = Plain(LAYERS[name](), kind).eval().requires_grad_(False)
    inputs = torch.randn(5, 4), torch.rand(5, 4)
    rows = {0: torch.export.Dim.DYNAMIC}
    wanted = module(*inputs)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")  # the graph, not what a compiler makes of it
    exported = torch.export.export(module, inputs, dynamic_shapes=(rows, rows)).module()
    for run in (compiled, exported):
        torch.testing.assert_close(run(*inputs), wanted, rtol=1e-4, atol=1e-6)
    more = torch.randn(9, 4), torch.rand(9, 4)
    torch.testing.assert_close(exported(*more), module(*more), rtol=1e-4, atol=1e-6)


class Summary(nn.Module):
    """An ensemble's predictive as plain tensors."""

    def __init__(self, moments: type[Moments], members: int = 2) -> None:
        super().__init__()
        stack = mp.Stack([mp.network(3, (6, 5), rate=0.1) for _ in range(members)])
        scaling = FeatureScale.standard(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 0.5]))
        weights, target = torch.full((members,), 1 / members), (torch.tensor(7.0), torch.tensor(2.0))
        self.ensemble = mp.Ensemble([stack], weights, mp.HeteroscedasticGaussian(), scaling, *target, moments)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        predictive = self.ensemble(x, None, 8)
        quantiles = predictive.quantile([0.05, 0.95])
        return predictive.mean, predictive.stddev, predictive.epistemic_variance, quantiles, predictive.log_prob(7.0)


@pytest.mark.parametrize("moments", [FactoredMoments, DiagonalMoments])
def test_the_whole_predictive(moments: type[Moments]) -> None:
    module = Summary(moments).requires_grad_(False).eval()
    x = torch.randn(4, 3)
    wanted = module(x)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    for run in (compiled, exported):
        torch.testing.assert_close(run(x), wanted, rtol=1e-4, atol=1e-4)
    more = torch.randn(9, 3)
    torch.testing.assert_close(exported(more), module(more), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.skipif(not native.can_compile(), reason="torch.compile needs a C++ compiler")
def test_a_real_compiler_gives_the_same_numbers() -> None:
    network = mp.network(3, (6,), rate=0.1).requires_grad_(False)
    likelihood = mp.HeteroscedasticGaussian()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        predictive = likelihood.predictive(network(FactoredMoments.certain(x)), 8)
        return predictive.mean, predictive.stddev

    torch.compiler.reset()
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(predict, fullgraph=True)(x), predict(x), rtol=1e-4, atol=1e-5)
