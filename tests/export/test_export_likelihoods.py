"""Graphs of all kinds of likelihoods, correlated outputs and rows far from the data, give the library's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import mpgelu as mp
from mpgelu.inspect.attribution import attribute
from mpgelu.likelihoods import HeavyTailedGaussian, HeteroscedasticGaussian
from mpgelu.networks import FeatureScale

LEVELS = (0.05, 0.5, 0.95)


class Shifted(HeteroscedasticGaussian):
    """A subclass with a predictive distribution of its own, which no form for its parent may replace."""

    def predictive(self, moments: Any, nodes: int = 32) -> mp.Predictive:
        return super().predictive(moments, nodes).affine(1.0, 2.0)


HEAVY, WITH_BACKGROUND = HeavyTailedGaussian(0.2, 3.0), HeavyTailedGaussian(0.2, 3.0, 0.1, 2.0)
SKEWED = HeavyTailedGaussian(0.4, 3.0, 0.1, 2.0, tail_offset=1.5)
MODELS = [
    (mp.HeteroscedasticGaussian(), mp.FactoredMoments, 1.0, 0.3),  # correlated outputs
    (mp.Gaussian(0.2), mp.FactoredMoments, 1.0, 0.3),
    (HEAVY, mp.DiagonalMoments, 0.5, 0.3),
    (WITH_BACKGROUND, mp.FactoredMoments, 0.5, 0.3),
    (SKEWED, mp.FactoredMoments, 0.5, 0.0),  # known outputs, whose Gaussians have offsets
]


def network(likelihood: mp.Likelihood, rate: float = 0.3) -> torch.nn.Module:
    """Random layers, and outputs that are strongly correlated."""
    made = mp.network(3, (12,), likelihood.outputs, rate=rate)
    with torch.no_grad():
        list(made.modules())[-1].weight.mul_(2.0)  # type: ignore[operator]
    return made


def assert_same(model: Any, x: torch.Tensor, wanted: mp.Predictive, path: Path, **settings: Any) -> None:
    mp.export_onnx(model, path / "model.onnx", LEVELS, **settings)
    session = onnxruntime.InferenceSession(path / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"features": x.float().numpy()}), strict=True))
    np.testing.assert_allclose(found["mean"], wanted.mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["stddev"], wanted.stddev, rtol=1e-4)
    np.testing.assert_allclose(found["aleatoric_std"], wanted.aleatoric_variance.sqrt(), rtol=1e-4)
    quantiles = wanted.quantile(torch.tensor(LEVELS).double())
    np.testing.assert_allclose(found["quantiles"], quantiles, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("likelihood", [WITH_BACKGROUND, Shifted()], ids=lambda each: type(each).__name__)
def test_a_network(likelihood: mp.Likelihood, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, x = network(likelihood), torch.randn(20, 3)
    with torch.no_grad():
        wanted = likelihood.predictive(made(mp.FactoredMoments.certain(x))).to(torch.float64)
    assert_same(made, x, wanted, tmp_path, likelihood=likelihood)


@pytest.mark.parametrize(("likelihood", "moments", "spread", "rate"), MODELS)
def test_an_ensemble_that_knows_its_data(
    likelihood: mp.Likelihood, moments: Any, spread: float, rate: float, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    stack = mp.Stack([network(likelihood, rate) for _ in range(2)])
    edges = torch.ones(3).double()
    scaling = FeatureScale(torch.zeros(3).double(), 0.5 * edges, 4.0, -edges, edges, reach=0.5)
    shares, target = torch.tensor([0.3, 0.7]).double(), (torch.tensor(7.0).double(), torch.tensor(2.0).double())
    ensemble = mp.Ensemble([stack], shares, likelihood, scaling, *target, moments, spread=spread)
    x = torch.cat([torch.randn(10, 3), 20 * torch.randn(10, 3)]).float().double()
    with torch.no_grad():
        assert_same(ensemble, x, ensemble(x), tmp_path)
        if likelihood is SKEWED:
            noise = attribute(ensemble, x).query("kind == 'noise'").variance
            np.testing.assert_allclose(noise, ensemble(x).aleatoric_variance, rtol=1e-5)
