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
from mpgelu.research.paper.agreement import repeats
from mpgelu.research.paper.paired import paired_test
from mpgelu.research.paper.paper_page import FIRST_LAYER, NOT_CHANCE, overview, same_splits, verdict, write_tables
from mpgelu.research.paper.tables import SETTINGS, paper_table
from mpgelu.research.store import Store


def test_overview_counts_cells_with_all_published_splits() -> None:
    agreeing = twenty(1.2, rmse=0.8)
    nll_off = twenty(1.5, rmse=0.8, nonlinearity="relu")
    partial = splits(around(9.0, 0.1), dataset="wine", rmse=0.848)
    protein = splits([1.123] * 5, dataset="protein", rmse=0.789)  # only five are published
    text = overview(compared(agreeing + nll_off + partial + protein))
    assert "Of 72 cells 3 have all published splits, 68 have none and 1 some." in text
    agreement = markdown_cells(text.split("##")[1])
    assert agreement[1:] == [
        ["NLL", "2 of 3 (66.7 %)"],
        ["RMSE", "3 of 3 (100.0 %)"],
        ["together", "5 of 6 (83.3 %)"],
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
    text = verdict(table, NOT_CHANCE)
    assert text.startswith("## Is the difference between MP-GELU and ReLU more than chance?")
    assert "part of the published splits" not in text  # none is complete, so all are shown
    assert (
        "Against ReLU with dropout before each dense layer, as in the paper: by NLL MP-GELU is shown better in 1 of 3, "
        "the other in 1, no difference in 1; median difference +0.3333; by RMSE MP-GELU is shown better in 0 of 3, the "
        "other in 0, no difference in 3; median difference +0.0000." in text
    )
    assert "Against ReLU with dropout on the input alone" not in text
    lines = {cells[2]: cells for cells in markdown_cells(text)}
    assert lines["Wine"][:6] == ["1", "full", "Wine", "ReLU", "3", "1"]
    wine = only_row(table, dataset="wine", metric="nll")
    assert lines["Wine"][6:9] == ["+1.0000 ± 0.0067", f"{wine['p_holm']:.2g}", "ReLU better"]
    assert lines["Boston"][8] == "MP-GELU better"
    assert lines["Boston"][9:] == ["+0.0000 ± 0.0000", DASH, "no difference shown"]
    assert lines["Yacht"][8] == "no difference shown"


def test_comparisons_on_part_of_the_splits_are_left_out_where_there_are_complete_ones() -> None:
    complete = [(-1) ** split * 0.01 - 1 for split in range(20)]
    records = pairs(complete) + pairs(SMALL, dataset="wine") + pairs([1.0, 1.1, 0.9, 1.0, 1.0], dataset="protein")
    text = verdict(paired_test(pd.DataFrame(records)), NOT_CHANCE)
    assert [cells[2] for cells in markdown_cells(text)[1:]] == ["Boston", "Protein"]
    assert "1 comparison on part of the published splits: see `paired.csv`." in text


def test_both_relu_networks_stand_in_one_table_and_gelu_in_another() -> None:
    records = pairs(SMALL) + [record | {"nonlinearity": "relu_input"} for record in pairs(LARGE)[1::2]]
    records += [record | {"nonlinearity": "gelu_hidden"} for record in pairs(LARGE)[1::2]]
    table = paired_test(pd.DataFrame(records))
    text = verdict(table, NOT_CHANCE)
    assert [cells[3] for cells in markdown_cells(text)[1:]] == ["ReLU", "ReLU, input dropout"]
    assert "Against ReLU with dropout on the input alone, as MP-GELU has it: by NLL" in text
    text = verdict(table, FIRST_LAYER)
    assert [cells[3] for cells in markdown_cells(text)[1:]] == ["GELU first"]
    assert "Against GELU as the first nonlinearity and no dropout: by NLL" in text


def test_no_verdict_without_pairs() -> None:
    assert "No split was run with both networks." in verdict(paired_test(pd.DataFrame([final_record()])), NOT_CHANCE)


# same_splits


def test_agreement_on_the_same_splits_lists_what_is_beyond_chance() -> None:
    records = splits([1.004, 1.404]) + splits([1.006, 1.402], seed=1)
    records += splits([1.3, 1.6], nonlinearity="relu") + splits([1.31, 1.61], nonlinearity="relu", seed=1)
    text = same_splits(repeats(pd.DataFrame(records)))
    agree, beyond = (markdown_cells(part) for part in text.split("Beyond it:"))
    assert agree[1:] == [["NLL", "1 of 2 (50.0 %)"], ["RMSE", "0 of 2 (0.0 %)"], ["together", "1 of 4 (25.0 %)"]]
    assert beyond[2][:6] == ["2", "full", "Boston ReLU", "NLL", "2", "1.00"]
    assert beyond[2][6:9] == ["1.455", "1.250", "0.006"]
    assert "correlate by" in text


def test_agreement_on_the_same_splits_needs_a_second_seed() -> None:
    assert "No cell was trained with a second seed" in same_splits(repeats(pd.DataFrame(splits([1.0, 1.2]))))


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
    assert sorted(files) == sorted(["agreement.csv", "paired.csv", "summary.md", "tables.csv", *numbered])
    for number, (outputs, covariance) in enumerate(SETTINGS, start=1):
        for end in ("md", "tex"):
            assert f"Outputs: {outputs}; covariance: {covariance}." in files[f"table_{number}.{end}"].decode()
    tables = pd.read_csv(tmp_path / "out" / "uci" / "tables.csv")
    assert tables["nll"].tolist() == [4.8, 5.0, 5.1, 5.0]
    assert tables["validation_nll_0.01"].tolist()[0] == 1.2
    assert len(pd.read_csv(tmp_path / "out" / "uci" / "paired.csv")) == 4
    headings = [line for line in files["summary.md"].decode().splitlines() if line.startswith("## ")]
    assert headings == [
        *("## Agreement with the paper", "## MP-GELU against ReLU", "## Runtime ratios", "## Cells that disagree"),
        *("## Agreement on the same splits", f"## {NOT_CHANCE}", f"## {FIRST_LAYER}", "## What it costs"),
    ]


def test_records_of_variants_beside_the_others_are_paired(tmp_path: Path) -> None:
    path = stored(tmp_path / "records.jsonl", pairs(SMALL))
    write_tables(path, tmp_path)
    before = pd.read_csv(tmp_path / "tables.csv")
    stored(tmp_path / "relu_input.jsonl", [record | {"nonlinearity": "relu_input"} for record in pairs(LARGE)[1::2]])
    write_tables(path, tmp_path)
    paired = pd.read_csv(tmp_path / "paired.csv")
    assert paired["against"].tolist() == ["relu", "relu", "relu_input", "relu_input"]
    assert only_row(paired, against="relu_input", metric="nll")["rate_against"] == 0.05
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "tables.csv"), before)


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
