"""Scores of predictions against values computed another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mpgelu.predictive import Predictive
from mpgelu.tables.evaluation import Evaluation, headlines


@pytest.fixture
def evaluation() -> Evaluation:
    random = np.random.default_rng(0)
    mean, stddev = random.normal(size=500), random.uniform(0.5, 2, 500)
    actual = mean + stddev * random.normal(size=500)
    parts = (torch.as_tensor(values) for values in (mean, 0.36 * stddev**2, 0.64 * stddev**2))
    distribution = Predictive.gaussian(*parts)
    lower, upper = distribution.interval(0.8)
    return Evaluation.of(actual, distribution, lower.numpy(), upper.numpy())


def test_every_number_against_scipy(evaluation: Evaluation) -> None:
    normal = stats.norm(evaluation.mean, evaluation.stddev)
    np.testing.assert_allclose(evaluation.epistemic_std, 0.6 * evaluation.stddev)
    np.testing.assert_allclose(evaluation.aleatoric_std, 0.8 * evaluation.stddev)
    np.testing.assert_allclose(evaluation.pit, normal.cdf(evaluation.actual))
    np.testing.assert_allclose(evaluation.log_density, normal.logpdf(evaluation.actual))
    z = (evaluation.actual - evaluation.mean) / evaluation.stddev
    crps = evaluation.stddev * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    np.testing.assert_allclose(evaluation.crps, crps, rtol=1e-6)


def test_scores(evaluation: Evaluation) -> None:
    scores = evaluation.scores()
    error = evaluation.actual - evaluation.mean
    assert scores["rmse"] == pytest.approx(np.sqrt((error**2).mean()))
    assert scores["mae"] == pytest.approx(np.abs(error).mean())
    assert scores["r2"] == pytest.approx(
        1 - (error**2).sum() / ((evaluation.actual - evaluation.actual.mean()) ** 2).sum()
    )
    assert scores["coverage"] == pytest.approx(0.8, abs=0.05)
    assert scores["mean_width"] == pytest.approx(2 * 1.2815516 * evaluation.stddev.mean())
    assert headlines(scores, 0.8)["coverage of 80 % intervals"] == f"{100 * scores['coverage']:.1f} %"


def test_parts_are_the_whole(evaluation: Evaluation) -> None:
    cut = [
        Evaluation(**{name: values[rows] for name, values in vars(evaluation).items()})
        for rows in (slice(0, 123), slice(123, None))
    ]
    assert Evaluation.concatenate(cut).scores() == evaluation.scores()


def test_the_average_knows_nothing_of_a_row(evaluation: Evaluation) -> None:
    average = Evaluation.of_average(evaluation.actual, 1.0, 2.0, 0.9)
    assert set(average.mean) == {1.0}
    assert average.epistemic_std.max() == 0
    np.testing.assert_allclose(average.upper, 1 + 2 * 1.6448536, rtol=1e-6)
    assert average.scores()["log_likelihood"] == pytest.approx(stats.norm(1, 2).logpdf(evaluation.actual).mean())


def test_equal_targets_have_no_r2() -> None:
    scores = Evaluation.of_average(np.ones(3), 1.0, 2.0, 0.9).scores()
    assert np.isnan(scores["r2"])
    assert headlines(scores, 0.9)["R²"] == "-"
