"""The layers that torch modules are converted into: what a plain tensor meets, and that they call their rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpgelu import InputError, layers
from mpgelu.rules import batch_norm, elementwise, layer_norm, leaky_relu, scale
from reference import TYPES, random_covariance

N = 4


def normed() -> layers.BatchNorm1d:
    layer = layers.BatchNorm1d(N)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return layer


# name: the layer, and the torch module that it is for tensors
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "GELU": (layers.GELU, nn.GELU),
    "SiLU": (layers.SiLU, nn.SiLU),
    "Tanh": (layers.Tanh, nn.Tanh),
    "Sigmoid": (layers.Sigmoid, nn.Sigmoid),
    "Softplus": (lambda: layers.Softplus(2.0), lambda: nn.Softplus(2.0)),
    "LeakyReLU": (layers.LeakyReLU, nn.LeakyReLU),
    "LeakyReLU by its gain": (lambda: layers.LeakyReLU(0.2, "gain"), lambda: nn.LeakyReLU(0.2)),
    "LayerNorm": (lambda: layers.LayerNorm(N), lambda: nn.LayerNorm(N)),
    "BatchNorm1d": (normed, lambda: nn.BatchNorm1d(N)),
    "Operation": (lambda: layers.Operation(scale, gain=2.0), lambda: layers.Operation(torch.mul, other=2.0)),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def apply(layer: Any, value: Any) -> Any:
    """The rule that a layer stands for, called by hand."""
    if isinstance(layer, layers.Elementwise):
        return elementwise(value, layer.activation)
    if isinstance(layer, layers.LeakyReLU):
        return leaky_relu(value, layer.negative_slope, layer.covariance)
    if isinstance(layer, layers.LayerNorm):
        return layer_norm(value, layer.weight, layer.bias, layer.eps)
    if isinstance(layer, layers.BatchNorm1d):
        return batch_norm(value, layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.eps)  # type: ignore[arg-type]
    return scale(value, 2.0)


@EVERY_LAYER
def test_a_plain_tensor_meets_the_layer_of_torch(name: str) -> None:
    ours, theirs = (make() for make in LAYERS[name])
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(7, N)
    torch.testing.assert_close(ours.train()(x), theirs.eval()(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@EVERY_LAYER
@EVERY_TYPE
def test_a_layer_calls_its_rule_in_any_mode(name: str, kind: Any) -> None:
    layer = LAYERS[name][0]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    value = kind.of(torch.randn(5, N), random_covariance(5, N).float())
    wanted = apply(layer, value)
    for out in (layer.train()(value), layer.eval()(value)):
        assert type(out) is type(wanted)
        assert torch.equal(out.mean, wanted.mean)
        assert torch.equal(out.covariance, wanted.covariance)


@COMPILES
@EVERY_LAYER
@EVERY_TYPE
def test_compiled_whole_and_vmapped(name: str, kind: Any) -> None:
    torch.compiler.reset()
    layer = LAYERS[name][0]()

    def loss(mean: Any, spread: Any) -> Any:
        out = layer(kind.of(mean, spread))
        return out.mean.sum() + out.covariance.square().sum()

    mean, spread = torch.randn(5, N, requires_grad=True), torch.rand(5, N).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mean, spread), loss(mean, spread))
    found, wanted = (torch.autograd.grad(f(mean, spread), (mean, spread)) for f in (compiled, loss))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    rows = torch.func.vmap(lambda m, v: layer(kind.of(m, v)).covariance)(mean, spread)
    torch.testing.assert_close(rows, layer(kind.of(mean, spread)).covariance)


def test_settings_are_shown() -> None:
    assert repr(layers.LeakyReLU(0.2)) == "LeakyReLU(negative_slope=0.2, covariance='exact')"
    assert repr(layers.Operation(scale, gain=2.0)) == "Operation(scale, gain=2.0)"
    assert repr(layers.Softplus(2.0)) == "Softplus(beta=2.0, threshold=20.0)"
    assert repr(layers.Tanh()) == "Tanh()"


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="LeakyReLU: covariance must be 'exact' or 'gain', got 'dvi'"):
        layers.LeakyReLU(covariance="dvi")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="BatchNorm1d: there are no running statistics"):
        layers.BatchNorm1d(N, track_running_stats=False)(torch.ones(2, N))
