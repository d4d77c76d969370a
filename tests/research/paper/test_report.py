"""The page of results, the verdict, and the files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pytest

from made_up import (
    DASH,
    Record,
    around,
    compared,
    final_record,
    markdown_cells,
    only_row,
    pairs,
    runtime_record,
    splits,
    the_papers_numbers,
    twenty,
    validation_record,
)
from mpgelu.errors import DataError
from mpgelu.research.paper.paired import paired_test
from mpgelu.research.paper.report import overview, verdict, write_tables
from mpgelu.research.paper.tables import SETTINGS, paper_table
from mpgelu.research.store import Store


def test_overview_counts_cells_with_twenty_splits() -> None:
    agreeing = twenty(1.2, rmse=0.8)
    nll_off = twenty(1.5, rmse=0.8, nonlinearity="relu")
    partial = splits(around(9.0, 0.1), dataset="wine", rmse=0.848)
    text = overview(compared(agreeing + nll_off + partial))
    assert "Of 72 cells 2 have 20 splits, 69 have none and 1 another number." in text
    agreement = markdown_cells(text.split("##")[1])
    assert agreement[1:] == [
        ["NLL", "1 of 2 (50.0 %)"],
        ["RMSE", "2 of 2 (100.0 %)"],
        ["together", "3 of 4 (75.0 %)"],
    ]
    disagreeing = markdown_cells(text.split("##")[4])[1:]
    assert [row[2:5] for row in disagreeing] == [["Boston ReLU", "NLL", "20"], ["Wine MP-GELU", "NLL", "2"]]
    assert disagreeing[0] == [*("2", "full", "Boston ReLU", "NLL", "20", "1.500 ± 0.000", "1.250 ± 0.027", "+9.3 ≠")]


def test_overview_of_the_papers_own_numbers() -> None:
    paper = paper_table()
    comparison = compared(the_papers_numbers())
    text = overview(comparison)
    agreement, wins, ratios, disagreeing = text.split("## ")[1:]
    assert "| together | 144 of 144 (100.0 %) |" in agreement
    mpgelu, relu = (paper[paper["nonlinearity"] == name].reset_index() for name in ("mpgelu", "relu"))
    for metric in ("nll", "rmse"):
        lower = (mpgelu[metric] < relu[metric]).sum()
        assert re.search(rf"\| {metric.upper()} \| {lower} of 36 \(.*?\) \| {lower} of 36 ", wins)
    full = (relu["runtime_s"] / mpgelu["runtime_s"])[mpgelu["covariance"] == "full"].median()
    assert f"| ReLU / MP-GELU, full | {full:.2f} | {full:.2f} |" in ratios
    assert "None." in disagreeing


def test_overview_compares_the_networks_and_their_runtimes() -> None:
    records = []
    for dataset, nll, seconds, count in (("boston", 1, 0.06, 2), ("wine", 2, 0.02, 2), ("yacht", 1, 0.04, 3)):
        shared: Record = {"dataset": dataset, "rmse": 0.5}
        records += splits([1.5] * 2, **shared) + splits([nll] * count, nonlinearity="relu", **shared)
        records.append(runtime_record(0.01, runtime_factored_s=0.005, dataset=dataset))
        records.append(runtime_record(seconds, nonlinearity="relu", dataset=dataset))
    records += splits([1.5] * 2, dataset="energy")
    records.append(runtime_record(0.01, runtime_factored_s=0.001, dataset="energy"))
    text = overview(compared(records))
    assert "| NLL | 1 of 3 (33.3 %) | 35 of 36" in text
    assert "| RMSE | 0 of 3 (0.0 %) |" in text
    assert "In 1 of our pairs the two networks have different numbers of splits." in text
    assert "| ReLU / MP-GELU, full | 4.00 |" in text
    assert f"| ReLU / MP-GELU, diagonal | {DASH} |" in text
    assert f"| MP-GELU, n x n / factored | 2.00 | {DASH} |" in text


def test_overview_of_nothing() -> None:
    assert "0 of 0" in overview(compared([final_record(dataset="diabetes")]))


# verdict

SMALL, LARGE = [1.0, 1.01, 0.99], [1.0, 2.0, -2.0]


def test_the_verdict_counts_who_is_shown_better() -> None:
    records = pairs([-value for value in SMALL]) + pairs(SMALL, dataset="wine", outputs=1)
    records += pairs(LARGE, dataset="yacht", covariance="diagonal")
    table = paired_test(pd.DataFrame(records))
    text = verdict(table)
    assert "No comparison was repeated with a second seed: 3 comparisons" in text
    assert "By NLL, MP-GELU is shown better in 1 of 3, ReLU in 1, and no difference in 1." in text
    assert "By RMSE, MP-GELU is shown better in 0 of 3, ReLU in 0, and no difference in 3." in text
    lines = {cells[2]: cells for cells in markdown_cells(text)}
    assert lines["Wine"][:5] == ["1", "full", "Wine", "3", "1"]
    wine = only_row(table, dataset="wine", metric="nll")
    assert lines["Wine"][5:8] == ["+1.000 ± 0.007", f"{wine['p_holm']:.2g}", "ReLU better"]
    assert lines["Boston"][7] == "MP-GELU better"
    assert lines["Boston"][8:] == ["+0.000 ± 0.000", DASH, "no difference shown"]
    assert lines["Yacht"][7] == "no difference shown"


def test_repeated_comparisons_alone_count_where_there_are_some() -> None:
    records = pairs([-value for value in SMALL]) + pairs(SMALL, dataset="wine") + pairs(SMALL, dataset="wine", seed=1)
    text = verdict(paired_test(pd.DataFrame(records)))
    assert "Repeated with several seeds: 1 comparison on" in text
    assert "By NLL, MP-GELU is shown better in 0 of 1, ReLU in 1, and no difference in 0." in text
    assert [cells[2] for cells in markdown_cells(text)[1:]] == ["Wine"]
    assert markdown_cells(text)[1][4] == "2"


def test_no_verdict_without_pairs() -> None:
    assert "No split was run with both networks." in verdict(paired_test(pd.DataFrame([final_record()])))


# write_tables


def stored(path: Path, records: Iterable[Record]) -> Path:
    store = Store(path)
    for record in records:
        store.append(record)
    return path


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_write_tables(tmp_path: Path) -> None:
    records = [*pairs([-0.1, -0.2, -0.3]), *pairs([0.1], outputs=1), validation_record()]
    write_tables(stored(tmp_path / "a.jsonl", records), tmp_path / "out" / "uci")
    files = written(tmp_path / "out" / "uci")
    numbered = [f"table_{number}.{end}" for number in (1, 2, 3, 4) for end in ("md", "tex")]
    assert sorted(files) == sorted(["paired.csv", "summary.md", "tables.csv", *numbered])
    for number, (outputs, covariance) in enumerate(SETTINGS, start=1):
        for end in ("md", "tex"):
            assert f"Outputs: {outputs}; covariance: {covariance}." in files[f"table_{number}.{end}"].decode()
    tables = pd.read_csv(tmp_path / "out" / "uci" / "tables.csv")
    assert tables["nll"].tolist() == [4.8, 5.0, 5.1, 5.0]
    assert tables["validation_nll_0.01"].tolist()[0] == 1.2
    assert len(pd.read_csv(tmp_path / "out" / "uci" / "paired.csv")) == 4
    headings = [line for line in files["summary.md"].decode().splitlines() if line.startswith("## ")]
    assert headings[0] == "## Agreement with the paper"
    assert headings[-2] == "## Is the difference between MP-GELU and ReLU more than chance?"
    assert headings[-1] == "## What it costs"
    assert len(headings) == 6


def test_the_order_of_records_does_not_matter(tmp_path: Path) -> None:
    records = pairs([0.1, 0.7, 3.3]) + pairs([0.3, 0.2], outputs=1, seed=1)
    records += splits([1.0, 1e16, -1e16], dataset="wine")  # a sum that depends on its order
    for name, ordered in (("a", records), ("b", records[::-1])):
        write_tables(stored(tmp_path / f"{name}.jsonl", ordered), tmp_path / name)
    assert written(tmp_path / "a") == written(tmp_path / "b")


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "a.jsonl", [final_record()])
    write_tables(path, tmp_path / "out")
    before = written(tmp_path / "out")
    stored(path, [final_record(split=1, nll=3.0)])

    def fail(self: Path, target: Path) -> Path:
        raise OSError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(DataError, match="stopped"):
            write_tables(path, tmp_path / "out")
    assert written(tmp_path / "out") == before
    write_tables(path, tmp_path / "out")
    assert written(tmp_path / "out") != before


def test_a_store_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no records in .*none\.jsonl"):
        write_tables(tmp_path / "none.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
