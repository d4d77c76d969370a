"""The scikit-learn estimator: its contract, its predictions, and what happens to wrong input."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import mpgelu as mp
from mpgelu import MPGELURegressor
from mpgelu.research.datasets import load_diabetes

Array = NDArray[np.float64]
QUICK: dict[str, Any] = {"hidden": (8,), "rate": (0.001, 0.1), "members": 2, "steps": 200, "random_state": 0}


def table(rows: int = 200, seed: int = 0) -> tuple[Array, Array]:
    """A smooth function of two of three features, with a noise that grows with the first."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (rows, 3)) * [1, 10, 100] + [0, 50, -3000]
    y = 1000 + 30 * np.sin(X[:, 0]) + 2 * X[:, 1] + rng.normal(size=rows) * (1 + 2 * (X[:, 0] > 0))
    return X, y


@pytest.fixture(scope="module")
def fitted() -> MPGELURegressor:
    settings: dict[str, Any] = {"hidden": (16, 16), "members": 2, "rate": (0.001, 0.03), "covariance": "exact"}
    return MPGELURegressor(**settings, steps=1000, random_state=0).fit(*table(400))


def _expected_failures(_: object) -> dict[str, str]:
    reason = "batches are drawn at random, so that a weight of two is not the same as a row that comes twice"
    return {
        "check_sample_weight_equivalence_on_dense_data": reason,
        "check_sample_weight_equivalence_on_sparse_data": reason,
    }


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [MPGELURegressor(**QUICK)], expected_failed_checks=_expected_failures
)
def test_scikit_learns_contract(estimator: Any, check: Any) -> None:
    check(estimator)


def test_learns_the_mean_and_where_the_noise_is(fitted: MPGELURegressor) -> None:
    X, y = table(1000, seed=1)
    assert fitted.score(X, y) > 0.97
    distribution = fitted.predict_distribution(X)
    noise = distribution.aleatoric_variance.sqrt().numpy()
    assert noise[X[:, 0] > 0.5].mean() > 1.4 * noise[X[:, 0] < -0.5].mean()
    lower, upper = fitted.predict_interval(X, level=0.9)
    assert 0.85 < np.mean((lower <= y) & (y <= upper)) < 0.96


def test_the_summaries_agree_with_the_distribution(fitted: MPGELURegressor) -> None:
    X, _ = table(50, seed=2)
    distribution = fitted.predict_distribution(X)
    mean, std = fitted.predict(X, return_std=True)
    np.testing.assert_allclose(mean, distribution.mean, rtol=1e-9)
    np.testing.assert_allclose(std, distribution.stddev, rtol=1e-9)
    np.testing.assert_allclose(fitted.predict(X), mean)
    quantiles = fitted.predict_quantile(X, [0.1, 0.5, 0.9])
    assert quantiles.shape == (50, 3)
    np.testing.assert_allclose(distribution.cdf(torch.as_tensor(quantiles[:, 0])), 0.1, atol=1e-6)
    np.testing.assert_array_equal(fitted.predict_quantile(X, 0.9), quantiles[:, 2])
    lower, upper = fitted.predict_interval(X, level=0.8)
    np.testing.assert_allclose(np.stack([lower, upper], 1), quantiles[:, [0, 2]])


def test_rows_do_not_depend_on_their_neighbours(fitted: MPGELURegressor) -> None:
    X, _ = table(2500, seed=3)  # more than one chunk
    together = np.stack(fitted.predict(X, return_std=True))
    alone = np.stack(fitted.predict(X[2000:2003], return_std=True))
    np.testing.assert_allclose(together[:, 2000:2003], alone, rtol=1e-5)


def test_the_score_is_the_held_out_log_density(fitted: MPGELURegressor) -> None:
    X, y = table(2000, seed=4)
    new = fitted.predict_distribution(X).log_prob(torch.as_tensor(y)).mean().item()
    assert fitted.score_ == pytest.approx(new, abs=0.25)
    assert sum(fitted.rate_weights_.values()) == pytest.approx(1)
    assert fitted.ensemble_.weights.sum().item() == pytest.approx(1)


