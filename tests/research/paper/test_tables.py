"""From records to summaries: synthetic records whose answers can be worked out by hand."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from made_up import (
    BOSTON,
    Record,
    around,
    compared,
    final_record,
    only_row,
    runtime_record,
    splits,
    validation_record,
)
from mpgelu.errors import InputError
from mpgelu.research.paper.tables import SETTINGS, compare, paper_table, summarise


def test_paper_table() -> None:
    table = paper_table()
    assert table.groupby(["outputs", "covariance"]).size().tolist() == [18] * 4
    assert tuple(table[["outputs", "covariance"]].drop_duplicates().itertuples(index=False, name=None)) == SETTINGS
    energy = only_row(table, **BOSTON | {"dataset": "energy", "nonlinearity": "relu"})
    assert energy["runtime_s"] == 0.022


def test_mean_and_standard_error() -> None:
    row = only_row(summarise(pd.DataFrame(splits([1.0, 1.2, 1.4]))))
    assert row["nll"] == pytest.approx(1.2)
    assert row["nll_se"] == pytest.approx(0.2 / math.sqrt(3))
    assert row[["rmse", "rmse_se", "crps", "crps_se"]].tolist() == pytest.approx([0.8, 0, 0.4, 0])
    assert row["coverage90"] == pytest.approx(0.9)
    assert row["seconds"] == 4.5
    assert row[["label", "n", "q", "splits", "rate"]].tolist() == ["tab:uci1", 506, 13, 3, 0.01]
    assert row["rate_from"] == "grid over 20 splits"


def test_columns_begin_with_the_papers() -> None:
    columns = list(summarise(pd.DataFrame(splits([1.0]))).columns)
    assert columns[:12] == list(paper_table().columns)
    assert columns[12:16] == ["splits", "searched", "rate", "rate_from"]
    assert columns[16:20] == [f"validation_nll_{rate}" for rate in ("0.005", "0.01", "0.05", "0.1")]
    assert columns[20:] == [
        *("nll_mixture", "nll_mixture_se", "nll_gaussian", "nll_gaussian_se", "crps", "crps_se"),
        *("coverage90", "runtime_factored_s", "seconds"),
    ]


def test_one_split_has_no_standard_error() -> None:
    row = only_row(summarise(pd.DataFrame(splits([1.0]))))
    assert row["nll"] == 1.0
    assert math.isnan(row["nll_se"])


def test_a_metric_that_is_not_finite_is_not_left_out() -> None:
    row = only_row(summarise(pd.DataFrame([*splits([1.0, 2.0]), final_record(split=2, nll=None)])))
    assert math.isnan(row["nll"])
    assert math.isnan(row["nll_se"])
    assert row["rmse"] == pytest.approx(0.8)
    assert row["splits"] == 3


def test_the_last_runtime_record_of_seed_0_counts() -> None:
    records = [
        *splits([1.0, 1.2], runtime_s=9.0),  # not where runtimes are recorded
        *(runtime_record(0.5, runtime_factored_s=0.4), runtime_record(0.2, split=3, rate=0.1)),
        *(runtime_record(0.7, seed=1), runtime_record(0.8, outputs=1), runtime_record(0.9, nonlinearity="relu")),
    ]
    row = only_row(summarise(pd.DataFrame(records)))
    assert row["runtime_s"] == 0.2
    assert math.isnan(row["runtime_factored_s"])
    assert row[["splits", "nll"]].tolist() == pytest.approx([2, 1.1])
    records.append(runtime_record(0.3, runtime_factored_s=0.1))
    assert only_row(summarise(pd.DataFrame(records)))[["runtime_s", "runtime_factored_s"]].tolist() == [0.3, 0.1]


def test_no_runtime_without_a_runtime_record() -> None:
    row = only_row(summarise(pd.DataFrame([final_record(), runtime_record(0.5, dataset="wine")])))
    assert row[["runtime_s", "runtime_factored_s"]].isna().all()


def test_rows_are_in_the_papers_order() -> None:
    cells: list[Record] = [{"outputs": 1}, {"dataset": "yacht"}, {"nonlinearity": "relu"}, {}]
    table = summarise(pd.DataFrame([final_record(**cell) for cell in cells]))
    assert table["outputs"].tolist() == [2, 2, 2, 1]
    assert table["dataset"].tolist() == ["boston", "boston", "yacht", "boston"]
    assert table["nonlinearity"].tolist() == ["mpgelu", "relu", "mpgelu", "mpgelu"]


def test_other_seeds_kinds_and_data_sets_are_left_out() -> None:
    others: list[Record] = [{"seed": 1}, {"kind": "toy"}, {"dataset": "diabetes"}]
    others += [{"outputs": None, "kind": "toy"}]
    records = [final_record(), *(final_record(nll=9.0, **other) for other in others)]
    assert summarise(pd.DataFrame(records))["nll"].tolist() == [1.2]


def test_validation_nll_of_each_rate() -> None:
    searched = [validation_record(split=split, rate=0.05, nll=nll) for split, nll in enumerate([1.0, 3.0])]
    searched += [validation_record(rate=0.1, nll=4.0), validation_record(rate=0.1, split=1, nll=None)]
    searched += [validation_record(rate=0.05, split=5, seed=1, nll=100.0)]
    row = only_row(summarise(pd.DataFrame([final_record(), *searched])))
    assert row["validation_nll_0.05"] == 2.0
    assert row[["validation_nll_0.005", "validation_nll_0.01", "validation_nll_0.1"]].isna().all()


def test_the_latest_rate_and_record_count() -> None:
    old = splits([5.0, 5.0, 5.0], rate=0.1, rate_from="grid over 2 splits")
    new = [final_record(split=0, nll=7.0), final_record(split=0, nll=1.0), final_record(split=1, nll=2.0)]
    row = only_row(summarise(pd.DataFrame(old + new)))
    assert row[["nll", "splits", "rate", "rate_from"]].tolist() == [1.5, 2, 0.01, "grid over 20 splits"]


def test_every_way_of_choosing_the_rate_is_told() -> None:
    row = only_row(summarise(pd.DataFrame([*splits([1.0, 2.0]), final_record(split=2, rate_from="given")])))
    assert row["rate_from"] == "given; grid over 20 splits"


def test_tested_splits_with_a_search_are_counted() -> None:
    searched = [validation_record(split=split, rate=rate) for split in (1, 2, 9) for rate in (0.005, 0.01)]
    searched += [validation_record(split=0, seed=1), validation_record(split=0, outputs=1)]
    assert only_row(summarise(pd.DataFrame([*splits([1.0] * 4), *searched])))["searched"] == 2
    assert only_row(summarise(pd.DataFrame(splits([1.0] * 4))))["searched"] == 0


def test_records_without_a_needed_field_are_refused() -> None:
    with pytest.raises(InputError, match=r"lack \['split', 'nll'\]"):
        summarise(pd.DataFrame([final_record()]).drop(columns=["split", "nll"]))


def test_no_records() -> None:
    empty = summarise(pd.DataFrame())
    assert len(empty) == 0
    assert compare(empty)["splits"].tolist() == [0] * 72


def test_difference_in_combined_standard_errors() -> None:
    comparison = compared(splits(around(1.204 + 0.1, 0.05)))
    row = only_row(comparison, **BOSTON)
    assert len(comparison) == 72
    assert row["nll_difference"] == pytest.approx(0.1)
    assert row["nll_combined_se"] == pytest.approx(math.hypot(0.05, 0.029))
    assert row["nll_z"] == pytest.approx(0.1 / math.hypot(0.05, 0.029))
    assert row["nll_agrees"]
    assert row[["nll_paper", "nll_se_paper", "rmse_paper", "runtime_s_paper"]].tolist() == [
        1.204,
        0.029,
        0.786,
        0.016,
    ]


@pytest.mark.parametrize(("z", "agrees"), [(1.99, True), (2.01, False), (-1.99, True), (-2.01, False)])
def test_two_standard_errors_are_the_limit(z: float, agrees: bool) -> None:
    row = only_row(compared(splits(around(1.204 + z * math.hypot(0.05, 0.029), 0.05))), **BOSTON)
    assert row["nll_z"] == pytest.approx(z)
    assert row["nll_agrees"] == agrees


def test_a_printed_standard_error_of_zero_counts_as_half_a_digit() -> None:
    power = {"dataset": "power", "outputs": 1}
    row = only_row(compared(splits([0.9565] * 2, **power)), **BOSTON | power)
    assert row["nll_se_paper"] == 0
    assert row["nll_z"] == pytest.approx(0.0015 / 0.0005)
    assert not row["nll_agrees"]


def test_agreement_is_unknown_without_a_standard_error_and_false_if_not_finite() -> None:
    broken = [final_record(dataset="wine", split=split, nll=[1.0, None][split]) for split in range(2)]
    comparison = compared([final_record(), *broken])
    assert only_row(comparison, **BOSTON)["nll_agrees"] is pd.NA
    assert only_row(comparison, **BOSTON | {"dataset": "yacht"})["nll_agrees"] is pd.NA
    assert not only_row(comparison, **BOSTON | {"dataset": "wine"})["nll_agrees"]
