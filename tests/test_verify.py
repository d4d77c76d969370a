"""The audit passes what is exact, fails what is not, and says so in a table."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import Audit, DiagonalMoments, FactoredMoments, FullMoments, InputError, verify

DRAWS = 5_000


def audit(net: nn.Module, rows: int = 4, **settings: Any) -> Audit:
    torch.manual_seed(3)
    x = torch.randn(rows, 3)
    return verify(net, x, **{"draws": DRAWS, **settings})


@pytest.mark.parametrize("start", [FactoredMoments.certain, FullMoments.certain])
def test_an_mpgelu_network_passes_at_every_layer(start: Any) -> None:
    result = audit(mp.network(3, (8, 8, 8), rate=0.2), moments=start)
    assert result.passed
    assert [layer.kind for layer in result.layers] == ["Dropout", "Linear"] + ["MPGELU", "Dropout", "Linear"] * 3
    assert [layer.layer for layer in result.layers] == [str(i) for i in range(11)]
    for layer in result.layers:
        assert layer.mean_error < 0.1
        assert layer.covariance_error < 0.2
        assert layer.smallest_eigenvalue > -1e-4
        assert layer.passed


@pytest.mark.parametrize(
    "net",
    [
        mp.network(3, (8, 8), rate=0.2, gaussian_weights=True),
        mp.paper_network("mpgelu", 3, rate=0.1),
        nn.Sequential(mp.Dropout(0.3, rescale=False), mp.Linear(3, 4), mp.GaussianLinear(4, 4, initial_variance=0.1)),
        nn.Sequential(mp.Linear(3, 6), nn.Sequential(mp.MPGELU(), mp.Linear(6, 1))),
    ],
    ids=["gaussian weights", "paper", "no nonlinearity", "nested and certain"],
)
def test_other_exact_networks_pass(net: nn.Module) -> None:
    assert audit(net).passed


def test_uncertain_inputs_pass() -> None:
    covariance = torch.tensor([[1.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 0.2]])
    result = audit(mp.network(3, (8,)), moments=lambda x: FactoredMoments.of(x, covariance[None]))
    assert result.passed


def test_relu_of_a_gaussian_passes_exactly_and_dvi_within_its_error() -> None:
    for covariance in ("exact", "dvi"):
        net = nn.Sequential(mp.Linear(3, 4), mp.ReLU(covariance), mp.Linear(4, 1))
        result = audit(net, moments=lambda x: FullMoments.of(x, torch.full_like(x, 0.5)), tolerance=0.05)
        assert result.passed
        assert result.layers[1].skewness > 0.3


def test_float64_networks_can_be_audited() -> None:
    net = mp.network(3, (8,)).double()
    assert verify(net, torch.randn(3, 3, dtype=torch.float64), draws=DRAWS).passed


@pytest.mark.parametrize("field", ["mean", "variance"])
def test_a_wrong_rule_fails_where_it_is_wrong(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = mp.rules.mpgelu.registry[FullMoments]

    def wrong(value: FullMoments) -> FullMoments:
        out: FullMoments = registered(value)
        if field == "mean":
            return replace(out, mean=out.mean + 0.3 * out.variance.sqrt())
        return replace(out, covariance=1.3 * out.covariance)

    layer = sys.modules["mpgelu.layers.mpgelu"]

    def rule(value: Any) -> Any:
        return replace(mp.rules.mpgelu(value), moments=wrong(value.moments))

    monkeypatch.setattr(layer, "mpgelu", rule)
    result = audit(mp.network(3, (8,), rate=0.2), moments=FullMoments.certain)
    verdicts = {row.kind: row.passed for row in result.layers[:3]}
    assert verdicts == {"Dropout": True, "Linear": True, "MPGELU": False}
    assert not result.passed
    assert "FAIL" in str(result)


def test_dropped_correlations_fail() -> None:
    result = audit(mp.network(3, (8, 8), rate=0.2), moments=DiagonalMoments.certain)
    assert not result.passed
    assert not next(row for row in result.layers if row.kind == "Linear").passed
    assert max(row.covariance_error for row in result.layers) > 0.3


def test_one_activation_used_twice_is_audited_twice() -> None:
    """Modules without parameters are often shared."""
    activation = mp.MPGELU()
    net = nn.Sequential(mp.Dropout(0.2), mp.Linear(3, 8), activation, mp.Linear(8, 5), activation, mp.Linear(5, 2))
    result = audit(net)
    assert result.passed
    assert [row.kind for row in result.layers].count("MPGELU") == 2


def test_the_same_seed_gives_the_same_audit() -> None:
    net = mp.network(3, (4,))
    first, again, other = (audit(net, seed=seed).layers for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_table() -> None:
    result = audit(mp.network(3, (4,)), rows=2)
    text = str(result)
    assert len({len(line) for line in text.splitlines()[:2]}) == 1
    assert text.count("pass") == len(result.layers) + 1  # one for each layer and one in the legend
    for word in ("layer", "mean error", "covariance error", "min eigen", "skew", "verdict", "5000 draws, 2 rows"):
        assert word in text
    frame = result.frame()
    assert len(frame) == len(result.layers)
    assert list(frame.kind) == [row.kind for row in result.layers]
    assert frame.passed.all()


def test_a_network_is_left_as_it_was() -> None:
    net = mp.network(3, (4,))
    audit(net)
    assert all(not module._forward_hooks for module in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_networks_without_parameters_can_be_audited() -> None:
    assert audit(nn.Sequential(mp.Dropout(0.3), mp.MPGELU())).passed


def test_bad_input() -> None:
    net = mp.network(3, (4,))
    with pytest.raises(InputError, match=r"verify: x must have shape \(rows, features\), got \(3,\)"):
        verify(net, torch.zeros(3))
    with pytest.raises(InputError, match="verify: draws must be at least 100, got 5"):
        verify(net, torch.zeros(2, 3), draws=5)
    with pytest.raises(InputError, match="linear: weight takes 3 features"):
        verify(net, torch.zeros(2, 4))