def test_diagonal_and_exact_covariance_agree_on_the_mean_of_one_layer() -> None:
    X, y = table(100)
    exact = MPGELURegressor(**QUICK, covariance="exact").fit(X, y)
    diagonal = clone(exact).set_params(covariance="diagonal").fit(X, y)
    # One hidden layer: the hidden units' variances, and so the means, do not depend on correlations.
    diagonal.ensemble_.weights = exact.ensemble_.weights
    np.testing.assert_allclose(exact.predict(X), diagonal.predict(X), rtol=1e-5)
    assert not np.allclose(exact.predict(X, return_std=True)[1], diagonal.predict(X, return_std=True)[1], rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": "homoscedastic"},
        {"gaussian_weights": True},
        {"gaussian_weights": True, "noise": "homoscedastic"},
        {"train_covariance": "exact"},
        {"rate": 0.05, "members": 1},
        {"rate": 0.0},
        {"early_stopping": True},
        {"beta": 0.0, "batch_size": 7},
    ],
)
def test_options_train_and_predict(settings: dict[str, Any]) -> None:
    X, y = table(120)
    model = MPGELURegressor(**QUICK | {"steps": 300} | settings).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.mean((mean - y) ** 2) < 0.3 * y.var()
    assert (std > 0).all()
    if settings.get("noise") == "homoscedastic":
        members = model.ensemble_.moments(torch.as_tensor(X))
        assert members.mean[..., 1].std(-1).max() < 1e-6  # one noise for all rows


def test_native_and_torch_training_are_the_same_program() -> None:
    X, y = table(60)
    native = MPGELURegressor(**QUICK).fit(X, y)
    with mp.native.disabled():
        plain = MPGELURegressor(**QUICK).fit(X, y)
    np.testing.assert_allclose(native.predict(X), plain.predict(X), rtol=1e-3)
    assert native.score_ == pytest.approx(plain.score_, abs=1e-3)


def test_weights_tell_which_rows_count() -> None:
    X, y = table(200)
    lying = y.copy()
    lying[::2] += 500
    weights = np.where(np.arange(200) % 2, 1.0, 0.0)
    model = MPGELURegressor(**QUICK | {"steps": 400}).fit(X, lying, sample_weight=weights)
    assert np.abs(model.predict(X) - y).mean() < 20


def test_a_random_state_gives_the_same_model_twice() -> None:
    X, y = table(80)
    first, second = (MPGELURegressor(**QUICK).fit(X, y).predict(X) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    other = MPGELURegressor(**QUICK | {"random_state": 1}).fit(X, y).predict(X)
    assert not np.array_equal(first, other)


def test_data_frames_pipelines_searches_and_pickles() -> None:
    X, y = table(100)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = MPGELURegressor(**QUICK).fit(frame, y)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(frame), model.predict(frame))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c"]])
    search = GridSearchCV(MPGELURegressor(**QUICK), {"hidden": [(4,), (8,)]}, cv=2).fit(X, y)
    assert search.best_params_["hidden"] in [(4,), (8,)]
    pipeline = make_pipeline(StandardScaler(), MPGELURegressor(**QUICK))
    assert len(cross_val_score(pipeline, X, y, cv=2)) == 2


def test_real_data_without_any_setting_but_fewer_steps() -> None:
    data = load_diabetes()
    model = MPGELURegressor(steps=300, random_state=0).fit(data.X[:350], data.y[:350])
    y = torch.as_tensor(data.y[350:])
    distribution = model.predict_distribution(data.X[350:])
    gaussian = mp.Predictive.gaussian(
        torch.full_like(y, data.y[:350].mean()), torch.zeros_like(y), torch.full_like(y, data.y[:350].var())
    )
    assert distribution.log_prob(y).mean() > gaussian.log_prob(y).mean() + 0.1
    assert distribution.crps(y).mean() < 0.85 * gaussian.crps(y).mean()


# errors of the features


def test_input_errors_widen_the_prediction(fitted: MPGELURegressor) -> None:
    X, _ = table(20, seed=5)
    mean, std = fitted.predict(X, return_std=True)
    wide_mean, wide = fitted.predict(X, return_std=True, input_std=[0, 5.0, 0])
    slope = 2  # of the target by the second feature
    assert np.median(wide**2 - std**2) == pytest.approx((5.0 * slope) ** 2, rel=0.2)
    np.testing.assert_allclose(wide_mean, mean, atol=5)
    for same in (0, np.zeros(3), np.zeros((20, 3))):
        np.testing.assert_allclose(fitted.predict(X, return_std=True, input_std=same)[1], std, rtol=1e-5)
    each = np.zeros((20, 3))
    each[3, 1] = 5.0
    some = fitted.predict(X, return_std=True, input_std=each)[1]
    assert some[3] == pytest.approx(wide[3], rel=1e-5)
    np.testing.assert_allclose(np.delete(some, 3), np.delete(std, 3), rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, [1.0, 2.0], np.ones((19, 3))])
def test_wrong_input_errors_are_refused(fitted: MPGELURegressor, wrong: Any) -> None:
    with pytest.raises(mp.InputError, match="input_std must be"):
        fitted.predict(table(20)[0], input_std=wrong)


# calibration


