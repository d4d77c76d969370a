"""The paired test: differences whose t and p can be worked out by hand."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from made_up import final_record, only_row, pairs
from mpgelu.research.paper.paired import paired_test


def p_of_two_degrees(t: float) -> float:
    """The two-sided p-value of Student's t with two degrees of freedom, in closed form."""
    return 1 - abs(t) / math.sqrt(2 + t**2)


def test_corrected_resampled_t() -> None:
    row = only_row(paired_test(pd.DataFrame(pairs([-1.0, -2.0, -3.0]))), metric="nll")
    assert row["mean_difference"] == pytest.approx(-2.0)
    assert row["corrected_se"] == pytest.approx(2 / 3)
    assert row["t"] == pytest.approx(-3.0)
    assert row["p"] == row["p_holm"] == pytest.approx(p_of_two_degrees(3.0))
    assert row[["dataset", "outputs", "covariance", "splits", "seeds"]].tolist() == [
        "boston",
        2,
        "full",
        3,
        1,
    ]
    assert row["verdict"] == "no difference shown"


def test_seeds_are_averaged_within_a_split() -> None:
    records = pairs([-1.5, -2.5, -3.5], seed=1) + pairs([-0.5, -1.5, -2.5], seed=2)
    row = only_row(paired_test(pd.DataFrame(records)), metric="nll")
    assert row[["mean_difference", "t"]].tolist() == pytest.approx([-2.0, -3.0])
    assert row[["splits", "seeds"]].tolist() == [3, 2]


def test_only_common_splits_are_paired() -> None:
    records = [
        *pairs([-1.0, -2.0, -3.0]),
        final_record(split=3, nll=99.0),
        final_record(split=0, seed=7, nll=99.0),
    ]
    row = only_row(paired_test(pd.DataFrame(records)), metric="nll")
    assert row["t"] == pytest.approx(-3.0)
    assert row[["splits", "seeds"]].tolist() == [3, 1]


def test_holm_correction_and_verdicts() -> None:
    scales = {"boston": 0.01, "concrete": -0.012, "energy": 0.3, "wine": 1.0}
    records = []
    for dataset, scale in scales.items():
        records += pairs([math.copysign(1, scale) * value for value in (1, 1 + scale, 1 - scale)], dataset=dataset)
    table = paired_test(pd.DataFrame(records)).query("metric == 'nll'").set_index("dataset")
    p = {name: p_of_two_degrees(1 / (2 / 3 * scale)) for name, scale in scales.items()}
    assert table["p"].to_dict() == pytest.approx(p)
    expected = {
        "boston": 4 * p["boston"],
        "concrete": 3 * p["concrete"],
        "energy": 2 * p["energy"],
        "wine": p["wine"],
    }
    assert table["p_holm"].to_dict() == pytest.approx(expected)
    assert table["verdict"].tolist() == ["ReLU better", "MP-GELU better", *["no difference shown"] * 2]


def test_holm_is_monotone_and_at_most_one() -> None:
    differences = {"boston": [1.0, 2.0, 3.0], "wine": [1.0, 2.0, 3.01], "yacht": [1.0, -2.0, 1.1]}
    records = [record for dataset, values in differences.items() for record in pairs(values, dataset=dataset)]
    table = paired_test(pd.DataFrame(records)).query("metric == 'nll'")
    boston, _, yacht = table["p"]
    assert table["p_holm"].tolist() == pytest.approx([3 * boston, 3 * boston, yacht])
    twice = pairs([1.0, -2.0, 1.1]) + pairs([1.0, -2.0, 1.1], dataset="wine")
    assert paired_test(pd.DataFrame(twice)).query("metric == 'nll'")["p_holm"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("differences", [[-1.0], [-1.0, -1.0], [-1.0, -2.0, None]], ids=["one", "equal", "broken"])
def test_no_test_without_spread_or_finite_metrics(differences: list[float | None]) -> None:
    table = paired_test(pd.DataFrame(pairs(differences) + pairs([-1.0, -2.0, -3.0], dataset="wine")))
    row = only_row(table, dataset="boston", metric="nll")
    assert row[["t", "p", "p_holm"]].isna().all()
    assert row["verdict"] == "no difference shown"
    wine = only_row(table, dataset="wine", metric="nll")
    assert wine["p_holm"] == wine["p"]


def test_each_network_is_compared_with_mpgelu_and_corrected_apart() -> None:
    others = [record | {"nonlinearity": "relu_input", "rate": 0.1} for record in pairs([-1.0, -2.0, -4.0])[1::2]]
    for record, nll in zip(others, (5.5, 5.0, 4.5), strict=True):
        record["nll"] = nll
    table = paired_test(pd.DataFrame(pairs([-1.0, -2.0, -3.0]) + others)).query("metric == 'nll'")
    assert table["against"].tolist() == ["relu", "relu_input"]
    relu, relu_input = (row for _, row in table.iterrows())
    assert relu["mean_difference"] == pytest.approx(-2.0)
    assert relu_input["mean_difference"] == pytest.approx(-2.0)  # -1.5, -2, -2.5
    assert relu_input["t"] == pytest.approx(2 * relu["t"])
    assert (relu["p_holm"], relu_input["p_holm"]) == (relu["p"], relu_input["p"])
    assert (relu["rate"], relu["rate_against"], relu_input["rate_against"]) == ("0.01", "0.05", "0.1")


def test_no_records() -> None:
    assert len(paired_test(pd.DataFrame())) == 0
