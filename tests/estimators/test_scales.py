"""Scales of features: robust against absurd cells, and fine enough for columns that are mostly one value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpgelu.errors import InputError
from mpgelu.estimators.scales import LIMIT, robust_scale, target_scales

RANDOM = np.random.default_rng(0)


def limited(X: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = robust_scale(X)(torch.as_tensor(X)).numpy()
    return scaled


def test_a_normal_feature_has_unit_spread() -> None:
    scale = robust_scale(RANDOM.normal(5, 3, (4_000, 1)))
    assert float(scale.center) == pytest.approx(5, abs=0.2)
    assert float(scale.scale) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("rows", [50, 500, 5_000])
def test_one_absurd_cell_changes_little(rows: int) -> None:
    X = np.random.default_rng(rows).normal(size=(rows, 1))
    before = robust_scale(X)
    X[0] = 1e9
    after = robust_scale(X)
    assert 0.98 * float(before.scale) < float(after.scale) < float(before.scale) * np.sqrt(1 + 110 / rows)
    assert np.abs(limited(X)).max() <= LIMIT


def test_values_beside_many_zeros_are_told_apart() -> None:
    """The quartiles of a column that is mostly zero are equal, and any share of these would limit the rest."""
    X = np.zeros((1_000, 1))
    X[:200, 0] = np.linspace(50, 150, 200)
    z = limited(X)[:200, 0]
    assert z[0] == pytest.approx(0.5, abs=0.05)
    assert z[-1] - z[0] > 0.7


def test_counts_keep_their_resolution() -> None:
    """Most of a count is zero or small; large ones are told apart although the quartiles are close to each other."""
    X = np.random.default_rng(1).negative_binomial(0.3, 0.02, (5_000, 1)).astype(float)
    spread = np.diff(np.quantile(X, [0.25, 0.75])).item() / 1.349
    assert float(robust_scale(X).scale) > 1.5 * spread
    large = np.quantile(X, [0.98, 0.995])
    before, after = robust_scale(X)(torch.as_tensor(large[:, None])).ravel().tolist()
    assert after - before > 0.5


def test_a_rare_flag_is_of_unit_size_and_a_constant_stays_as_it_is() -> None:
    X = np.column_stack([np.arange(300) % 100 == 0, np.full(300, 7.0)]).astype(float)
    scale = robust_scale(X)
    torch.testing.assert_close(scale.scale, torch.ones(2, dtype=torch.float64))
    assert (limited(X)[:, 1] == 0).all()


def test_differences_that_overflow_are_refused() -> None:
    with pytest.raises(InputError, match="differences overflow"):
        robust_scale(np.array([[-1.7e308], [1.7e308], [1.7e308]]))


@pytest.mark.parametrize(
    ("factor", "offset", "wrong"), [(1e300, 0.0, "large"), (1.0, 1e160, "large"), (1e-200, 0.0, "close to zero")]
)
def test_targets_whose_variance_is_no_number_are_refused(factor: float, offset: float, wrong: str) -> None:
    y, weights = np.array([-1.0, 0.5, 1.0]), np.ones(3)
    with pytest.raises(InputError, match=f"fit: targets are too {wrong}.*another unit"):
        target_scales(factor * y + offset, weights)
    assert target_scales(0 * y, weights) == (0, 1)
    assert target_scales(1e-100 * y, weights)[1] == pytest.approx(1e-100 * y.std())
