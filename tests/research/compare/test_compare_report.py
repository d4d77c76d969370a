"""The averages, the tables and the figure of a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from made_up import DASH, markdown_cells, only_row
from mpgelu.errors import DataError
from mpgelu.research.compare.comparison_page import page, update_docs, update_readme, write_report
from mpgelu.research.compare.figure import places
from mpgelu.research.compare.methods import GROUPS
from mpgelu.research.compare.parts import parts_table
from mpgelu.research.compare.summary import counted, summarise
from mpgelu.research.store import Store

Record = dict[str, Any]
FIRST = 5  # report split


def record(split: int, log_likelihood: float | None, method: str = "mpgelu", **changes: Any) -> Record:
    made = {
        **{"method": method, "dataset": "boston", "split": split, "log_likelihood": log_likelihood, "repeats": 0},
        **{"rmse": 2.0, "crps": 1.0, "coverage90": 0.91, "width90": 5.0, "predict_us_per_row": 12.34},
        **{"log_likelihood_mixture": -2.5, "log_likelihood_gaussian": -2.6, "predict_one_row_ms": 0.1234},
        **{"fit_seconds": 3.0, "fit_cpu_seconds": 2.0, "seconds": 4.0},
    }
    return made | changes


def several(values: list[float], method: str = "mpgelu", **changes: Any) -> list[Record]:
    return [record(FIRST + place, value, method, **changes) for place, value in enumerate(values)]


def section(records: list[Record], heading: str) -> list[list[str]]:
    """The cells below a heading."""
    _, found, text = page(pd.DataFrame(records)).partition(f"## {heading}")
    assert found
    return markdown_cells(text.partition("\n## ")[0])


def test_mean_error_median_and_worst() -> None:
    row = only_row(summarise(pd.DataFrame(several([-1.0, -2.0, -6.0], "catboost"))))
    assert (row["splits"], row["complete"], row["log_likelihood"]) == (3, False, -3)
    assert row["log_likelihood_se"] == pytest.approx(math.sqrt(7 / 3))
    assert (row["log_likelihood_median"], row["log_likelihood_worst"]) == (-2, -6)


def test_only_report_splits_count() -> None:
    records = [record(split, -1.0 if split in range(5, 10) else 99.0) for split in range(20)]
    row = only_row(summarise(pd.DataFrame(records)))
    assert (row["splits"], row["complete"], row["log_likelihood"]) == (5, True, -1)
    records = [record(split, 0.0, dataset="kin40k") for split in range(10)]
    assert only_row(summarise(pd.DataFrame(records)))["splits"] == 2


def test_the_last_record_of_a_split_counts() -> None:
    frame = pd.DataFrame([record(5, -9.0), record(6, -1.0), record(5, -3.0)])
    assert list(counted(frame)["log_likelihood"]) == [-3, -1]


@pytest.mark.parametrize("broken", [record(6, None), {**record(6, 0.0), "log_likelihood": None, "error": "E: x"}])
def test_a_score_that_is_missing_is_not_left_out_in_silence(broken: Record) -> None:
    records = [record(5, -1.0, "catboost"), broken | {"method": "catboost"}, *several([-2.0] * 5, "ngboost")]
    lines = section(records, "Log-likelihood, mean")
    assert lines == [["", "catboost", "ngboost"], ["boston [5]", "not finite [2]", "**-2.00** ± 0.00"]]


def test_scores_that_a_method_cannot_give_are_dashes() -> None:
    quantiles = [made | {"log_likelihood": None} for made in several([0.0] * 5, "realmlp", rmse=1.0)]
    points = [made | {"log_likelihood": None, "crps": None} for made in several([0.0] * 5, "xgboost-point", rmse=3.0)]
    records = several([-1.0] * 5) + quantiles + points
    assert section(records, "Log-likelihood, mean")[0] == ["", "MP-GELU"]
    assert section(records, "CRPS, mean")[0] == ["", "MP-GELU", "RealMLP"]
    assert section(records, "RMSE, mean")[1] == ["boston [5]", "2.00 ± 0", "**1.00** ± 0", "3.00 ± 0"]
    ranked = {line[0]: line[1:] for line in section(records, "Ranks")[1:]}
    assert ranked["xgboost, mean only"][:4] == [DASH] * 4
    assert ranked["RealMLP"][4:8] == ["1.0 [1]", "1", "1", "0%"]
    assert ranked["RealMLP"][8:] == [DASH] * 4


def test_failures_are_listed() -> None:
    failed = {"method": "ngboost", "dataset": "wine", "split": 6, "error": "LinAlgError: singular"}
    text = page(pd.DataFrame([record(5, -1.0), failed]))
    assert text.endswith("## Failed\n\n- ngboost, wine split 6: LinAlgError: singular\n")


def test_wine_is_scored_on_new_rows_and_all_rows_stand_apart() -> None:
    new = {
        f"{name}_new": value for name, value in record(0, -4.0).items() if name in ("crps", "rmse", "log_likelihood")
    }
    records = [record(5, -1.0, dataset="wine", repeats=40, **new), record(6, -2.0, dataset="wine")]
    summary = summarise(pd.DataFrame(records))
    assert only_row(summary, dataset="wine")["log_likelihood"] == -3  # no row of split 6 is a repetition
    assert only_row(summary, dataset="wine, all rows")["log_likelihood"] == -1.5
    assert section(records, "Log-likelihood, worst")[1] == ["wine, new rows [5]", "-4.00 [2]"]
    text = page(pd.DataFrame(records)).partition("## Log-likelihood, mean ± standard error, all rows")[2]
    assert markdown_cells(text)[1] == ["wine, all rows [5]", "-1.50 ± 0.50 [2]"]


def test_the_best_of_those_with_all_splits_is_bold() -> None:
    records = [
        *several([-2.0] * 5, "catboost", rmse=1.5, coverage90=0.95, fit_cpu_seconds=0.00123),
        *several([-3.0] * 5, "laplace", rmse=1.25, coverage90=0.88, fit_cpu_seconds=1234.5),
        *several([-1.0], "ngboost", rmse=0.1, coverage90=0.9),
    ]
    assert section(records, "Log-likelihood, median") == [
        ["", "catboost", "laplace-torch, all/kron", "ngboost"],
        ["boston [5]", "**-2.00**", "-3.00", "-1.00 [1]"],
    ]
    assert section(records, "RMSE")[1][1:] == ["1.50 ± 0", "**1.25** ± 0", "0.100 [1]"]
    assert section(records, "Coverage")[1][1:] == ["95.0%", "**88.0%**", "90.0% [1]"]
    assert section(records, "Fit")[1][1:3] == ["**0.00123**", "1234"]
    assert "**" not in str(section(records, "Mean width"))


def test_data_sets_are_lines_by_suite_and_size_and_gaps_are_dashes() -> None:
    records = [record(5, -1.0, "catboost", dataset=name) for name in ("protein", "autos", "yacht", "boston")]
    lines = section([*records, record(5, -2.0, "ngboost")], "Log-likelihood, worst")
    assert [line[0] for line in lines] == ["", "yacht [5]", "boston [5]", "autos [5]"]
    assert lines[1] == ["yacht [5]", "-1.00 [1]", DASH]


def test_parts_of_ours_have_tables_of_their_own() -> None:
    records = several([-1.0] * 5) + several([-0.5] * 5, "mpgelu-one-kind") + several([-2.0] * 5, "catboost")
    assert section(records, "CRPS, mean ± standard error\n")[0] == ["", "MP-GELU", "catboost"]
    parts = section(records, "CRPS, mean ± standard error: what each")[0]
    assert parts == ["", "MP-GELU", "MP-GELU, networks of one kind"]
    assert [line[0] for line in section(records, "Ranks")] == ["", "MP-GELU", "catboost"]


def test_parts_of_ours_alone_make_a_page(tmp_path: Path) -> None:
    kept = Store(tmp_path / "records.jsonl")
    for made in several([-0.5] * 5, "mpgelu-one-kind"):
        kept.append(made)
    write_report(kept.path, tmp_path / "out")
    found = (tmp_path / "out" / "compare.md").read_text()
    assert "what each part of ours buys" in found
    assert "Log-likelihood of the exact mixture" not in found


def test_the_mixture_of_the_ensemble_is_shown_beside_its_gaussian() -> None:
    records = [record(5, -2.6, "deep-ensemble"), record(5, -2.0, "mc-dropout")]
    assert section(records, "Log-likelihood of the exact mixture")[0] == ["", "deep ensemble of 5"]


def test_places_of_the_figure_are_ratios_to_the_best_of_each_set() -> None:
    records = [
        *several([0.0] * 5, crps=1.0, fit_cpu_seconds=4.0),
        *several([0.0] * 5, crps=2.0, fit_cpu_seconds=9.0, dataset="yacht"),
        *several([0.0] * 5, "catboost", crps=4.0, fit_cpu_seconds=1.0),
        *several([0.0] * 5, "catboost", crps=1.0, fit_cpu_seconds=1.0, dataset="yacht"),
        *several([0.0] * 5, "catboost", dataset="kin8nm"),
    ]
    found = places(pd.DataFrame(records), "crps", (0, 2000)).set_index("method")
    assert found.loc["mpgelu"].to_dict() == pytest.approx({"ratio": math.sqrt(2), "seconds": 6.0, "sets": 2})
    assert found.loc["catboost", "ratio"] == pytest.approx(2)
    assert list(places(pd.DataFrame(records), "crps", (2000, math.inf))["method"]) == ["catboost"]


def store(folder: Path) -> Path:
    kept = Store(folder / "records.jsonl")
    ours = several([-1.0, -2.0, -1.0, -2.0, -1.0], crps=0.5)
    for made in (
        ours + several([-2.0, -2.5, -2.0, -3.0, -2.0], "catboost") + several([-2.0], "catboost", dataset="wine")
    ):
        kept.append(made)
    return kept.path


def test_files(tmp_path: Path) -> None:
    path = store(tmp_path)
    write_report(path, tmp_path / "out")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"compare.csv", "compare.md", "compare.png"}
    assert written["compare.png"].startswith(b"\x89PNG")
    assert pd.read_csv(tmp_path / "out" / "compare.csv")["log_likelihood"].iloc[0] == -1.4
    write_report(path, tmp_path / "again")
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


def between_marks(page: Path) -> str:
    return page.read_text().partition("<!-- compare:start -->\n")[2].partition("<!-- compare:end -->")[0]


def test_the_readme_sums_up_our_settings(tmp_path: Path) -> None:
    readme, kept = tmp_path / "README.md", Store(tmp_path / "records.jsonl")
    scores = [-1.0, -2.0, -1.0, -2.0, -1.0]  # mean -1.4
    for dataset, crps in (("boston", 0.5), ("yacht", 1.2), ("energy", 0.9)):  # the peer's is 1
        for made in several(scores, dataset=dataset, crps=crps) + several([-1.5] * 5, "catboost", dataset=dataset):
            kept.append(made)
    for made in several(scores, "mpgelu-compact", dataset="concrete", crps=0.1):  # no peer: not counted
        kept.append(made)
    for dataset, shift in (("boston", 1.0), ("yacht", -1.0), ("energy", 0.5)):  # nearly the same on every split
        for made in several(
            [-1.5 + shift + error for error in (0.0, 0.1, 0.0, 0.1, 0.0)], "mpgelu-fast", dataset=dataset
        ):
            kept.append(made)
    readme.write_text("before\n<!-- compare:start -->\nold\n<!-- compare:end -->\nafter\n")
    update_readme(kept.path, readme)
    head, ensemble, fast = markdown_cells(between_marks(readme))
    assert head == ["", "CRPS", "RMSE", "log-likelihood"]
    assert ensemble[:2] == ["ensemble", "better on 2 of 3 (0 beyond chance); median -10%; worst +20% (yacht)"]
    assert ensemble[3] == "better on 3 of 3 (0 beyond chance); median +0.10; worst +0.10 (yacht)"
    assert fast[3] == "better on 2 of 3 (2 beyond chance, worse beyond chance on 1); median +0.54; worst -0.96 (yacht)"


def test_the_docs_show_our_settings_and_the_best_peer(tmp_path: Path) -> None:
    readme, path = tmp_path / "page.md", store(tmp_path)
    for made in several([-3.0, -3.0, -3.0, -3.0, -3.0], "mpgelu-compact", crps=0.25):
        Store(path).append(made)
    for made in several([-1.0, -1.0], "mpgelu-fast", crps=0.1):  # too few splits to be shown
        Store(path).append(made)
    parts = "<!-- parts:start -->\n<!-- parts:end -->\n"
    readme.write_text(f"before\n<!-- compare:start -->\nold\n<!-- compare:end -->\nafter\n{parts}")
    update_docs(path, readme)
    crps, rmse, log_likelihood = (markdown_cells(table) for table in between_marks(readme).split("\n\n"))
    assert crps == [
        ["CRPS", "ensemble", "fast", "compact", "best peer (of peers)"],
        ["boston [5]", "0.500", DASH, "**0.250**", "1.00 catboost (1 of 9)"],
    ]
    assert rmse[0][0] == "RMSE"
    assert log_likelihood == [
        ["log-likelihood", "ensemble", "fast", "compact", "best peer (of peers)"],
        ["boston [5]", "**-1.40**", DASH, "-3.00", "-2.30 catboost (1 of 7)"],
    ]
    assert GROUPS["ours"] == ["mpgelu", "mpgelu-fast", "mpgelu-compact"]  # the order of the columns


def test_what_each_part_buys() -> None:
    records = [
        *several([-1.0] * 5, crps=1.0, rmse=2.0),
        *several([-3.0] * 5, dataset="yacht", crps=0.5, rmse=1.0),
        *several([-2.0] * 4, dataset="wine"),  # not all splits
        *several([-1.5] * 5, "mpgelu-plain", crps=2.0, rmse=2.0),
        *several([-2.0] * 5, "mpgelu-plain", dataset="yacht", crps=0.36, rmse=1.21),
        *several([-9.0] * 5, "mpgelu-plain", dataset="wine"),
        *several([math.nan] * 5, "mpgelu-one", rmse=4.0),
        *several([0.0] * 5, "mpgelu-moments", dataset="energy"),  # where the default has not run
        *several([0.0] * 5, "catboost"),
    ]
    assert markdown_cells(parts_table(pd.DataFrame(records))) == [
        ["setting", "sets", "CRPS", "RMSE", "log-likelihood", "default better in CRPS", "worst CRPS"],
        ["MP-GELU, no embedding", "2", "+20.0%", "+10.0%", "+0.25", "1 of 2", "+100.0% (boston)"],
        ["MP-GELU, one network", "1", "+0.0%", "+100.0%", DASH, "0 of 1", "+0.0% (boston)"],
    ]
    assert parts_table(pd.DataFrame(several([-1.0] * 5))) == ""


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no records of report splits in"):
        write_report(tmp_path / "records.jsonl", tmp_path)
    Store(tmp_path / "records.jsonl").append(record(0, -1.0))
    with pytest.raises(DataError, match="no records of report splits in"):
        write_report(tmp_path / "records.jsonl", tmp_path)
    with pytest.raises(DataError, match=r"unknown methods \['magic'\]"):
        counted(pd.DataFrame([record(0, -1.0, "magic")]))
    with pytest.raises(DataError, match=r"unknown datasets \['mnist'\]"):
        counted(pd.DataFrame([record(0, -1.0, dataset="mnist")]))
