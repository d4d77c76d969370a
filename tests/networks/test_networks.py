"""Ready-made networks and stacks of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import Dropout, FactoredMoments, FullMoments, GaussianLinear, InputError, Linear, Stack
from mpgelu.layers import LeakyReLU, Tanh
from reference import TYPES


def names(net: nn.Sequential) -> list[str]:
    return [type(layer).__name__ for layer in net]


# network


def test_network_puts_dropout_before_every_linear_layer() -> None:
    net = mp.network(4, hidden=(8, 6), outputs=1, rate=0.2)
    assert names(net) == ["Dropout", "Linear", "MPGELU", "Dropout", "Linear", "MPGELU", "Dropout", "Linear"]
    assert [tuple(layer.weight.shape) for layer in net if isinstance(layer, Linear)] == [(8, 4), (6, 8), (1, 6)]
    assert all(layer.rescale and layer.rate.item() == pytest.approx(0.2) for layer in net if isinstance(layer, Dropout))


def test_network_variants() -> None:
    assert names(mp.network(4, hidden=(8,), rate=0)) == ["Linear", "MPGELU", "Linear"]
    assert names(mp.network(4, hidden=(), rate=0)) == ["Linear"]
    relu = mp.network(4, hidden=(8,), nonlinearity="relu", rate=0)
    assert isinstance(relu[1], mp.ReLU)
    assert relu[1].covariance == "exact"
    gaussian = mp.network(4, hidden=(8,), gaussian_weights=True)
    assert sum(isinstance(layer, GaussianLinear) for layer in gaussian) == 2


def test_network_takes_a_factory_of_nonlinearities() -> None:
    net = mp.network(4, hidden=(8, 8), nonlinearity=Tanh, rate=0)
    assert names(net) == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    assert net[1] is not net[3]
    leaky = mp.network(4, hidden=(8,), nonlinearity=lambda: LeakyReLU(0.2), rate=0)
    assert isinstance(leaky[1], LeakyReLU)
    assert leaky[1].negative_slope == 0.2
    assert leaky(FactoredMoments.certain(torch.randn(3, 4))).mean.shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"in_features": 0}, "in_features must be a positive whole number, got 0"),
        ({"in_features": 2.5}, "in_features must be a positive whole number, got 2.5"),
        ({"outputs": -1}, "outputs must be a positive whole number, got -1"),
        ({"hidden": (8, 0)}, "hidden must be a positive whole number, got 0"),
        ({"nonlinearity": "tanh"}, "nonlinearity must be 'mpgelu' or 'relu', got 'tanh'"),
        ({"hidden": 32}, r"hidden must be a sequence .*, got 32; for one hidden layer use hidden=\(32,\)"),
        ({"hidden": "32"}, r"hidden must be a sequence .*, got '32'$"),
        ({"nonlinearity": Tanh()}, r"got the layer Tanh\(\); every hidden layer needs its own, so give the class Tanh"),
        ({"nonlinearity": lambda: 3}, "nonlinearity must make an nn.Module, but it made 3"),
        ({"rate": 1.0}, r"rate must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_sizes(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        mp.network(**{"in_features": 3, **arguments})


# paper_network


@pytest.mark.parametrize("outputs", [1, 2])
def test_paper_network_mpgelu(outputs: int) -> None:
    net = mp.paper_network(7, outputs=outputs, rate=0.05)
    assert names(net) == ["Dropout", "Linear", "MPGELU", "Linear", "MPGELU", "Linear"]
    shapes = [tuple(layer.weight.shape) for layer in net if isinstance(layer, Linear)]
    assert shapes == [(20, 7), (20, 20), (outputs, 20)]


@pytest.mark.parametrize("outputs", [1, 2])
def test_paper_network_relu(outputs: int) -> None:
    net = mp.paper_network(7, outputs=outputs, nonlinearity="relu", rate=0.05)
    assert names(net) == ["Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    assert [layer.covariance for layer in net if isinstance(layer, mp.ReLU)] == ["dvi", "dvi"]


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
def test_paper_network_starts_glorot_uniform_without_rescaled_dropout(nonlinearity: Any) -> None:
    net = mp.paper_network(300, nonlinearity=nonlinearity, rate=0.05, hidden=(200, 200))
    for layer in net:
        if isinstance(layer, Linear):
            bound = math.sqrt(6 / sum(layer.weight.shape))
            assert torch.equal(layer.bias, torch.zeros_like(layer.bias))
            assert layer.weight.abs().max() <= bound
            assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
            assert layer.weight.abs().max() > 0.95 * bound
        elif isinstance(layer, Dropout):
            assert not layer.rescale
            assert layer.rate.item() == pytest.approx(0.05)


def test_paper_network_relu_with_dropout_on_the_input_alone() -> None:
    net = mp.paper_network(nonlinearity="relu", in_features=7, rate=0.05, relu_dropout="input")
    assert [type(layer).__name__ for layer in net] == ["Dropout", "Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_paper_network_names_itself_in_errors() -> None:
    with pytest.raises(InputError, match=r"^paper_network: relu_dropout must be 'each' or 'input', got 'none'"):
        mp.paper_network(nonlinearity="relu", in_features=3, relu_dropout="none")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^paper_network: nonlinearity"):
        mp.paper_network(3, nonlinearity="gelu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^paper_network: in_features"):
        mp.paper_network(0, nonlinearity="relu")


# Stack


def different_networks(nonlinearity: Any = "mpgelu", dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    return [mp.network(3, (6, 6), nonlinearity=nonlinearity, rate=rate).to(dtype) for rate in (0.01, 0.1, 0.4)]


@pytest.mark.parametrize("kind", [*TYPES, None])
@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
def test_a_stack_is_a_loop_over_its_networks(nonlinearity: str, kind: Any) -> None:
    networks = different_networks(nonlinearity)
    stack, x = Stack(networks), torch.randn(3, 5, 3, dtype=torch.float64)

    def start(x: Tensor) -> Any:
        return x if kind is None else kind.certain(x)

    def loss(out: Any) -> Any:
        return out.square().sum() if kind is None else out.mean.square().sum() + out.covariance.sum()

    out = stack(start(x))
    gradients = torch.autograd.grad(loss(out), list(stack.parameters()))
    for index, net in enumerate(networks):
        alone = net(start(x[index]))
        pairs = [(out, alone)] if kind is None else [(out.mean, alone.mean), (out.covariance, alone.covariance)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours[index], theirs, rtol=1e-11, atol=1e-13)
        wanted = torch.autograd.grad(loss(alone), list(net.parameters()))
        for ours, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours[index], theirs, rtol=1e-9, atol=1e-11)


def test_a_stack_returns_dense_moments_of_its_factored_ones() -> None:
    stack = Stack(different_networks(dtype=torch.float32))
    assert len(stack) == 3
    assert type(stack(FactoredMoments.certain(torch.randn(3, 5, 3)))) is FullMoments


@pytest.mark.parametrize("max_rank", [3, math.inf])
def test_a_stack_takes_max_rank(max_rank: float) -> None:
    networks, x = different_networks(), torch.randn(3, 5, 3, dtype=torch.float64)
    out = Stack(networks)(FactoredMoments.certain(x, max_rank))
    for index, net in enumerate(networks):
        wanted = net(FactoredMoments.certain(x[index], max_rank)).covariance
        torch.testing.assert_close(out.covariance[index], wanted, rtol=1e-11, atol=1e-13)


def test_unstack_gives_the_networks_back() -> None:
    networks = [mp.network(3, (6,), rate=rate, gaussian_weights=True) for rate in (0.1, 0.3)]
    stack = Stack(networks)
    returned = stack.unstack()
    for ours, theirs in zip(returned, networks, strict=True):
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
        assert all(p.requires_grad and p.is_leaf for p in ours.parameters())
    with torch.no_grad():  # copies, in both directions
        next(stack.parameters()).zero_()
    assert all(p.abs().sum() > 0 for net in (*networks, *returned) for p in net.parameters())


def test_unstack_keeps_the_dtype() -> None:
    single, double = (Stack(different_networks(dtype=dtype)) for dtype in (torch.float32, torch.float64))
    for stack in (double, single.double()):
        for net in stack.unstack():
            assert {value.dtype for value in net.state_dict().values()} == {torch.float64}
    wide = Stack([mp.network(3).double()])
    with torch.no_grad():
        next(wide.parameters()).fill_(1 / 3)
    assert next(wide.unstack()[0].parameters()).flatten()[0].item() == 1 / 3


def test_a_stack_keeps_its_state_dict_and_device() -> None:
    stack, other = Stack(different_networks()), Stack(different_networks())
    other.load_state_dict(stack.state_dict())
    x = FactoredMoments.certain(torch.randn(3, 5, 3, dtype=torch.float64))
    assert torch.equal(stack(x).covariance, other(x).covariance)
    assert {t.device.type for t in stack.to("meta").state_dict().values()} == {"meta"}


def test_an_empty_stack_is_refused() -> None:
    with pytest.raises(InputError, match="Stack: needs at least one network, got none"):
        Stack([])
