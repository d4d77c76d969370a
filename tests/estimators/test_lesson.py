"""What a compact network is taught is what the ensemble predicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mpgelu as mp
from mpgelu.estimators.lesson import Lesson

SETTINGS: dict[str, Any] = {"hidden": (8,), "diverse": False, "folds": 2, "steps": 20, "random_state": 0}


@pytest.mark.parametrize("members", [4, 1])
def test_moments_are_those_of_the_teacher(members: int) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    ensemble = mp.MPGELURegressor(**SETTINGS).fit(X, X[:, 0] + 0.3 * rng.normal(size=60)).ensemble_
    scaling = ensemble.scaling
    scaling.reach.zero_()
    if members == 1:  # a deterministic network has no epistemic variance, whose logarithm must be finite
        parts = (torch.ones(1).double(), mp.HeteroscedasticGaussian(), scaling, torch.zeros(()), torch.ones(()))
        ensemble = mp.Ensemble([mp.Stack([mp.network(2, (4,), rate=0)])], *parts)
    rows = torch.as_tensor(X)
    with torch.no_grad():
        lesson, p = Lesson.of(ensemble, rows, 50, seed=0), ensemble(rows, None, 4)
    assert lesson.given == 50
    torch.testing.assert_close(lesson.z, scaling(rows).float())
    torch.testing.assert_close(lesson.mean, p.mean.float())
    torch.testing.assert_close(lesson.variance, p.variance.float())
    wanted = p.epistemic_variance if members > 1 else 1e-6 * p.variance
    torch.testing.assert_close(lesson.log_epistemic.exp(), wanted.float(), rtol=1e-4, atol=0)
