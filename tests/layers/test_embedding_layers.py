"""Embedding and scaling of features, as layers: parameters, transforms, and the instruments that look into networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, InputError, attribute, export_onnx, layers, verify
from mpgelu.networks import FeatureScale
from mpgelu.rules import elementwise, periodic, scale
from mpgelu.rules.activations import SmoothLimit
from reference import TYPES, random_covariance

N = 4
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Periodic": lambda: layers.Periodic(N, frequencies=3, outputs=2),
    "Scale": lambda: layers.Scale(N),
    "RobustScale": lambda: layers.RobustScale(torch.randn(N), torch.rand(N) + 0.5),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def embedded(outputs: int = 2, rate: float = 0.1) -> nn.Sequential:
    """Robust scale, learned scale and embedding before an MP-GELU network."""
    first = [layers.RobustScale.of(2 * torch.randn(50, N) + 1), layers.Scale(N), layers.Periodic(N, 6)]
    return nn.Sequential(*first, *mp.network(4 * N, (8,), outputs, rate=rate))


def apply(layer: Any, value: Any) -> Any:
    """What a layer stands for, by hand."""
    if isinstance(layer, layers.Periodic):
        return periodic(value, layer.frequency, layer.phase, layer.weight)
    if isinstance(layer, layers.Scale):
        return scale(value, layer.weight)
    matrix, shift = torch.diag(1 / layer.scale), -layer.center / layer.scale
    return elementwise(mp.rules.linear(value, matrix, shift), SmoothLimit(3.0))


@EVERY_LAYER
@EVERY_TYPE
def test_a_layer_calls_its_rule_in_any_mode(name: str, kind: Any) -> None:
    layer, mean = LAYERS[name](), torch.randn(5, N)
    value = kind.of(mean, random_covariance(5, N).float())
    wanted = apply(layer, value)
    for mode in (layer.train(), layer.eval()):
        out = mode(value)
        assert type(out) is type(wanted)
        torch.testing.assert_close(out.mean, wanted.mean)
        torch.testing.assert_close(out.covariance, wanted.covariance)
        torch.testing.assert_close(mode(mean), apply(layer, mean))


@COMPILES
@EVERY_LAYER
@EVERY_TYPE
def test_compiled_whole_and_vmapped(name: str, kind: Any) -> None:
    torch.compiler.reset()
    layer = LAYERS[name]()

    def loss(mean: Any, spread: Any) -> Any:
        out = layer(kind.of(mean, spread))
        return out.mean.sum() + out.covariance.square().sum()

    mean, spread = torch.randn(5, N, requires_grad=True), torch.rand(5, N).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = [mean, spread, *layer.parameters()]
    found, wanted = (torch.autograd.grad(function(mean, spread), inputs) for function in (compiled, loss))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in wanted)
    rows = torch.func.vmap(lambda m, v: layer(kind.of(m, v)).covariance)(mean, spread)
    torch.testing.assert_close(rows, layer(kind.of(mean, spread)).covariance)


@EVERY_TYPE
def test_many_models_run_as_one(kind: Any) -> None:
    networks = [embedded() for _ in range(3)]
    x, variance = torch.randn(3, 5, N), torch.rand(3, 5, N)
    for given in (kind.certain(x), kind.of(x, variance)):
        out = mp.Stack(networks)(given)
        for i, network in enumerate(networks):
            alone = network(kind.certain(x[i]) if given.variance.sum() == 0 else kind.of(x[i], variance[i]))
            torch.testing.assert_close(out.mean[i], alone.mean)
            torch.testing.assert_close(out.covariance[i], alone.covariance, rtol=1e-4, atol=1e-6)


# Parameters, words and errors


def test_the_start_of_an_embedding() -> None:
    layer = layers.Periodic(50, frequencies=100, sigma=0.2, outputs=3)
    assert layer.out_features == layer(torch.randn(2, 50)).shape[-1] == 200
    assert layer.frequency.std().item() == pytest.approx(0.2, rel=0.05)
    assert (layer.phase.min() >= 0) & (layer.phase.max() <= 1) & (layer.phase.std() > 0.28)
    assert layer.weight.abs().max().item() == pytest.approx(0.1, rel=0.01)
    assert {tuple(p.shape) for p in layer.parameters()} == {(50, 100), (50, 100, 3)}
    tensors = layers.Periodic(2, device="meta", dtype=torch.float64).state_dict().values()
    assert {(t.device.type, t.dtype) for t in tensors} == {("meta", torch.float64)}


def test_words() -> None:
    assert repr(layers.Periodic(4)) == "Periodic(in_features=4, frequencies=16, sigma=0.3, outputs=3)"
    assert repr(layers.Scale(4)) == "Scale(in_features=4)"
    assert repr(layers.RobustScale(torch.zeros(4), torch.ones(4))) == "RobustScale(in_features=4, limit=3)"


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="Periodic: frequencies must be at least 1, got 0"):
        layers.Periodic(3, frequencies=0)
    for sigma in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match=f"Periodic: sigma must be finite and not negative, got {sigma}"):
            layers.Periodic(3, sigma=sigma)
    with pytest.raises(InputError, match=r"RobustScale: center and scale must both .* got \(3,\) and \(2,\)"):
        layers.RobustScale(torch.zeros(3), torch.ones(2))
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="RobustScale: center must be finite, and scale finite and positive"):
            layers.RobustScale(torch.zeros(3), torch.full((3,), wrong))
    with pytest.raises(InputError, match="RobustScale: limit must be positive, got 0"):
        layers.RobustScale(torch.zeros(3), torch.ones(3), 0)


# Robust scaling


def test_robust_scaling_takes_the_middle_half_of_the_data() -> None:
    x = torch.stack([torch.arange(101.0), torch.zeros(101), torch.ones(101)], 1)
    x[0, 1], x[1, 1] = 4, -2  # half of the range, as most values are the same
    layer = layers.RobustScale.of(x)
    assert layer.center.tolist() == [50, 0, 1]
    assert layer.scale.tolist() == [50, 3, 1]
    assert not list(layer.parameters())


def test_near_values_pass_and_far_values_stop_at_the_limit() -> None:
    layer = layers.RobustScale(torch.tensor([1.0]), torch.tensor([2.0]), limit=3.0)
    z = torch.tensor([1e-4, 0.5, 3.0, 30.0, 1e10, 1e30, -1e38])
    out = layer((1 + 2 * z.double()).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out, z.double() / torch.hypot(torch.ones(()).double(), z.double() / 3))
    single = layer(z.unsqueeze(-1))
    assert single[-2:].flatten().tolist() == pytest.approx([3, -3], rel=1e-6)
    far = z.unsqueeze(-1).requires_grad_()
    assert torch.autograd.grad(layer(far).sum(), far)[0].isfinite().all()


# Instruments


def gaussian(x: Tensor) -> FactoredMoments:
    return FactoredMoments.of(x, torch.full_like(x, 0.3))


@pytest.mark.parametrize("start", [gaussian, FactoredMoments.certain])
def test_verify_passes_an_embedding(start: Any) -> None:
    net = nn.Sequential(layers.Scale(N), layers.Periodic(N, 4, sigma=0.3), mp.Linear(4 * N, 5), mp.Linear(5, 2))
    audit = verify(net, torch.randn(3, N), moments=start, draws=5000)
    assert audit.passed
    assert [layer.kind for layer in audit.layers] == ["Scale", "Periodic", "Linear", "Linear"]


def test_verify_sees_correlations_that_are_dropped() -> None:
    net = nn.Sequential(layers.Periodic(N, 4), mp.Linear(4 * N, 5))
    audit = verify(net, torch.randn(3, N), moments=lambda x: DiagonalMoments.from_moments(gaussian(x)), draws=5000)
    assert [layer.passed for layer in audit.layers] == [False, False]


def test_an_embedding_of_certain_features_is_no_source_of_variance() -> None:
    net, x = embedded(), torch.randn(6, N)
    frame = attribute(net, x)
    assert set(frame.kind) == {"noise", "dropout", "mpgelu"}
    assert set(frame[frame.layer == "3"].unit) == {str(i) for i in range(4 * N)}  # of the embedding, not the features


def test_errors_of_features_are_split_over_features() -> None:
    net, x = embedded(1).double(), torch.randn(6, N).double()
    frame = attribute(net, x, input_std=[0.1, 0.0, 0.3, 0.2])
    assert set(frame.kind) == {"noise", "input", "dropout", "mpgelu"}
    np.testing.assert_allclose(frame.groupby("row").share.sum(), 1)
    inputs = frame[frame.kind == "input"].groupby("unit").variance.sum()
    assert [inputs[f"x{i}"] > 0 for i in range(N)] == [True, False, True, True]


@pytest.mark.parametrize("dropout_first", [False, True])
def test_diagonal_moments_are_attributed_too(dropout_first: bool) -> None:
    first = [mp.Dropout(0.2)] if dropout_first else []
    networks = [nn.Sequential(*first, *embedded()) for _ in range(2)]
    scaling, target = FeatureScale.identity(N), (torch.zeros(()), torch.ones(()))
    weights, likelihood = torch.tensor([0.5, 0.5]), mp.HeteroscedasticGaussian()
    model = mp.Ensemble([mp.Stack(networks)], weights, likelihood, scaling, *target, DiagonalMoments)
    x = torch.randn(5, N)
    frame = attribute(model, x)
    kinds = {"noise", "dropout", "mpgelu", "disagreement"}
    assert set(frame.kind) == (kinds | {"robustscale", "periodic"} if dropout_first else kinds)
    variance = model(x, None, 32).variance
    np.testing.assert_allclose(frame.groupby("row").variance.sum(), variance.detach(), rtol=1e-4)


@pytest.mark.parametrize("kind", [FactoredMoments, DiagonalMoments])
def test_an_embedding_is_exported(kind: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net, x = embedded(), torch.randn(20, N)
    export_onnx(net, tmp_path / "model.onnx", moments=kind)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    wanted = mp.HeteroscedasticGaussian().predictive(net(kind.certain(x)))
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"features": x.numpy()}), strict=True))
    np.testing.assert_allclose(found["mean"].ravel(), wanted.mean.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["quantiles"], wanted.quantile([0.05, 0.5, 0.95]).detach(), rtol=1e-3, atol=1e-4)