def test_calibrated_intervals_cover_even_if_the_model_is_wrong(fitted: MPGELURegressor) -> None:
    X, y = table(600, seed=6)
    y = y + 10 * np.random.default_rng(0).standard_t(3, 600)  # noise the model has never seen
    model = pickle.loads(pickle.dumps(fitted))
    before = np.subtract(*model.predict_interval(X, 0.9)[::-1])
    model.calibrate(X[:300], y[:300])
    lower, upper = model.predict_interval(X[300:], 0.9)
    assert 0.85 < np.mean((lower <= y[300:]) & (y[300:] <= upper)) < 0.95
    assert (upper - lower).mean() > 2 * before.mean()


def test_too_few_rows_for_a_level(fitted: MPGELURegressor) -> None:
    model = pickle.loads(pickle.dumps(fitted)).calibrate(*table(8, seed=7))
    with pytest.raises(mp.InputError, match=r"level 0\.9 needs at least 9 calibration rows, there are 8"):
        model.predict_interval(table(3)[0], 0.9)
    assert len(model.predict_interval(table(3)[0], 0.8)[0]) == 3


@pytest.mark.parametrize("level", [0, 1, 90])
def test_wrong_levels(fitted: MPGELURegressor, level: float) -> None:
    with pytest.raises(mp.InputError, match="level must lie strictly between 0 and 1"):
        fitted.predict_interval(table(3)[0], level)


# going on


def test_warm_starts_go_on_from_the_last_fit() -> None:
    X, y = table(80)
    model = MPGELURegressor(**QUICK | {"steps": 40}, warm_start=True)
    scores = [model.fit(X, y).score_ for _ in range(4)]
    assert scores[3] > scores[0] + 0.3
    changes: dict[str, Any] = {
        "members": 3,
        "rate": (0.2, 0.3),
        "hidden": (9,),
        "noise": "homoscedastic",
        "gaussian_weights": True,
    }
    for name, value in changes.items():
        with pytest.raises(mp.InputError, match=f"cannot change {name}"):
            pickle.loads(pickle.dumps(model)).set_params(**{name: value}).fit(X, y)
    with pytest.raises(mp.InputError, match=r"rows and features \(\(80, 3\) before, \(80, 2\) now\)"):
        model.fit(X[:, :2], y)


def test_warm_starts_keep_the_held_out_rows_held_out() -> None:
    X, _ = table(80)
    noise = np.random.default_rng(0).normal(size=80)
    model = MPGELURegressor(**QUICK | {"random_state": None}, warm_start=True)
    scores = [model.fit(X, noise).score_ for _ in range(5)]
    assert scores[4] < scores[0] + 0.2  # there is nothing to learn


def test_checkpoints_give_the_finished_model_at_once(tmp_path: Path) -> None:
    X, y = table(80)
    model = MPGELURegressor(**QUICK, checkpoint=tmp_path / "state")
    np.testing.assert_array_equal(model.fit(X, y).predict(X), clone(model).fit(X, y).predict(X))
    assert np.isfinite(cross_val_score(model, X, y, cv=2)).all()  # other rows have checkpoints of their own
    with pytest.raises(mp.InputError, match="checkpoint needs a whole number as random_state"):
        clone(model).set_params(random_state=None).fit(X, y)


def test_more_rows_get_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpgelu.estimators.regressor._STEPS", ((49, 3), (math.inf, 5)))
    models = [MPGELURegressor(**QUICK | {"steps": None}).fit(*table(rows)) for rows in (49, 50)]
    assert [model.n_iter_ for model in models] == [3, 5]


@pytest.mark.parametrize(("rows", "members"), [(399, 10), (400, 8), (1999, 8), (2000, 5), (3, 3)])
def test_few_rows_get_more_members(rows: int, members: int) -> None:
    model = MPGELURegressor(**QUICK | {"members": None, "steps": 2}).fit(*table(rows))
    assert len(model.networks_) == 2 * members


def test_epochs_limit_the_steps() -> None:
    X, y = table(100)
    assert MPGELURegressor(**QUICK, batch_size=20, max_epochs=3).fit(X, y).n_iter_ == 12
    assert MPGELURegressor(**QUICK, batch_size=20, max_epochs=1000).fit(X, y).n_iter_ == QUICK["steps"]


