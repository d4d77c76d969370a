"""The paper's tables, read back cell by cell."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from made_up import (
    DASH,
    around,
    compared,
    final_record,
    markdown_cells,
    runtime_record,
    splits,
    the_papers_numbers,
    validation_record,
)
from mpgelu.errors import InputError
from mpgelu.research.paper.layout import latex_table, markdown_table
from mpgelu.research.paper.tables import SETTINGS


def latex_cells(text: str) -> list[list[str]]:
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].removeprefix(r"\midrule")
    lines = [line for line in body.replace("\\addlinespace\n", "").split("\\\\\n") if line.strip()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)&", line)] for line in lines]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_table_has_a_row_per_data_set(setting: tuple[int, str]) -> None:
    comparison = compared(the_papers_numbers())
    text = markdown_table(comparison, *setting)
    rows = markdown_cells(text)
    assert {len(row) for row in rows} == {11}
    assert [row[0] for row in rows[1:]] == [
        *("Boston", "Concrete", "Energy", "Kin8nm", "Naval", "Power", "Protein", "Wine", "Yacht")
    ]
    assert rows[7][1:3] == ["45,730", "9"]
    assert f"Outputs: {setting[0]}; covariance: {setting[1]}." in text
    assert not any(word in text for word in (DASH, "incomplete", "Partial", "**≠**"))
    lines = latex_cells(latex_table(comparison, *setting))
    assert len(lines) == 27
    assert {len(line) for line in lines} == {12}


def test_a_markdown_cell() -> None:
    records = splits(around(1.304, 0.05)) + splits(around(1.45, 0.05), nonlinearity="relu")
    records.append(runtime_record(0.03, nonlinearity="relu"))
    text = markdown_table(compared(records), 2, "full")
    boston = dict(zip(*markdown_cells(text)[:2], strict=True))
    assert boston["NLL MP-GELU"] == "1.304 ± 0.050 (1.204 ± 0.029; +1.7)"
    assert boston["NLL ReLU"] == "1.450 ± 0.050 (1.250 ± 0.027; +3.5 **≠**)"
    assert boston["RMSE MP-GELU"] == "0.800 ± 0.000 (0.786 ± 0.040; +0.4)"
    assert boston["Runtime [s] ReLU"] == "0.03 (0.021)"
    assert boston["Splits, rate ReLU"] == "2 (0 searched), 0.01 (a)"
    assert "Rate chosen by (a) grid over 20 splits." in text
    assert "Partial, not all published splits: Boston MP-GELU (2), Boston ReLU (2)." in text


def test_missing_single_and_broken_cells_in_markdown() -> None:
    text = markdown_table(compared([final_record(), *splits([1.0, math.nan], nonlinearity="relu")]), 2, "full")
    head, boston, concrete = markdown_cells(text)[:3]
    assert boston[3:5] == [f"1.200 (1.204 ± 0.029; {DASH})", f"not finite (1.250 ± 0.027; {DASH})"]
    assert dict(zip(head, concrete, strict=True))["Splits, rate ReLU"] == DASH
    assert concrete[3] == f"{DASH} (1.118 ± 0.022; {DASH})"
    assert concrete[7] == f"{DASH} (0.017)"
    assert "The table is incomplete; missing: Concrete MP-GELU, Concrete ReLU, Energy" in text
    assert "Not finite on some split: Boston ReLU." in text


def test_how_the_rate_was_chosen_stands_in_the_table() -> None:
    other = final_record(nonlinearity="relu", rate=0.1, rate_from="grid of the diagonal setting")
    text = markdown_table(compared([final_record(), validation_record(), other]), 2, "full")
    assert markdown_cells(text)[1][9:] == ["1, 0.01 (b)", "1 (0 searched), 0.1 (a)"]
    assert "Rate chosen by (a) grid of the diagonal setting, (b) grid over 20 splits." in text


def test_splits_that_took_the_rate_without_a_search_are_told() -> None:
    note = "the others take the rate without a search"
    searched = [validation_record(split=split, rate=rate) for split in range(3) for rate in (0.01, 0.1)]
    whole = splits([1.0] * 3)
    assert note not in markdown_table(compared([*whole, *searched]), 2, "full")
    text = markdown_table(compared([*splits([1.0] * 20), *searched]), 2, "full")
    assert markdown_cells(text)[1][9] == "20 (3 searched), 0.01 (a)"
    assert note in text


def test_protein_has_five_published_splits() -> None:
    text = markdown_table(compared(splits([1.0] * 5, dataset="protein")), 2, "full")
    assert "Fewer than the paper's 20 splits are published for Protein (5)." in text
    assert "Partial" not in text


def test_latex_lines_of_a_data_set() -> None:
    records = splits(around(1.304, 0.05)) + splits(around(1.45, 0.05), nonlinearity="relu")
    ours, paper, z, concrete = latex_cells(latex_table(compared(records), 2, "full"))[:4]
    assert ours[:5] == [
        *(rf"\multirow{{3}}{{*}}{{{name}}}" for name in ("Boston", 506, 13)),
        "ours",
        r"1.304 $\pm$ 0.050",
    ]
    assert paper[:6] == ["", "", "", "paper", r"1.204 $\pm$ 0.029", r"1.250 $\pm$ 0.027"]
    assert z[3:8] == ["z", "+1.7", r"+3.5 $\neq$", "+0.4", "-0.2"]
    assert concrete[4:] == ["--"] * 8


def test_latex_is_balanced_and_escaped() -> None:
    text = latex_table(compared([final_record(rate_from=r"50 % of_x & {y} \ #1 ~ ^ $")]), 2, "full")
    assert r"50 \% of\_x \& \{y\} \textbackslash{} \#1 \textasciitilde{} \textasciicircum{} \$" in text
    bare = re.sub(r"\\[\\%_&{}#$]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert re.findall(r"\\begin{(.*?)}", text) == ["table*", "tabular"]
    assert re.findall(r"\\end{(.*?)}", text) == ["tabular", "table*"]
    assert text.isascii()
    assert r"\label{tab:uci1}" in text


@pytest.mark.parametrize("write", [markdown_table, latex_table])
def test_an_unknown_setting_is_refused(write: Any) -> None:
    with pytest.raises(InputError, match="'factored'"):
        write(compared([final_record()]), 2, "factored")
