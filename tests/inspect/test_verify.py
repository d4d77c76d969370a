"""The audit passes what is exact, fails what is not, and says so in a table."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, InputError, verify
from mpgelu.errors import MissingRuleError
from mpgelu.inspect import Audit
from mpgelu.inspect.audit.samples import Samples, Source

DRAWS = 5_000
RATES = (1e-7, 1e-5, 1e-4, 1.5e-3, 0.01, 0.1, 0.5)


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
        mp.paper_network(3, rate=0.1),
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


def break_rule(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[FullMoments], FullMoments]) -> None:
    """Have a layer's rule change its output moments, and leave the samples alone."""
    layer, rule = sys.modules[f"mpgelu.layers.{name}"], getattr(mp.rules, name)

    def broken(value: Any, *settings: Any) -> Any:
        out = rule(value, *settings)
        return replace(out, moments=wrong(FullMoments.from_moments(out.moments)))

    monkeypatch.setattr(layer, name, broken)


def with_variance(factor: float) -> Callable[[FullMoments], FullMoments]:
    """Every variance wrong by a factor."""
    return lambda out: replace(out, covariance=out.covariance + torch.diag_embed((factor - 1) * out.variance))


@pytest.mark.parametrize("field", ["mean", "variance"])
def test_a_wrong_rule_fails_where_it_is_wrong(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(out: FullMoments) -> FullMoments:
        if field == "mean":
            return replace(out, mean=out.mean + 0.3 * out.variance.sqrt())
        return replace(out, covariance=1.3 * out.covariance)

    break_rule(monkeypatch, "mpgelu", wrong)
    result = audit(mp.network(3, (8,), rate=0.2), moments=FullMoments.certain)
    verdicts = {row.kind: row.verdict for row in result.layers[:3]}
    assert verdicts == {"Dropout": "pass", "Linear": "pass", "MPGELU": "FAIL"}
    assert not result.passed
    assert "FAIL" in str(result)


@pytest.mark.parametrize("factor", [0.97, 1.03])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rule", ["dropout", "linear", "mpgelu"])
def test_variances_wrong_by_three_percent_fail(
    rule: str, rate: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = mp.network(4, (8,), rate=rate), torch.randn(12, 4)
    assert verify(net, x, moments=FullMoments.certain, draws=DRAWS).passed
    break_rule(monkeypatch, rule, with_variance(factor))
    result = verify(net, x, moments=FullMoments.certain, draws=DRAWS)
    kind = {"dropout": "Dropout", "linear": "Linear", "mpgelu": "MPGELU"}[rule]
    assert next(row for row in result.layers if row.kind == kind).verdict == "FAIL"


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_variances_after_relu_wrong_by_three_percent_fail(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(mp.Linear(4, 8), mp.ReLU()), torch.randn(12, 4)
    break_rule(monkeypatch, "relu", with_variance(factor))
    result = verify(net, x, moments=lambda x: FullMoments.of(x, torch.full_like(x, 0.5)))
    assert [row.verdict for row in result.layers] == ["pass", "FAIL"]


def certain_or_not(kind: Any, certain: bool) -> Callable[[torch.Tensor], Any]:
    return kind.certain if certain else lambda x: kind.of(x, torch.full_like(x, 0.5))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", [FullMoments, FactoredMoments, DiagonalMoments])
@pytest.mark.parametrize("nonlinearity", [mp.MPGELU, mp.ReLU])
def test_exact_moments_are_not_called_wrong_however_rare_the_masks(nonlinearity: Any, kind: Any, rate: float) -> None:
    """ReLU is exact for a Gaussian input, diagonal moments for one unit."""
    width = 1 if kind is DiagonalMoments else 6
    gaussian = nonlinearity is mp.ReLU
    for seed in range(8):
        torch.manual_seed(seed)
        first = [mp.Linear(4, width)] if gaussian else [mp.Dropout(rate), mp.Linear(4, width)]
        net = nn.Sequential(*first, nonlinearity(), mp.Dropout(rate), mp.Linear(width, 2 if width > 1 else 1))
        x = 2 * torch.randn(3, 4)
        assert verify(net, x, moments=certain_or_not(kind, not gaussian), draws=1000, seed=seed).passed


@pytest.mark.parametrize("rate", RATES)
def test_masks_can_be_told_however_rare(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    net = mp.network(3, (8, 8), rate=rate)
    result = audit(net)
    assert result.passed
    assert result.decided
    assert all(row.judged == 1 for row in result.layers)
    break_rule(monkeypatch, "linear", with_variance(1.5))
    assert {row.verdict for row in audit(net).layers if row.kind == "Linear"} == {"FAIL"}


def test_units_that_rarely_move_together_are_not_called_wrong() -> None:
    """At a rate of 0.02, some of 276 pairs of units in 6 rows are hardly ever dropped together in 5000 draws."""
    unmixed = mp.Linear(24, 24)
    unmixed.load_state_dict({"weight": torch.eye(24), "bias": torch.zeros(24)})
    for seed in range(8):
        net = nn.Sequential(mp.Dropout(0.02), unmixed)
        assert verify(net, torch.ones(6, 24), draws=DRAWS, seed=seed).passed


def test_networks_may_have_an_encoder() -> None:
    """The name by which models of tables are known is one that networks like."""
    net = nn.Sequential(OrderedDict(encoder=mp.Linear(3, 4), dropout=mp.Dropout(0.2), head=mp.Linear(4, 1)))
    assert audit(net).passed
    assert set(mp.attribute(net, torch.randn(2, 3)).kind) == {"noise", "dropout"}


def test_weighted_draws_follow_the_law_of_the_masks() -> None:
    """Rare outcomes, alone and in two layers together, have the weight of their probability."""
    keep = torch.tensor([[0.5, 0.9, 0.999, 1 - 1e-6, 1e-6, 0.02]], dtype=torch.float64)
    source = Source(0, torch.device("cpu"), 50_000)
    source.layers = 2
    value = Samples(torch.ones(50_000, 1, 6), FullMoments.certain(torch.ones(1, 6)), source)
    first, second = (source.mask(value, keep, 1 - keep)[:, 0] for _ in range(2))
    weights = source.weights
    assert weights.max() <= 2
    assert weights.mean() == pytest.approx(1, abs=0.02)
    rare = torch.minimum(keep, 1 - keep)[0]
    for outcome in (first, second):
        taken = torch.where(keep[0] > 0.5, 1 - outcome, outcome)
        torch.testing.assert_close((weights * taken).mean(0)[1:], rare[1:], rtol=0.1, atol=0)
    both = (weights[:, 0] * (1 - first[:, 1]) * (1 - second[:, 2])).mean()
    assert both.item() == pytest.approx(1e-4, rel=0.2)


def test_what_the_draws_cannot_tell_is_undecided() -> None:
    result = audit(mp.network(3, (8,), rate=1e-4), draws=100)
    assert "undecided" in {row.verdict for row in result.layers}
    assert "undecided" in str(result)
    assert "too rarely random for 100 draws" in result.words()
    assert "Means and covariances agree with sampling at" in result.words()
    assert result.passed
    assert not result.decided


def test_masks_without_a_turn_leave_errors_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "linear", with_variance(9))
    net = mp.network(3, (60,), rate=1e-3)
    verdicts = {draws: {row.verdict for row in audit(net, draws=draws).layers[1:2]} for draws in (300, 3000)}
    assert verdicts == {300: {"undecided"}, 3000: {"FAIL"}}


def test_a_gaussian_unit_that_is_hardly_ever_positive_is_undecided() -> None:
    net = nn.Sequential(mp.ReLU(), mp.Dropout(0.1), mp.Linear(1, 1))
    x = torch.tensor([[-4.5], [0.0], [2.0]])
    result = verify(net, x, moments=lambda x: FullMoments.of(x, torch.ones_like(x)), draws=500)
    assert [row.verdict for row in result.layers] == ["undecided"] * 3
    assert [row.judged for row in result.layers] == [pytest.approx(2 / 3)] * 3
    assert "33.3% of the units of layer 0, and of 2 other layers, are too rarely random for 500 draws" in result.words()


def test_randomness_where_there_is_none_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "linear", lambda out: replace(out, covariance=torch.eye(4).expand(len(out.mean), 4, 4)))
    assert [row.verdict for row in audit(mp.Linear(3, 4)).layers] == ["FAIL"]


def test_dropped_correlations_fail() -> None:
    result = audit(mp.network(3, (8, 8), rate=0.2), moments=DiagonalMoments)
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
    with pytest.raises(InputError, match=r"verify: X must have shape \(rows, features\), got \(3,\)"):
        verify(net, torch.zeros(3))
    with pytest.raises(InputError, match="verify: draws must be at least 100, got 5"):
        verify(net, torch.zeros(2, 3), draws=5)
    with pytest.raises(InputError, match="linear: weight takes 3 features"):
        verify(net, torch.zeros(2, 4))


@pytest.mark.parametrize(("seed", "shift"), [(24, 1.0), (64, 1.0), (374, 1.5)])
def test_units_that_are_rarely_positive_are_no_false_alarm(seed: int, shift: float) -> None:
    """Exact layers that quantiles of the Gaussian called wrong: standard errors come from few deviations here."""
    torch.manual_seed(seed)
    first = mp.GaussianLinear(3, 8, initial_variance=0.05)
    with torch.no_grad():
        first.bias.sub_(shift)
    assert mp.verify(nn.Sequential(first, mp.ReLU()), torch.randn(4, 3), draws=500, seed=1000 + seed).passed


def test_a_plain_torch_module_is_refused_with_the_remedy() -> None:
    with pytest.raises(MissingRuleError, match=r"convert the whole torch module with mpgelu.from_torch"):
        audit(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 1)))
