"""Stacks of perceptrons run all their layers in one native call: the same numbers as the rules, one by one."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, Stack, native
from mpgelu.native.perceptron import Perceptrons, bound_propagation
from mpgelu.networks.perceptron import as_function

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels, that is a C compiler")

RATES = (0.0, 0.01, 0.3)
MIXED = torch.nn.Sequential(mp.Linear(3, 4), mp.ReLU(), mp.Linear(4, 4), mp.MPGELU(), mp.Linear(4, 1))


def outputs_and_gradients(stack: Stack, moments: DiagonalMoments) -> list[Tensor]:
    stack.zero_grad()
    after = stack(moments)
    (after.mean.sin() * after.variance.exp()).sum().backward()
    return [after.mean, after.variance, *(p.grad for p in stack.parameters() if p.grad is not None)]


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
@pytest.mark.parametrize("hidden", [(), (5,), (20, 20), (7, 9, 16)])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_fused_stacks_agree_with_float64_rules(nonlinearity: Any, hidden: tuple[int, ...], rows: int) -> None:
    torch.manual_seed(0)
    members = [mp.network(3, hidden, rate=0.5, nonlinearity=nonlinearity) for _ in RATES]
    for member, rate in zip(members, RATES, strict=True):
        for layer in member:
            if isinstance(layer, mp.Dropout):
                layer.rate.fill_(rate)
    moments = DiagonalMoments(torch.randn(3, rows, 3), torch.rand(3, rows, 3))
    stack = Stack(members)
    fused = outputs_and_gradients(stack, moments)
    exact = outputs_and_gradients(stack.double(), DiagonalMoments(moments.mean.double(), moments.variance.double()))
    assert len(fused) == len(exact) == 4 + 2 * len(hidden)
    for ours, reference in zip(fused, exact, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=2e-6 * reference.abs().max().item())


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu_exact"])
@pytest.mark.parametrize("widths", [(3, 7, 2), (9, 21, 33, 1), (1, 1, 1), (13, 130, 128, 2)])
def test_a_row_alone_has_the_same_bits(nonlinearity: Any, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(2, after, before) / before**0.5 for before, after in itertools.pairwise(widths)]
    biases = [torch.randn(2, after) for after in widths[1:]]
    gains, noises = torch.rand(2, 2, len(weights)).unbind()
    networks = Perceptrons(weights, biases, gains, noises, nonlinearity)
    mean, variance = torch.randn(2, 70, widths[0]), torch.rand(2, 70, widths[0])
    call, *together = bound_propagation(networks, False, mean, variance)
    call()
    for row in (0, 63, 64, 69):
        chosen = (x[:, row : row + 1].contiguous() for x in (mean, variance))
        call, *alone = bound_propagation(networks, False, *chosen)
        call()
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(one[:, 0], all_of_them[:, row], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_without_gradients_the_numbers_are_the_same(rows: int) -> None:
    stack = Stack([mp.network(3, (20, 9), rate=0.1) for _ in RATES])
    moments = DiagonalMoments.certain(torch.randn(3, rows, 3))
    with torch.no_grad():
        quick = stack(moments)
    slow = stack(moments)
    torch.testing.assert_close(quick.mean, slow.mean, rtol=0, atol=0)
    torch.testing.assert_close(quick.variance, slow.variance, rtol=0, atol=0)


@pytest.mark.parametrize("hidden", [(), (5,), (20, 20), (7, 9, 16), (12, 8, 8, 8)])
@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_fused_exact_covariance_agrees_with_float64_rules(hidden: tuple[int, ...], rows: int, outputs: int) -> None:
    torch.manual_seed(0)
    stack = Stack([mp.network(3, hidden, outputs, rate=rate) for rate in (0.01, 0.2)]).requires_grad_(False)
    mean, variance = torch.randn(2, rows, 3), torch.rand(2, rows, 3)
    for moments in (FactoredMoments.certain(mean), FactoredMoments.of(mean, variance)):
        assert stack._whole(moments) is not None
        fused = stack(moments)
        residual = None if moments.residual is None else moments.residual.double()
        exact = copy.deepcopy(stack).double()(FactoredMoments(mean.double(), residual=residual))
        torch.testing.assert_close(fused.mean.double(), exact.mean, rtol=1e-4, atol=1e-5)
        scale = exact.covariance.abs().max().item()
        torch.testing.assert_close(fused.covariance.double(), exact.covariance, rtol=1e-4, atol=3e-6 * scale)
        assert (fused.covariance == fused.covariance.mT).all()


def covariance_and_gradients(stack: Stack, moments: FactoredMoments) -> list[Tensor]:
    """Mean, covariance and gradients of a function that treats every entry of the covariance differently."""
    stack.zero_grad()
    after = stack(moments)
    entries = after.covariance.flatten(-2)
    weights = torch.arange(1.0, 1 + entries.shape[-1], dtype=entries.dtype)
    (after.mean.sin().sum() + (entries * weights).sin().sum()).backward()
    return [after.mean, after.covariance, *(p.grad for p in stack.parameters() if p.grad is not None)]


def full_network(nonlinearity: str, hidden: tuple[int, ...], outputs: int, rate: float) -> torch.nn.Sequential:
    rules: dict[str, Callable[[], torch.nn.Module]] = {
        "mpgelu": mp.MPGELU,
        "dvi": lambda: mp.ReLU("dvi"),
        "exact": lambda: mp.ReLU("exact"),
    }
    widths = [3, *hidden, outputs]
    layers = [[mp.Dropout(rate), mp.Linear(*pair), rules[nonlinearity]()] for pair in itertools.pairwise(widths)]
    *modules, _ = itertools.chain(*layers)
    return torch.nn.Sequential(*modules)


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "dvi", "exact"])
@pytest.mark.parametrize("hidden", [(), (5,), (20, 20), (7, 9, 16)])
@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_full_covariance_and_its_gradients_agree_with_float64_rules(
    nonlinearity: str, hidden: tuple[int, ...], rows: int, outputs: int
) -> None:
    torch.manual_seed(0)
    stack = Stack([full_network(nonlinearity, hidden, outputs, rate) for rate in (0.0, 0.01, 0.2)])
    mean, variance = torch.randn(3, rows, 3), torch.rand(3, rows, 3)
    moments = FactoredMoments.of(mean, variance)
    assert stack._whole(moments) is not None
    fused = covariance_and_gradients(stack, moments)
    exact = covariance_and_gradients(stack.double(), FactoredMoments.of(mean.double(), variance.double()))
    assert len(fused) == len(exact) == 4 + 2 * len(hidden)
    for ours, reference in zip(fused, exact, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=5e-6 * reference.abs().max().item())


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "dvi", "exact"])
def test_full_covariance_stays_finite_at_its_limits(nonlinearity: str) -> None:
    torch.manual_seed(0)
    stack = Stack([full_network(nonlinearity, (8, 8), 2, rate=0.0)] * 2)
    moments = FactoredMoments.certain(torch.tensor([-1e4, 0.0, 1e4]).expand(2, 5, 3).contiguous())
    assert all(part.isfinite().all() for part in covariance_and_gradients(stack, moments))


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "dvi", "exact"])
def test_a_nan_reaches_only_its_own_row_and_its_model(nonlinearity: str) -> None:
    stack = Stack([full_network(nonlinearity, (8,), 2, rate=0.1)] * 2)
    x = torch.randn(2, 5, 3)
    x[1, 2, 0] = torch.nan
    mean, covariance, *gradients = covariance_and_gradients(stack, FactoredMoments(x, residual=torch.zeros_like(x)))
    assert mean[1, 2].isnan().all()
    assert covariance[1, 2].isnan().all()
    assert not mean[0].isnan().any()
    assert not mean[1, 3].isnan().any()
    assert gradients[0][1].isnan().any()
    assert not gradients[0][0].isnan().any()


def test_paper_networks_with_dropout_that_is_not_rescaled() -> None:
    torch.manual_seed(0)
    stack = Stack([mp.paper_network(4, rate=rate) for rate in (0.1, 0.4)])
    moments = DiagonalMoments.certain(torch.randn(2, 10, 4))
    fused = outputs_and_gradients(stack, moments)
    with native.disabled():
        plain = outputs_and_gradients(stack, moments)
    for ours, reference in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_zero_variance_and_large_means_stay_finite() -> None:
    torch.manual_seed(0)
    stack = Stack([mp.network(3, (8, 8), rate=0)] * 2)
    moments = DiagonalMoments.certain(torch.tensor([-1e4, 0.0, 1e4]).expand(2, 5, 3).contiguous())
    assert all(torch.isfinite(part).all() for part in outputs_and_gradients(stack, moments))


def test_a_nan_reaches_the_output_and_the_gradients() -> None:
    stack = Stack([mp.network(3, (8,), rate=0.1)] * 2)
    x = torch.randn(2, 5, 3)
    x[1, 2, 0] = torch.nan
    mean, _, *gradients = outputs_and_gradients(stack, DiagonalMoments(x, torch.zeros_like(x)))
    assert mean[1, 2].isnan().all()
    assert not mean[0].isnan().any()
    assert gradients[0][1].isnan().any()


def sees_the_kernel(monkeypatch: pytest.MonkeyPatch, stack: Stack, value: Any) -> bool:
    calls = []
    run = native.run

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        run(*arguments)

    monkeypatch.setattr("mpgelu.native.perceptron.run", counted)
    stack(value)
    return bool(calls)


@pytest.mark.parametrize(
    ("fused", "value"),
    [
        (True, FactoredMoments.certain(torch.randn(2, 5, 3))),
        (True, FactoredMoments.certain(torch.randn(2, 5, 3), max_rank=math.inf)),
        (False, FactoredMoments.certain(torch.randn(2, 5, 3), max_rank=2)),
        (False, FactoredMoments.of(torch.randn(2, 5, 3), torch.eye(3).expand(2, 5, 3, 3))),
        (False, mp.FullMoments.certain(torch.randn(2, 5, 3))),
    ],
)
def test_which_exact_moments_are_fused(monkeypatch: pytest.MonkeyPatch, fused: bool, value: Any) -> None:
    stack = Stack([mp.network(3, (4,))] * 2)
    with torch.no_grad():
        assert sees_the_kernel(monkeypatch, stack, value) is fused
    assert sees_the_kernel(monkeypatch, stack, value) is fused


@pytest.mark.parametrize(
    ("fused", "member", "value"),
    [
        (True, mp.network(3, (4,)), DiagonalMoments.certain(torch.randn(2, 5, 3))),
        (True, mp.network(3, (), rate=0), DiagonalMoments.certain(torch.randn(2, 5, 3))),
        (False, mp.network(3, (4,)), torch.randn(2, 5, 3)),
        (False, mp.network(3, (4,)), DiagonalMoments.certain(torch.randn(2, 5, 3).requires_grad_())),
        (False, mp.network(3, (4,)), DiagonalMoments.certain(torch.randn(2, 3))),
        (True, mp.network(3, (4,), nonlinearity="relu"), DiagonalMoments.certain(torch.randn(2, 5, 3))),
        (True, mp.network(3, (4,), nonlinearity="relu"), FactoredMoments.certain(torch.randn(2, 5, 3))),
        (False, MIXED, DiagonalMoments.certain(torch.randn(2, 5, 3))),
        (False, mp.network(3, (4,), gaussian_weights=True), DiagonalMoments.certain(torch.randn(2, 5, 3))),
        (False, mp.network(3, (4,)).double(), DiagonalMoments.certain(torch.randn(2, 5, 3).double())),
    ],
)
def test_only_what_the_kernel_can_do_is_fused(
    monkeypatch: pytest.MonkeyPatch, fused: bool, member: Any, value: Any
) -> None:
    assert sees_the_kernel(monkeypatch, Stack([member, member]), value) is fused


@pytest.mark.parametrize("kind", [DiagonalMoments, FactoredMoments])
@pytest.mark.parametrize("models", [1, 5])
def test_wrong_number_of_models_is_still_refused(kind: Any, models: int) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="vmap"):
        Stack([mp.network(3, (4,))] * 2)(kind.certain(torch.randn(models, 5, 3)))


def test_wide_inputs_need_no_square_of_their_number() -> None:
    stack = Stack([mp.network(5000, (4,), rate=0.1)])
    for moments in (FactoredMoments.certain(torch.randn(1, 3, 5000)), DiagonalMoments.certain(torch.randn(1, 3, 5000))):
        for needs_gradients in (True, False):
            assert stack.requires_grad_(needs_gradients)(moments).variance.isfinite().all()


def test_wrong_number_of_features_is_still_refused() -> None:
    with pytest.raises(mp.InputError, match="takes 3 features"):
        Stack([mp.network(3, (4,))] * 2)(DiagonalMoments.certain(torch.randn(2, 5, 4)))


@pytest.mark.parametrize("nonlinearity", ["mpgelu", "relu"])
@pytest.mark.parametrize("kind", [DiagonalMoments, FactoredMoments])
def test_one_network_runs_as_a_whole_and_agrees_with_its_layers(nonlinearity: Any, kind: Any) -> None:
    network, x = mp.network(3, (8, 5), rate=0.1, nonlinearity=nonlinearity), torch.randn(9, 3)
    whole, layers = as_function(network)(kind.certain(x)), copy.deepcopy(network).double()(kind.certain(x.double()))
    assert not isinstance(whole, FactoredMoments)  # by the kernel, whose covariance is dense
    torch.testing.assert_close(whole.mean.double(), layers.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.covariance.double(), layers.covariance, rtol=1e-4, atol=1e-5)
    (whole.mean.sum() + whole.variance.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_a_network_with_a_hook_runs_layer_by_layer() -> None:
    network, seen = mp.network(3, (4,)), []
    assert as_function(network) is not network
    network[-1].register_forward_hook(lambda *_: seen.append(1))
    mp.propagate(network, torch.randn(5, 3))
    assert seen


def test_wide_covariances_are_left_to_large_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, whole in ((200, True), (201, False)):
        stack = Stack([mp.network(3, (width,))])
        assert sees_the_kernel(monkeypatch, stack, FactoredMoments.certain(torch.randn(1, 2, 3))) is whole
        assert sees_the_kernel(monkeypatch, stack, DiagonalMoments.certain(torch.randn(1, 2, 3)))


def test_rates_that_change_between_two_calls_are_seen() -> None:
    network = mp.paper_network(4, rate=0.1, nonlinearity="relu")
    run, value = as_function(network), mp.DiagonalMoments.certain(torch.randn(6, 4))
    for rate in (0.1, 0.4):
        for layer in network.modules():
            if isinstance(layer, mp.Dropout):
                layer.rate.fill_(rate)
        torch.testing.assert_close(run(value).variance, network(value).variance, rtol=1e-4, atol=1e-6)
