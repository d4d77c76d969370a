"""The ensemble prepared for prediction gives the distribution that its definition gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpgelu as mp
from mpgelu.likelihoods import HeavyTailedGaussian


@pytest.mark.parametrize("offset", [0.0, -1.7])
def test_the_prepared_ensemble_is_the_ensemble(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    model = mp.MPGELURegressor((6,), steps=20, folds=2, random_state=0).fit(X, X[:, 0] + 0.1 * rng.normal(size=60))
    model.ensemble_.likelihood = HeavyTailedGaussian(0.3, 2.5, 0.02, 0.1, offset)
    x, y = torch.tensor(2 * X), torch.zeros(60).double()
    prepared = model.ensemble_._prepared(x)
    assert prepared is not None
    monkeypatch.setattr(mp.Ensemble, "_prepared", lambda *_: None)
    wanted = model.ensemble_(x)
    for name in ("mean", "epistemic_variance", "aleatoric_variance"):
        torch.testing.assert_close(getattr(prepared, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared.log_prob(y), wanted.log_prob(y), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(prepared.quantile([0.05, 0.5]), wanted.quantile([0.05, 0.5]), rtol=1e-3, atol=1e-3)