# wrong settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rate": 1.0}, "rate must be in"),
        ({"rate": ()}, "rate must be in"),
        ({"members": 0}, "members must be a whole number of at least 1, got 0"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"max_epochs": -1}, "max_epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"covariance": "full"}, "covariance must be 'auto' or 'exact' or 'diagonal', got 'full'"),
        ({"noise": "none"}, "noise must be"),
        ({"rate": (0.1, 0.1)}, "rate must be in"),
        ({"hidden": (0,)}, "hidden must be units of each layer"),
        ({"hidden": 8}, r"hidden must be units of each layer, as \(48, 48\), got 8"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(mp.InputError, match=text):
        MPGELURegressor(**QUICK | settings).fit(*table(20))


def test_weights_that_are_all_zero_are_refused() -> None:
    X, y = table(20)
    with pytest.raises(ValueError, match=r"at least one non-zero|positive sample_weight"):  # scikit-learn's or ours
        MPGELURegressor(**QUICK).fit(X, y, sample_weight=np.zeros(20))
    with pytest.raises(mp.InputError, match="at least 2 rows of positive sample_weight, got 1"):
        MPGELURegressor(**QUICK).fit(X, y, sample_weight=np.eye(20)[0])


def test_rows_of_weight_zero_are_as_good_as_gone() -> None:
    X, y = table(60)
    y[40:] = 1e60
    model = MPGELURegressor(**QUICK).fit(X, y, sample_weight=np.r_[np.ones(40), np.zeros(20)])
    np.testing.assert_array_equal(model.predict(X), MPGELURegressor(**QUICK).fit(X[:40], y[:40]).predict(X))


@pytest.mark.parametrize("scale", [1e-200, 1e150])
def test_extreme_units(scale: float) -> None:
    X, y = table(60)
    expected = MPGELURegressor(**QUICK).fit(X, y).predict(X)
    scaled = MPGELURegressor(**QUICK).fit(X * scale, y * scale).predict(X * scale)
    np.testing.assert_allclose(scaled / scale, expected, rtol=1e-3)


def test_features_that_no_float_can_hold_standardised_are_refused(fitted: MPGELURegressor) -> None:
    X, _ = table(5)
    X[3, 1] = 1e40
    with pytest.raises(mp.InputError, match=r"X\[3, 1\] is 1e\+40, more than 1e\+15 standard deviations"):
        fitted.predict(X)


def test_a_failed_fit_is_no_fit() -> None:
    model = MPGELURegressor(rate=2.0)
    with pytest.raises(mp.InputError):
        model.fit(*table(20))
    with pytest.raises(NotFittedError):
        model.predict(table(20)[0])


@pytest.mark.parametrize("q", [0, 1, 1.5, [0.5, -1]])
def test_wrong_probabilities_are_refused(fitted: MPGELURegressor, q: Any) -> None:
    with pytest.raises(mp.InputError, match="q must lie strictly between 0 and 1"):
        fitted.predict_quantile(table(3)[0], q)


def test_numpy_integers_and_single_precision() -> None:
    X, y = table(60)
    plain = MPGELURegressor(**QUICK).fit(X, y)
    numpy = MPGELURegressor(**QUICK | {"hidden": np.array([8])}).fit(X, y)
    np.testing.assert_array_equal(plain.predict(X), numpy.predict(X))
    np.testing.assert_allclose(plain.predict(X.astype(np.float32)), plain.predict(X), rtol=1e-3)


def test_another_default_precision_of_torch() -> None:
    X, y = table(40)
    expected = MPGELURegressor(**QUICK).fit(X, y).predict(X)
    torch.set_default_dtype(torch.float64)
    try:
        np.testing.assert_allclose(MPGELURegressor(**QUICK).fit(X, y).predict(X), expected, rtol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_constant_features_and_a_constant_target() -> None:
    X, y = table(40)
    X[:, 1] = 1e9
    model = MPGELURegressor(**QUICK).fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    constant = MPGELURegressor(**QUICK | {"steps": 500}).fit(X, np.full(40, 7.0))
    np.testing.assert_allclose(constant.predict(X), 7.0, atol=0.2)


# saving


def test_saved_models_predict_the_same_bits(fitted: MPGELURegressor, tmp_path: Path) -> None:
    X, y = table(300, seed=8)
    model = pickle.loads(pickle.dumps(fitted)).calibrate(X, y)
    model.save(tmp_path / "model.mpgelu")
    loaded = mp.load(tmp_path / "model.mpgelu")
    for ours, theirs in zip(model.predict(X, return_std=True), loaded.predict(X, return_std=True), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(model.predict_interval(X), loaded.predict_interval(X))
    assert loaded.get_params() == {**model.get_params(), "hidden": [16, 16], "rate": [0.001, 0.03]}
    assert loaded.score_ == model.score_
    assert [p.name for p in tmp_path.iterdir()] == ["model.mpgelu"]


def test_saved_names_and_settings_come_back(tmp_path: Path) -> None:
    X, y = table(60)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    settings = QUICK | {"gaussian_weights": True, "random_state": np.random.RandomState(0)}
    model = MPGELURegressor(**settings).fit(frame, y)
    model.save(tmp_path / "model")
    loaded = mp.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(frame), model.predict(frame))
    assert loaded.feature_names_in_.tolist() == ["a", "b", "c"]
    assert loaded.random_state is None
    clone(loaded).fit(frame, y)


def test_an_unfitted_model_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not fitted"):
        MPGELURegressor().save(tmp_path / "model")
    assert not list(tmp_path.iterdir())
