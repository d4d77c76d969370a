"""The tables and the figure of a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from made_up import DASH, markdown_cells, only_row
from mpgelu.errors import DataError
from mpgelu.research.compare.report import NEW_ROWS, counted, differences, page, summarise, write_report
from mpgelu.research.store import Store

Record = dict[str, Any]


def record(split: int, log_likelihood: float | None, method: str = "mpgelu", **changes: Any) -> Record:
    made = {
        **{"method": method, "dataset": "boston", "split": split, "log_likelihood": log_likelihood, "repeats": 0},
        **{"rmse": 2.0, "crps": 1.0, "coverage90": 0.91, "width90": 5.0, "predict_us_per_row": 12.34},
        **{"log_likelihood_mixture": -2.5, "log_likelihood_gaussian": -2.6, "predict_one_row_ms": 0.1234},
        **{"fit_seconds": 3.0, "fit_cpu_seconds": 2.0, "seconds": 4.0},
    }
    return made | changes


def several(values: list[float], method: str = "mpgelu", **changes: Any) -> list[Record]:
    return [record(split, value, method, **changes) for split, value in enumerate(values)]


def section(records: list[Record], heading: str) -> list[list[str]]:
    """The cells below a heading."""
    _, _, text = page(pd.DataFrame(records)).partition(f"## {heading}")
    return markdown_cells(text.partition("\n## ")[0])


def test_mean_error_median_and_worst() -> None:
    row = only_row(summarise(pd.DataFrame(several([-1.0, -2.0, -6.0], "catboost"))))
    assert (row["part"], row["splits"], row["log_likelihood"]) == ("all", 3, -3)
    assert row["log_likelihood_se"] == pytest.approx(math.sqrt(7 / 3))
    assert (row["log_likelihood_median"], row["log_likelihood_worst"]) == (-2, -6)


def test_our_splits_for_development_are_shown_apart() -> None:
    records = several([-1.0] * 10 + [-3.0] * 10) + several([-2.0] * 20, "deep-ensemble")
    summary = summarise(pd.DataFrame(records))
    ours = summary[summary["method"] == "mpgelu"].set_index("part")["log_likelihood"]
    assert dict(ours) == {"all": -2, "0-9": -1, "10-19": -3}
    titles = [line[0] for line in section(records, "Log-likelihood, mean")]
    assert titles == ["", "MP-GELU", "MP-GELU, splits 0-9", "MP-GELU, splits 10-19", "deep ensemble of 5"]


def test_the_last_record_of_a_split_counts() -> None:
    frame = pd.DataFrame([record(0, -9.0), record(1, -1.0), record(0, -3.0)])
    assert list(counted(frame)["log_likelihood"]) == [-3, -1]


@pytest.mark.parametrize("broken", [record(1, None), {**record(1, 0.0), "log_likelihood": None, "error": "E: x"}])
def test_a_score_that_is_missing_is_not_left_out_in_silence(broken: Record) -> None:
    records = [record(0, -1.0, "catboost"), broken | {"method": "catboost"}, *several([-2.0, -2.0], "ngboost")]
    lines = section(records, "Log-likelihood, mean")
    assert lines[1:] == [["catboost", "not finite [2]"], ["ngboost", "**-2.00** ± 0.00 [2]"]]


def test_failures_are_listed() -> None:
    failed = {"method": "ngboost", "dataset": "wine", "split": 4, "error": "LinAlgError: singular"}
    text = page(pd.DataFrame([record(0, -1.0), failed]))
    assert text.endswith("## Failed\n\n- ngboost, wine split 4: LinAlgError: singular\n")


def test_wine_without_repeated_rows_is_a_column_of_its_own() -> None:
    new = {f"{name}_new": value for name, value in record(0, -4.0).items() if name in ("rmse", "log_likelihood")}
    records = [record(0, -1.0, dataset="wine", repeats=40, **new), record(1, -2.0, dataset="wine")]
    summary = summarise(pd.DataFrame(records))
    row = only_row(summary, dataset=NEW_ROWS, part="all")
    assert row["log_likelihood"] == -3  # no row of split 1 is a repetition
    assert math.isnan(row["fit_seconds"])
    assert section(records, "Log-likelihood, worst")[0] == ["", "wine", NEW_ROWS]
    assert section(records, "Fit")[0] == ["", "wine"]


def test_the_best_of_those_with_most_splits_is_bold() -> None:
    records = [
        *several([-2.0, -2.0], "catboost", rmse=1.5, coverage90=0.95, fit_cpu_seconds=0.00123),
        *several([-3.0, -3.0], "laplace", rmse=1.25, coverage90=0.88, fit_cpu_seconds=1234.5),
        *several([-1.0], "ngboost", rmse=0.1, coverage90=0.9, dataset="boston"),
    ]
    assert section(records, "Log-likelihood, median")[1:] == [
        ["catboost", "**-2.00** [2]"],
        ["laplace-torch, all/kron", "-3.00 [2]"],
        ["ngboost", "-1.00 [1]"],
    ]
    assert [line[1] for line in section(records, "RMSE")[1:]] == ["1.50 ± 0 [2]", "**1.25** ± 0 [2]", "0.100 [1]"]
    assert [line[1] for line in section(records, "Coverage")[1:]] == ["95.0% [2]", "**88.0%** [2]", "90.0% [1]"]
    assert [line[1] for line in section(records, "Fit")[1:3]] == ["**0.00123** [2]", "1234 [2]"]
    assert "**" not in str(section(records, "Mean width"))


def test_parts_of_ours_are_never_bold() -> None:
    lines = section([*several([-5.0] * 10 + [-1.0] * 10)], "Log-likelihood, median")
    assert ["**" in line[1] for line in lines[1:]] == [True, False, False]


def test_data_sets_are_columns_in_one_order_and_gaps_are_dashes() -> None:
    records = [record(0, -1.0, "catboost", dataset=name) for name in ("protein", "yacht", "boston")]
    lines = section([*records, record(0, -2.0, "ngboost")], "Log-likelihood, worst")
    assert lines[0] == ["", "boston", "yacht", "protein"]
    assert lines[2] == ["ngboost", "-2.00 [1]", DASH, DASH]


def test_differences_are_taken_on_the_same_splits() -> None:
    records = several([-1.0, -2.0, -100.0]) + several([-2.0, -6.0], "catboost")
    row = only_row(differences(pd.DataFrame(records)))
    assert (row["method"], row["splits"], row["difference"]) == ("catboost", 2, 2.5)
    assert row["se"] == pytest.approx(math.sqrt((1 / 2 + 1 / 9) * 4.5))
    assert section(records, "Log-likelihood of MP-GELU minus")[1:] == [["catboost", "+2.50 ± 1.66 [2]"]]


def test_the_mixture_of_the_ensemble_is_shown_beside_its_gaussian() -> None:
    records = [record(0, -2.6, "deep-ensemble"), record(0, -2.0, "mc-dropout")]
    assert section(records, "Log-likelihood of the exact mixture")[1:] == [["deep ensemble of 5", "-2.50 [1]"]]


def test_files(tmp_path: Path) -> None:
    store = Store(tmp_path / "records.jsonl")
    for made in several([-1.0, -2.0]) + several([-2.0], "catboost", dataset="wine"):
        store.append(made)
    write_report(store.path, tmp_path / "out")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"compare.csv", "compare.md", "compare.png"}
    assert written["compare.png"].startswith(b"\x89PNG")
    assert pd.read_csv(tmp_path / "out" / "compare.csv")["log_likelihood"].iloc[0] == -1.5
    write_report(store.path, tmp_path / "again")
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no records in"):
        write_report(tmp_path / "records.jsonl", tmp_path)
    with pytest.raises(DataError, match=r"unknown methods \['magic'\]"):
        counted(pd.DataFrame([record(0, -1.0, "magic")]))
