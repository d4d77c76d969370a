"""Networks as data: described, built again, recognised."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import layers
from mpgelu.networks.description import Description, build, describe, description_of
from mpgelu.networks.perceptron import perceptron_of

NETWORKS = {
    "mpgelu": lambda: mp.network(3, (5, 4), rate=0.1),
    "relu": lambda: mp.network(3, (5,), nonlinearity="relu"),
    "gaussian": lambda: mp.network(3, (5,), gaussian_weights=True),
    "paper": lambda: nn.Sequential(layers.Dropout(0.2, rescale=False), layers.Linear(3, 2)),
    "others": lambda: nn.Sequential(
        layers.Linear(3, 4, bias=False), layers.LayerNorm(4), layers.Softplus(2.0), layers.LeakyReLU(0.2, "gain"),
        layers.BatchNorm1d(4), layers.GELU(), layers.SiLU(), layers.Tanh(), layers.Sigmoid(), layers.Linear(4, 2),
    ),
    "branches": lambda: nn.Sequential(
        layers.Beside(layers.Linear(3, 2), mp.network(3, (4,), outputs=1)), layers.Linear(3, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_built_again_from_json(name: str) -> None:
    network = NETWORKS[name]()
    text = json.dumps(describe(network).as_json())
    again = build(Description.from_json(json.loads(text)))
    again.load_state_dict(network.state_dict(), assign=True)
    x = torch.randn(7, 3)
    torch.testing.assert_close(again(x), network(x), rtol=0, atol=0)
    start = mp.DiagonalMoments.of(x, torch.rand(7, 3))
    ours, theirs = again(start), network(start)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=0, atol=0)
    assert describe(again) == describe(network)


def test_building_allocates_nothing() -> None:
    huge = Description("Linear", {"in_features": 10**9, "out_features": 10**9, "bias": True})
    assert build(huge).get_parameter("weight").device.type == "meta"


def test_a_stack_is_built_again() -> None:
    stack = mp.Stack([mp.network(3, (4,), rate=0.1 * i) for i in range(1, 4)])
    again = mp.Stack.empty(stack.description, 3)
    again.load_state_dict(stack.state_dict(), assign=True)
    value = mp.DiagonalMoments.certain(torch.randn(3, 5, 3))
    torch.testing.assert_close(again(value).variance, stack(value).variance, rtol=0, atol=0)


def test_unknown_layers_are_named() -> None:
    network = nn.Sequential(nn.Linear(3, 2))
    assert description_of(network) is None
    with pytest.raises(mp.InputError, match=r"describe: .* layer of type Linear, which is not registered"):
        describe(network)
    with pytest.raises(mp.DataError, match="no layer called 'Linaer'; did you mean 'Linear'"):
        build(Description("Linaer"))
    with pytest.raises(mp.DataError, match="cannot build a layer Linear"):
        build(Description("Linear", {"in_features": 3}))


@pytest.mark.parametrize("wrong", [None, 3, {}, {"kind": 3}, {"kind": "Sequential", "children": 3}])
def test_what_is_no_description_is_refused(wrong: object) -> None:
    with pytest.raises(mp.DataError, match=r"must"):
        Description.from_json(wrong)


def test_a_perceptron_is_recognised() -> None:
    found = perceptron_of(mp.network(3, (5, 4), rate=0.1))
    assert found is not None
    assert [layer.name for layer in found.layers] == ["1", "4", "7"]
    assert [layer.dropout for layer in found.layers] == ["0", "3", "6"]
    assert found.nonlinearity == Description("MPGELU")
    for network in (
        nn.Sequential(mp.Linear(3, 4), mp.ReLU(), mp.Linear(4, 4), mp.MPGELU(), mp.Linear(4, 1)),
        nn.Sequential(mp.Linear(3, 4), mp.MPGELU()),
        nn.Sequential(mp.Dropout(0.1), mp.Dropout(0.1), mp.Linear(3, 4)),
        nn.Sequential(nn.Sequential(mp.Linear(3, 4))),
    ):
        assert perceptron_of(network) is None
