"""Whole optimiser steps by the kernel: those of torch in float64, of each network alone, resumed at any step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import Stack, native
from mpgelu.estimators.recipe.folds import Rows
from mpgelu.estimators.recipe.head import StudentLoss
from mpgelu.estimators.recipe.steps import ExpectedLoss, Objective, Steps
from mpgelu.layers import Scale, SiLU
from mpgelu.likelihoods import HeteroscedasticGaussian

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")

NETWORKS: list[Any] = [
    lambda outputs: mp.network(3, (20, 9), outputs, nonlinearity=SiLU, rate=0, sigma=0.4),
    lambda outputs: mp.network(3, (24, 24), outputs, nonlinearity=SiLU, rate=0),
    lambda outputs: mp.network(3, (7,), outputs, nonlinearity="relu", rate=0),
    lambda outputs: nn.Sequential(Scale(3), mp.Linear(3, 16), SiLU(), mp.Linear(16, outputs)),
    lambda outputs: mp.network(3, (), outputs, rate=0, sigma=1.0),
]
BETAS: list[Any] = [lambda s, beta=beta: ExpectedLoss(s, HeteroscedasticGaussian(), beta, 10) for beta in (0.0, 0.5)]
RATES = [0.004, 0.003, 0.002, 0.001, 0.003, 0.002, 0.001]


def student(stack: Stack) -> Objective:
    return StudentLoss(stack)


def stacked(make: Any, outputs: int = 2, count: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack([make(outputs) for _ in range(count)])


def data(scale: float = 1.0) -> Rows:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(90, 3, generator=generator)
    y = scale * (torch.sin(2 * X[:, 0]) + 0.3 * torch.randn(90, generator=generator))
    return Rows(X, y, torch.rand(90, generator=generator) + 0.5)


def batches(steps: int = len(RATES), size: int = 21, networks: int = 3) -> Tensor:
    return torch.randint(90, (networks, steps, size), generator=torch.Generator().manual_seed(2))


def trained(stack: Stack, objective: Any, rows: Rows, at: Tensor, rates: list[float], decay: float = 0.0) -> Steps:
    steps = Steps(stack, objective(stack), decay)
    steps.losses = steps.take(rows, at, rates)  # type: ignore[attr-defined]
    return steps


def agree(ours: Steps, wanted: Steps) -> None:
    """Parameters within a hundredth of a step: Adam divides by the size of gradients, however small these are."""
    torch.testing.assert_close(ours.losses.double(), wanted.losses, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
    for mine, theirs in zip(ours.parameters, wanted.parameters, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=4e-5)
    for name, tensor in wanted.state().items():
        if name.startswith("exp_avg"):
            torch.testing.assert_close(
                ours.state()[name].double(), tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max())
            )


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("objective", [*BETAS, student])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_steps_are_those_of_torch_in_float64(make: Any, objective: Any, scale: float) -> None:
    """The larger targets have gradients beyond the limit of their norm."""
    stack, rows, at = stacked(make, 1 if objective is student else 2), data(scale), batches()
    double = copy.deepcopy(stack).double()
    doubled = Rows(*(tensor.double() for tensor in (rows.X, rows.y, rows.weights)))
    decay = 0.02 if objective is student else 0.0
    ours, wanted = (
        trained(stack, objective, rows, at, RATES, decay),
        trained(double, objective, doubled, at, RATES, decay),
    )
    assert ours._whole is not None
    assert ours.taken == wanted.taken == len(RATES)
    agree(ours, wanted)


def test_the_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "step", lambda *_: pytest.fail("a step of torch"))
    trained(stacked(NETWORKS[0]), BETAS[1], data(), batches(), RATES)
    with native.disabled(), pytest.raises(pytest.fail.Exception, match="a step of torch"):
        trained(stacked(NETWORKS[0]), BETAS[1], data(), batches(), RATES)


def test_steps_do_not_depend_on_where_they_are_interrupted_or_on_other_networks() -> None:
    rows, at = data(), batches()
    whole = trained(stacked(NETWORKS[0]), BETAS[1], rows, at, RATES)
    parts, alone = stacked(NETWORKS[0]), Stack(stacked(NETWORKS[0]).unstack()[1:2])
    steps = Steps(parts, BETAS[1](parts))
    steps.take(rows, at[:, :3], RATES[:3])
    resumed = Steps(parts, BETAS[1](parts))
    resumed.load({name: tensor.clone() for name, tensor in steps.state().items()}, steps.taken)
    resumed.take(rows, at[:, 3:], RATES[3:])
    single = trained(alone, BETAS[1], rows, at[1:2], RATES)
    for name, tensor in whole.state().items():
        torch.testing.assert_close(resumed.state()[name], tensor, rtol=0, atol=0)
        if tensor.dim():
            torch.testing.assert_close(single.state()[name], tensor[1:2], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [float("nan"), 1e30])
def test_a_network_leaves_a_step_out_that_is_not_finite(wrong: float) -> None:
    rows, at = data(), batches(2)
    at[:, 1] %= 80  # without the wrong row
    at[1, 0, 4] = 85
    at[[0, 2], 0] %= 80
    spoilt = Rows(rows.X, rows.y.clone(), rows.weights)
    spoilt.y[85] = wrong
    ours = trained(stacked(NETWORKS[0]), BETAS[1], spoilt, at, RATES[:2])
    with native.disabled():
        wanted = trained(stacked(NETWORKS[0]), BETAS[1], spoilt, at, RATES[:2])
    clean = trained(stacked(NETWORKS[0]), BETAS[1], rows, at, RATES[:2])
    assert ours.left_out.tolist() == wanted.left_out.tolist() == [0, 1, 0]
    for name, tensor in wanted.state().items():
        torch.testing.assert_close(ours.state()[name], tensor, rtol=1e-3, atol=1e-4)
        if tensor.dim():
            torch.testing.assert_close(ours.state()[name][[0, 2]], clean.state()[name][[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "likelihood"),
    [
        (lambda _: mp.network(3, (8,), rate=0.1), HeteroscedasticGaussian()),
        (lambda _: nn.Sequential(mp.Linear(3, 8), mp.layers.Tanh(), mp.Linear(8, 2)), HeteroscedasticGaussian()),
        (lambda _: nn.Sequential(mp.Linear(3, 8), SiLU(), mp.Linear(8, 2, bias=False)), HeteroscedasticGaussian()),
        (lambda _: mp.network(3, (8,), 1, rate=0), mp.likelihoods.Gaussian(1.0)),
    ],
)
def test_other_networks_and_likelihoods_are_left_to_torch(make: Any, likelihood: Any) -> None:
    stack = stacked(make)
    steps = Steps(stack, ExpectedLoss(stack, likelihood, 0.5, 10))
    assert steps._whole is None
    losses = steps.take(data(), batches(), RATES)
    assert bool(losses.isfinite().all())
