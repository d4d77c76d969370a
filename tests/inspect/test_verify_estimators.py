"""The audit of estimators and converted networks, and what it says in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import InputError, verify
from mpgelu.convert import from_torch
from mpgelu.networks import FeatureScale


@pytest.fixture
def model() -> mp.Ensemble:
    """Four networks, two of which hardly ever drop a unit."""
    networks = [mp.network(3, (6,), rate=rate) for rate in (1e-6, 0.2, 0.2, 1e-6)]
    scaling = FeatureScale.standard(torch.full((3,), 50.0), torch.full((3,), 10.0))
    weights, target = torch.tensor([0.4, 0.2, 0.3, 0.1]), (torch.tensor(0.0), torch.tensor(1.0))
    return mp.Ensemble([mp.Stack(networks)], weights, mp.HeteroscedasticGaussian(), scaling, *target)


def test_the_heaviest_networks_are_audited_however_rare_their_dropout(model: mp.Ensemble) -> None:
    X = np.random.default_rng(1).normal(50, 10, (4, 3))
    audit = verify(model, X, draws=3000, networks=2)
    assert audit.passed
    assert audit.decided
    assert audit.rows == 4
    assert [layer.layer for layer in audit.layers] == [f"{place}:{name}" for place in (0, 2) for name in range(5)]
    everything = verify(model, X, draws=500, networks=1000)
    assert [layer.layer[0] for layer in everything.layers] == [str(place) for place in range(4) for _ in range(5)]


def test_an_estimator_is_not_called_wrong_on_any_seed() -> None:
    """Networks of many dropout rates."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 3))
    y = X[:, 0] + generator.normal(size=60)
    model = mp.MPGELURegressor(
        (8, 8), rate=(1e-7, 1e-3, 0.1), sigma=None, steps=50, folds=2, random_state=0, moments=mp.FactoredMoments
    ).fit(X, y)
    for seed in range(5):
        audit = verify(model, X[:3], draws=1000, networks=1000, seed=100 * seed)
        assert audit.passed


def test_skewness_in_words() -> None:
    lopsided = nn.Sequential(mp.Dropout(0.05), mp.Linear(1, 1), mp.MPGELU(), mp.Linear(1, 1))
    words = verify(lopsided, torch.ones(1, 1), draws=5000).words()
    assert "The Gaussian assumption is weak at layer" in words
    assert "(Linear) with 4." in words  # (1 - 2 k) / sqrt(k (1 - k)) at k = 0.95 is 4.1
    many = nn.Sequential(mp.Linear(1, 200), mp.Dropout(0.5), mp.Linear(200, 1))
    assert "No unit that is taken for Gaussian has a skewness above 0.5." in verify(many, torch.ones(1, 1)).words()


def test_a_converted_network_that_is_not_gaussian() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    network, _ = from_torch(module)
    audit = verify(network, torch.ones(2, 2), draws=5000)
    assert not audit.passed
    assert "Means or covariances disagree with sampling at layer" in audit.words()
    assert "The Gaussian assumption is wrong for some inputs of the nonlinearity at layer 3." in audit.words()


def test_bad_input(model: mp.Ensemble) -> None:
    with pytest.raises(InputError, match=r"verify: X must have shape \(rows, 3\), got \(2, 2\)"):
        verify(model, np.ones((2, 2)))
    with pytest.raises(InputError, match="verify: networks must be at least 1, got 0"):
        verify(model, np.ones((2, 3)), networks=0)
