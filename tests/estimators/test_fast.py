"""The ensemble prepared for prediction gives what the ensemble gives, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpgelu as mp
from mpgelu import MPGELURegressor, native
from mpgelu.estimators.fast import FastEnsemble
from mpgelu.estimators.gaussian_process import GaussianProcess
from mpgelu.likelihoods import HeavyTailedGaussian
from mpgelu.networks import Stack

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=120)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "diagonal": {"moments": mp.DiagonalMoments},
    "exact": {"moments": mp.FactoredMoments},
    "no process": {"diverse": False},
    "constant noise": {"noise": "homoscedastic", "diverse": False},
    "dropout alone": {"rate": 0.1, "sigma": None, "diverse": False},
    "two shapes": {"sigma": (None, 0.5), "diverse": False},
}


def fitted(**settings: Any) -> MPGELURegressor:
    return MPGELURegressor((16, 16), steps=20, random_state=0, **settings).fit(X, Y)


@pytest.fixture(scope="module")
def model() -> MPGELURegressor:
    return fitted()


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_of_rows_near_and_far(name: str) -> None:
    model, rows = fitted(**SETTINGS[name]), np.concatenate([X[:50], 5 * X[:5], 1e9 * X[:1]])
    quick = model.predict_distribution(rows)
    assert model.ensemble_._fast._kept is not None
    assert isinstance(model.ensemble_._fast._kept[2], FastEnsemble)
    with native.disabled():
        plain = model.predict_distribution(rows)
    for field in fields(plain):
        ours, theirs = getattr(quick, field.name), getattr(plain, field.name)
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=field.name)


def test_other_rows_change_a_row_by_rounding_at_most(model: MPGELURegressor) -> None:
    together = np.stack([*model.predict_parts(X), *model.predict_interval(X)])
    alone = np.concatenate(
        [np.stack([*model.predict_parts(row), *model.predict_interval(row)]) for row in X[:, None]], 1
    )
    np.testing.assert_allclose(alone, together, rtol=1e-6, atol=1e-6)


def test_changes_of_the_ensemble_are_seen(model: MPGELURegressor) -> None:
    before = model.predict(X)
    with torch.no_grad():
        model.ensemble_.target_mean.add_(10)
        np.testing.assert_allclose(model.predict(X), before + 10, rtol=1e-6)
        model.ensemble_.target_mean.sub_(10)
    np.testing.assert_allclose(model.predict(X), before, rtol=1e-12)


def test_another_type_of_moments_or_likelihood_is_seen() -> None:
    model = fitted(**SETTINGS["dropout alone"], moments=mp.FactoredMoments)
    exact = model.predict_parts(X)[1]
    model.ensemble_.moment_type = mp.DiagonalMoments
    assert not np.allclose(model.predict_parts(X)[1], exact)
    before = model.predict(X, return_std=True)[1]
    model.ensemble_.likelihood = HeavyTailedGaussian(tail_share=0.4, tail_width=5.0)
    assert (model.predict(X, return_std=True)[1] > 1.1 * before).all()


def test_networks_without_a_kernel_are_left_to_torch() -> None:
    def tanh(features: int, kind: Any, outputs: int) -> nn.Module:
        return nn.Sequential(mp.Linear(features, 5), mp.layers.Tanh(), mp.Linear(5, outputs))

    model = fitted(network=tanh)
    assert FastEnsemble.of(model.ensemble_) is None
    assert np.isfinite(model.predict(X)).all()


def stack_for(features: int, outputs: int) -> Stack:
    return Stack([nn.Sequential(mp.Linear(features, 4), mp.layers.SiLU(), mp.Linear(4, outputs))] * 2)


@pytest.mark.parametrize(
    "part",
    [
        lambda ensemble: ensemble.stacks.__setitem__(0, stack_for(2, 2)),
        lambda ensemble: ensemble.stacks.__setitem__(0, stack_for(3, 1)),
        lambda ensemble: setattr(ensemble.noise, "networks", stack_for(5, 1)),
        lambda ensemble: setattr(ensemble.noise, "center", torch.zeros(5)),
    ],
)
def test_parts_that_do_not_fit_are_never_given_to_kernels(part: Callable[[Any], None]) -> None:
    """Such as a forged file may hold: torch finds out, where kernels would read beyond their arrays."""
    ensemble = fitted(diverse=False, folds=2).ensemble_
    assert FastEnsemble.of(ensemble) is not None
    part(ensemble)
    assert FastEnsemble.of(ensemble) is None


def test_rows_of_another_width_are_never_given_to_kernels(model: MPGELURegressor) -> None:
    for features in (2, 4):
        with pytest.raises(RuntimeError, match="size of tensor"):
            model.ensemble_(torch.zeros(5, features).double())


def test_gradients_flow_where_they_are_wanted(model: MPGELURegressor) -> None:
    x = torch.tensor(X[:4], requires_grad=True)
    model.ensemble_(x).mean.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_the_mean_of_a_process_in_one_call_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    process = GaussianProcess(300, 3)
    with torch.no_grad():
        for tensor in (process.weight, process.points, process.center, process.kernel):
            tensor.normal_()
        process.limit.fill_(3)
        limited = torch.rand(40, 3).double() * 6 - 3
        limited[3, 1] = torch.nan
        quick = process(limited)
        with native.disabled():
            plain = process(limited)
    torch.testing.assert_close(quick, plain, rtol=1e-11, atol=1e-11, equal_nan=True)
    assert quick[3, 0].isnan()
    assert quick[[2, 4]].isfinite().all()


@pytest.mark.parametrize("rows", [X[:, :2], X.tolist(), X.astype(np.int64), np.full((1, 3), np.inf), X[:0], X[0]])
def test_what_is_not_plainly_valid_is_checked_by_scikit_learn(model: MPGELURegressor, rows: Any) -> None:
    from mpgelu.estimators.checks import is_valid

    assert is_valid(model, X)
    assert is_valid(model, X.astype(np.float32))
    assert not is_valid(model, rows)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("offset", [0.0, -1.7])
def test_the_prepared_ensemble_is_the_ensemble(offset: float, by_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    model = mp.MPGELURegressor((6,), steps=20, folds=2, random_state=0).fit(X, X[:, 0] + 0.1 * rng.normal(size=60))
    model.ensemble_.likelihood = HeavyTailedGaussian(0.3, 2.5, 0.02, 0.1, offset)
    assert model.ensemble_.noise is not None
    model.ensemble_.noise.by_row = by_row
    x, y = torch.tensor(2 * X), torch.zeros(60).double()
    prepared = model.ensemble_._prepared(x)
    assert prepared is not None
    monkeypatch.setattr(mp.Ensemble, "_prepared", lambda *_: None)
    wanted = model.ensemble_(x)
    for name in ("mean", "epistemic_variance", "aleatoric_variance"):
        torch.testing.assert_close(getattr(prepared, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared.log_prob(y), wanted.log_prob(y), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(prepared.quantile([0.05, 0.5]), wanted.quantile([0.05, 0.5]), rtol=1e-3, atol=1e-3)
