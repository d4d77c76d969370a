"""Layers: what they own, what they do to a plain tensor, and that no mode changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpgelu as mp
from mpgelu import InputError
from mpgelu.rules import dropout, gaussian_linear, linear, mpgelu, relu
from reference import TYPES, random_covariance

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: mp.Linear(4, 3),
    "Linear without bias": lambda: mp.Linear(4, 3, bias=False),
    "GaussianLinear": lambda: mp.GaussianLinear(4, 3, initial_variance=0.1),
    "GaussianLinear without bias": lambda: mp.GaussianLinear(4, 3, bias=False, initial_variance=0.1),
    "Dropout": lambda: mp.Dropout(0.3),
    "Dropout of the paper": lambda: mp.Dropout(0.3, rescale=False),
    "MPGELU": mp.MPGELU,
    "ReLU": mp.ReLU,
    "ReLU by DVI": lambda: mp.ReLU("dvi"),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
# torch.compile itself builds an instance of every autograd function it meets, and warns about that.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def apply(layer: Any, value: Any) -> Any:
    """The rule that a layer stands for, called by hand."""
    if isinstance(layer, mp.GaussianLinear):
        return gaussian_linear(value, layer.weight, layer.weight_variance, layer.bias, layer.bias_variance)
    if isinstance(layer, mp.Linear):
        return linear(value, layer.weight, layer.bias)
    if isinstance(layer, mp.Dropout):
        return dropout(value, layer.rate, layer.rescale)
    return mpgelu(value) if isinstance(layer, mp.MPGELU) else relu(value, layer.covariance)


@EVERY_LAYER
@EVERY_TYPE
def test_a_layer_calls_its_rule(name: str, kind: Any) -> None:
    layer = LAYERS[name]()
    value = kind.of(torch.randn(5, 4), random_covariance(5, 4).float())
    out, wanted = layer(value), apply(layer, value)
    assert type(out) is type(wanted)
    assert torch.equal(out.mean, wanted.mean)
    assert torch.equal(out.covariance, wanted.covariance)


@EVERY_LAYER
def test_a_plain_tensor_meets_the_ordinary_layer(name: str) -> None:
    layer: Any = LAYERS[name]()
    x = torch.randn(2, 5, 4)
    if "Linear" in name:
        wanted = F.linear(x, layer.weight, layer.bias)
    elif "Dropout" in name:
        wanted = x if layer.rescale else x * (1 - layer.rate)
    else:
        wanted = torch.relu(x)
    assert torch.equal(layer(x), wanted)


@EVERY_LAYER
@EVERY_TYPE
def test_training_mode_changes_nothing(name: str, kind: Any) -> None:
    layer, value = LAYERS[name](), kind.of(torch.randn(5, 4), torch.rand(5, 4))
    training, evaluation = layer.train()(value), layer.eval()(value)
    assert torch.equal(training.mean, evaluation.mean)
    assert torch.equal(training.covariance, evaluation.covariance)
    assert torch.equal(layer.train()(value.mean), layer.eval()(value.mean))


@EVERY_LAYER
@EVERY_TYPE
def test_autograd_reaches_every_parameter(name: str, kind: Any) -> None:
    layer = LAYERS[name]()
    mean, spread = torch.randn(5, 4, requires_grad=True), torch.rand(5, 4).requires_grad_()
    out = layer(kind.of(mean, spread))
    inputs = [mean, spread, *layer.parameters()]
    gradients = torch.autograd.grad(out.mean.sum() + out.covariance.square().sum(), inputs)
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


@EVERY_LAYER
@EVERY_TYPE
def test_vmap_through_a_layer(name: str, kind: Any) -> None:
    layer, x = LAYERS[name](), torch.randn(5, 4)
    out = layer(kind.certain(x))

    def covariance(x: Any) -> Any:
        return layer(kind.certain(x)).covariance

    torch.testing.assert_close(torch.func.vmap(covariance)(x), out.covariance)


@COMPILES
@EVERY_LAYER
@EVERY_TYPE
def test_compiled_whole(name: str, kind: Any) -> None:
    torch.compiler.reset()
    layer = LAYERS[name]()

    def loss(mean: Any, spread: Any) -> Any:
        out = layer(kind.of(mean, spread))
        return out.mean.sum() + out.covariance.square().sum()

    mean, spread = torch.randn(5, 4, requires_grad=True), torch.rand(5, 4).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mean, spread), loss(mean, spread))
    inputs = [mean, spread, *layer.parameters()]
    found, wanted = (torch.autograd.grad(function(mean, spread), inputs) for function in (compiled, loss))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@COMPILES
@EVERY_TYPE
@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
def test_a_compiled_network_takes_moments_as_they_are(nonlinearity: Any, kind: Any) -> None:
    torch.compiler.reset()
    net = mp.network(3, (6, 6), nonlinearity=nonlinearity, gaussian_weights=True)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    value = kind.of(torch.randn(5, 3), torch.rand(5, 3))
    out, wanted = compiled(value), net(value)
    assert type(out) is type(wanted)
    torch.testing.assert_close(out.mean, wanted.mean)
    torch.testing.assert_close(out.covariance, wanted.covariance)


# Parameters, buffers and words


def test_state_and_repr() -> None:
    texts = {
        "Linear": "Linear(in_features=4, out_features=3, bias=True)",
        "GaussianLinear": "GaussianLinear(in_features=4, out_features=3, bias=True)",
        "Dropout": "Dropout(rate=0.3, rescale=True)",
        "Dropout of the paper": "Dropout(rate=0.3, rescale=False)",
        "MPGELU": "MPGELU()",
        "ReLU": "ReLU(covariance='exact')",
        "ReLU by DVI": "ReLU(covariance='dvi')",
    }
    for name, text in texts.items():
        assert repr(LAYERS[name]()) == text
    assert set(mp.GaussianLinear(2, 1).state_dict()) == {"weight", "bias", "log_weight_variance", "log_bias_variance"}
    assert set(mp.GaussianLinear(2, 1, bias=False).state_dict()) == {"weight", "log_weight_variance"}


def test_the_rate_is_a_buffer() -> None:
    layer = mp.Dropout(0.25)
    assert not list(layer.parameters())
    assert dict(layer.named_buffers())["rate"].item() == 0.25
    assert layer.double().rate.dtype == torch.float64
    other = mp.Dropout(0.5)
    other.load_state_dict(layer.state_dict())
    assert other.rate.item() == 0.25
    assert mp.Dropout(0.1, dtype=torch.float64).rate.item() == 0.1
    assert mp.Dropout().rate.item() == 0.5


def test_layers_take_device_and_dtype() -> None:
    for layer in (
        mp.Linear(2, 3, device="meta", dtype=torch.float64),
        mp.GaussianLinear(2, 3, device="meta", dtype=torch.float64),
        mp.Dropout(0.1, device="meta", dtype=torch.float64),
    ):
        assert {(t.device.type, t.dtype) for t in layer.state_dict().values()} == {("meta", torch.float64)}


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_rate_outside_its_range(rate: float) -> None:
    with pytest.raises(InputError, match=rf"Dropout: rate must be in \[0, 1\), got {rate}; it is the probability"):
        mp.Dropout(rate)


def test_a_rate_that_rounds_to_one_is_refused_or_stays_finite() -> None:
    try:
        layer = mp.Dropout(1 - 1e-9)
    except InputError:
        return
    assert layer(mp.DiagonalMoments.certain(torch.ones(1, 2))).variance.isfinite().all()


def test_bad_relu_covariance() -> None:
    with pytest.raises(InputError, match="ReLU: covariance must be 'exact' or 'dvi', got 'full'"):
        mp.ReLU("full")  # type: ignore[arg-type]


# GaussianLinear


@pytest.mark.parametrize("variance", [0.0, -1.0, float("nan")])
def test_bad_initial_variance(variance: float) -> None:
    with pytest.raises(InputError, match="GaussianLinear: initial_variance must be positive"):
        mp.GaussianLinear(2, 3, initial_variance=variance)


@pytest.mark.parametrize("variance", [1e-60, 1e-4, 0.3])
def test_initial_variance_is_kept_in_double_precision(variance: float) -> None:
    layer = mp.GaussianLinear(2, 3, initial_variance=variance, dtype=torch.float64)
    assert layer.bias_variance is not None
    for found in (layer.weight_variance, layer.bias_variance):
        torch.testing.assert_close(found, torch.full_like(found, variance), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prior", [1.0, 0.3, torch.tensor(2.5)])
def test_kl_is_that_of_torch_distributions(bias: bool, prior: Any) -> None:
    layer = mp.GaussianLinear(4, 3, bias=bias, initial_variance=0.2, dtype=torch.float64)
    with torch.no_grad():
        layer.log_weight_variance.add_(torch.randn(3, 4))
    wanted = torch.zeros((), dtype=torch.float64)
    pairs = [(layer.weight, layer.weight_variance)] + ([(layer.bias, layer.bias_variance)] if bias else [])
    for mean, variance in pairs:
        assert variance is not None
        posterior = torch.distributions.Normal(mean, variance.sqrt())
        start = torch.distributions.Normal(torch.zeros_like(mean), torch.as_tensor(prior).double().sqrt())
        wanted = wanted + torch.distributions.kl_divergence(posterior, start).sum()
    torch.testing.assert_close(layer.kl(prior), wanted, rtol=1e-6, atol=0)
    layer.kl(prior).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_kl_is_zero_at_the_prior() -> None:
    layer = mp.GaussianLinear(4, 3, initial_variance=1.0)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    assert layer.kl().item() == pytest.approx(0, abs=1e-6)
