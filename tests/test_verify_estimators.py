"""The audit of estimators and converted networks, and what it says in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import InputError, verify
from mpgelu.convert import from_torch


@pytest.fixture
def model() -> mp.Ensemble:
    """Two networks with common dropout and two whose dropout no sampling will see."""
    networks = [mp.network(3, (6,), rate=rate) for rate in (1e-6, 0.2, 0.2, 1e-6)]
    scales = torch.full((3,), 50.0), torch.full((3,), 10.0), torch.tensor(0.0), torch.tensor(1.0)
    return mp.Ensemble(mp.Stack(networks), mp.HeteroscedasticGaussian(), torch.tensor([0.4, 0.2, 0.3, 0.1]), *scales)


def test_the_heaviest_networks_that_sampling_can_tell_are_audited(model: mp.Ensemble) -> None:
    X = np.random.default_rng(1).normal(50, 10, (4, 3))
    audit = verify(model, X, draws=3000, networks=1)
    assert audit.passed
    assert audit.rows == 4
    assert [layer.layer for layer in audit.layers] == [f"2:{name}" for name in range(5)]
    assert audit.left_out == pytest.approx(0.5)
    assert "Networks with 50% of the weight were left out: they drop units too rarely for 3000 draws" in audit.words()
    everything = verify(model, X, draws=500, networks=1000)
    assert [layer.layer[0] for layer in everything.layers] == ["1"] * 5 + ["2"] * 5


def test_rare_masks_are_said_not_to_be_judged() -> None:
    rare, common = (verify(mp.network(3, (6,), rate=rate), torch.randn(4, 3), draws=2000) for rate in (1e-5, 0.3))
    assert rare.layers[0].judged < 0.5
    assert "too rare for 2000 draws" in rare.words()
    assert common.layers[0].judged == 1


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
    with pytest.raises(InputError, match="every network drops units too rarely for 200 draws to tell; use draws=500"):
        verify(model, np.ones((2, 3)), draws=200)
