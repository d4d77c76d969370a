"""Converted networks against Monte-Carlo dropout of the torch module: real data, and what branches change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments
from mpgelu.convert import from_torch
from mpgelu.layers import Operation
from mpgelu.research.bench.conversion import monte_carlo, trained
from mpgelu.rules import add, fork

DRAWS = 20_000


def diabetes() -> tuple[Tensor, Tensor]:
    X, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    return (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()


def perceptron(width: int, rate: float) -> nn.Module:
    hidden = [nn.Linear(width, width), nn.ReLU(), nn.Dropout(rate)]
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Dropout(rate), *hidden, nn.Linear(width, 1))


def test_a_trained_dropout_network_matches_monte_carlo_dropout() -> None:
    """Mean within 1 % of the predictive spread and standard deviation within 5 %, row by row, beyond sampling error."""
    network = trained(perceptron(64, 0.2), *diabetes(), epochs=40)
    x = diabetes()[0][:60]
    mean, stddev = monte_carlo(network, x, DRAWS)
    out = mp.propagate(from_torch(network, example=x)[0], x)
    mean_error = (out.mean[:, 0] - mean) / stddev
    stddev_error = out.variance[:, 0].sqrt() / stddev - 1
    sampling = 1 / DRAWS**0.5  # of a mean, in standard deviations; of a standard deviation it is about 0.7 of that
    assert (mean_error.square().mean() - sampling**2).clamp_min(0).sqrt() < 0.01
    assert (mean_error.abs() < 0.01 + 4 * sampling).all()
    assert (stddev_error.abs() < 0.05 + 3 * sampling).all()
    assert stddev_error.square().mean().sqrt() < 0.03

    diagonal = mp.propagate(from_torch(network)[0], x, moments=DiagonalMoments.certain)
    assert (diagonal.variance[:, 0].sqrt() / stddev - 1).square().mean().sqrt() > 0.1  # dropped correlations matter


class Residual(nn.Module):
    """Two residual blocks between linear layers, with dropout in the blocks."""

    def __init__(self, width: int, activation: nn.Module, rate: float) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(10, width), nn.Dropout(rate)), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), activation, nn.Dropout(rate), nn.Linear(width, width))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)  # type: ignore[no-any-return]


def add_as_if_independent(value: FactoredMoments, other: FactoredMoments, alpha: float = 1.0) -> Any:
    """What other tools do: the covariances of the branches are added, because their sources have other names."""
    renamed = other.map_blocks(lambda block: replace(block, variance=block.variance.clone(), merged=()))
    return add(value, replace(other, blocks=renamed), alpha)


@pytest.mark.parametrize(
    ("activation", "allowed"), [(nn.Identity(), 0.0), (nn.ReLU(), 0.05), (nn.Tanh(), 0.05), (nn.GELU(), 0.05)]
)
def test_residual_branches_add_exactly(activation: nn.Module, allowed: float) -> None:
    """Without a nonlinearity to sampling error; with one, within the 5 % of its approximation."""
    network = trained(Residual(32, activation, 0.2), *diabetes(), epochs=10)
    x = diabetes()[0][:20]
    mean, stddev = monte_carlo(network, x, DRAWS)
    converted, report = from_torch(network, example=x)
    assert report.branches
    sampling = 1 / DRAWS**0.5
    out = converted(FactoredMoments.certain(x))
    error = out.variance[:, 0].sqrt() / stddev - 1
    assert ((out.mean[:, 0] - mean).abs() < (allowed + 4.5 * sampling) * stddev).all()
    assert (error.abs() < allowed + 4.5 * sampling).all()

    for layer in converted.modules():
        if isinstance(layer, Operation) and layer.rule is add:
            layer.rule = add_as_if_independent
    wrong = converted(FactoredMoments.certain(x)).variance[:, 0].sqrt() / stddev - 1
    assert wrong.abs().mean() > 10 * sampling + 3 * error.abs().mean()


def test_the_names_of_sources_are_what_makes_it_exact() -> None:
    value = fork(FactoredMoments.of(torch.zeros(1, 4), torch.ones(1, 4)))
    assert torch.equal(add(value, value, -1.0).variance, torch.zeros(1, 4))
