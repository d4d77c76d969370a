"""Inside ``torch.autocast``: products may be rounded to bfloat16, moments stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu as mp
from mpgelu import DiagonalMoments, FactoredMoments, FullMoments, layers, native

KINDS: list[Any] = [DiagonalMoments, FactoredMoments, FullMoments]
ROUNDING = 2.0**-8  # of bfloat16, relative


def half() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def trained() -> tuple[nn.Sequential, Tensor, Tensor]:
    x = torch.rand(200, 3) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(200)
    network = mp.network(3, (32, 32), rate=0.1)
    mp.fit(network, mp.HeteroscedasticGaussian(), (x, y), epochs=30, clip=10, progress=False)
    return network, x, y


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_network_in_half_precision(kind: Any) -> None:
    network, x, _ = trained()
    with torch.no_grad():
        wanted = network(kind.certain(x))
        with half():
            found = network(kind.certain(x))
    assert found.mean.dtype == found.variance.dtype == torch.float32
    assert not torch.equal(found.mean, wanted.mean)
    scale = wanted.mean.abs().amax(0)
    assert ((found.mean - wanted.mean).abs().mean(0) / scale < 4 * ROUNDING).all()
    assert ((found.stddev / wanted.stddev - 1).abs().mean(0) < 4 * ROUNDING).all()
    assert (found.variance > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layer",
    [
        layers.Linear(4, 3),
        layers.GaussianLinear(4, 3),
        layers.Dropout(0.2),
        layers.MPGELU(),
        layers.ReLU(),
        layers.Tanh(),
        layers.BatchNorm1d(4),
        layers.LayerNorm(4),
        layers.Periodic(4, frequencies=3, outputs=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_keep_the_precision_of_moments(layer: nn.Module, kind: Any) -> None:
    x = torch.randn(6, 4)
    for value in (kind.of(x, torch.rand(6, 4)), kind.of(x, torch.full_like(x, 1e-4))):
        wanted = layer(value)
        with half():
            found = layer(value)
            covariance = found.covariance
        assert found.mean.dtype == covariance.dtype == torch.float32
        scale = wanted.variance.sqrt()
        limit = 4 * ROUNDING if isinstance(layer, (layers.Linear, layers.GaussianLinear)) else 1e-6
        assert ((found.mean - wanted.mean).abs() <= limit * wanted.mean.abs().amax()).all()
        shape = scale.unsqueeze(-1) * scale.unsqueeze(-2)
        assert ((covariance - wanted.covariance).abs() <= limit * shape + 1e-12).all()


def test_full_covariances_of_nearly_equal_units_stay_positive() -> None:
    covariance = torch.ones(1, 4, 4) + 1e-3 * torch.eye(4)
    layer = layers.Linear(4, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))  # cancels what the units have in common
        with half():
            found = layer(FullMoments(torch.zeros(1, 4), covariance))
    torch.testing.assert_close(found.variance, torch.full((1, 1), 4e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("start", [FactoredMoments.certain, DiagonalMoments.certain, lambda x: x])
def test_training_in_half_precision(start: Any, stacked: bool) -> None:
    x = torch.rand(128, 2) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1]
    losses = []
    for precise in (True, False):
        torch.manual_seed(0)
        network: nn.Module = mp.network(2, (16,))
        given = x, y
        if stacked:
            network, given = mp.Stack([network]), (x[None], y[None])
        with native.disabled(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not precise):
            history = mp.fit(
                network, mp.HeteroscedasticGaussian(), given, epochs=20, batch_size=32, moments=start, progress=False
            )
        assert all(p.dtype == torch.float32 for p in network.parameters())
        losses.append(history.loss.flatten())
    assert losses[1].dtype == torch.float32
    assert losses[1][-1] < losses[1][0] - 0.3
    assert abs(losses[1][-1] - losses[0][-1]) < 0.1


def test_distributions_do_not_change() -> None:
    _, x, y = trained()
    for likelihood in (mp.HeteroscedasticGaussian(), mp.GaussianMixture(3)):
        moments = mp.network(3, (8,), likelihood.outputs)(FactoredMoments.certain(x))

        def run(likelihood: Any = likelihood, moments: Any = moments) -> list[Tensor]:
            with torch.no_grad():
                predictive = likelihood.predictive(moments)
                return [
                    likelihood.expected_log_prob(moments, y),
                    predictive.log_prob(y),
                    predictive.quantile([0.1, 0.9]),
                    predictive.crps(y),
                ]

        wanted = run()
        with half():
            found = run()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
