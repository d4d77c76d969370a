"""From records to the paper's four tables, with the paper's numbers beside ours.

    records -> `summarise` -> `compare` -> layout, report
            -> `counted` -> paired

A *cell* is a data set and a network in one of four settings (outputs 2 or 1, covariance full or diagonal).
Records of seed 0 make the tables. A cell has one dropout rate: if the grid search was extended and chose
anew, the records of the rate appended last count, and of several records of one split the last. A metric
that is not finite on one split makes the cell's mean not finite: no split is left out in silence. Runtimes
are measured apart from the tests, in records of their own kind, of which the last of a cell counts.
"""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from mpgelu.errors import InputError

SETTINGS = ((2, "full"), (2, "diagonal"), (1, "full"), (1, "diagonal"))
RATES = (0.005, 0.01, 0.05, 0.1)
PAPER_SPLITS = 20
PUBLISHED_SPLITS = {"protein": 5}  # of the published splits, where they are not 20
NETWORKS = {"mpgelu": "MP-GELU", "relu": "ReLU"}
COMPARED = ("nll", "rmse")
SETTING = ["outputs", "covariance", "dataset"]
LIMIT = 2.0  # combined standard errors within which our number agrees with the paper's

_CELL = [*SETTING, "nonlinearity"]
_EXTRA = ("nll_mixture", "nll_gaussian", "crps")
_RUNTIMES = ("runtime_s", "runtime_factored_s")
_VALIDATION = {rate: f"validation_nll_{rate}" for rate in RATES}
_NEEDED = ["kind", *_CELL, "seed", "split", "rate", "nll"]
_NUMBERS = ["rate", *COMPARED, *_EXTRA, "coverage90", *_RUNTIMES, "seconds"]
_OURS = [
    *("splits", "searched", "rate", "rate_from", *_VALIDATION.values()),
    *(name for metric in _EXTRA for name in (metric, f"{metric}_se")),
    *("coverage90", "runtime_factored_s", "seconds"),
]
_PAPER_SE_FLOOR = 0.0005


def paper_table() -> pd.DataFrame:
    """The paper's numbers, one row per cell in the paper's order, with two misprints corrected: see docs/errata.md."""
    with (files("mpgelu.research.paper") / "paper_tables.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Average the records of seed 0 over splits.

    The standard error is the sample standard deviation over splits (divisor splits - 1) over sqrt(splits),
    NaN for a single split. Runtimes are those of the cell's last record of kind "runtime", NaN if it has none.
    Data sets that are not in the paper are left out.

    Args:
        frame: Records of kind "test", "validation" and "runtime", as from `Store.frame`.

    Returns:
        One row per cell that has test records, in the paper's order: the paper's columns, then `splits`,
        `searched` (on how many of these the cell's own search for the rate was run), `rate`, `rate_from` (every
        way in which the rate was chosen), the mean validation NLL of each rate, the extra metrics and the sum
        of `seconds`.
    """
    tests = _by_cell(counted(frame, "test", seed=0))
    searches = _by_cell(counted(frame, "validation", seed=0))
    runtimes = _runtimes(frame)
    paper = paper_table()
    rows = [
        {**known, **_averages(tests[cell]), **_search(searches.get(cell), tests[cell]), **runtimes.get(cell, {})}
        for known in paper[["label", "n", "q", *_CELL]].to_dict("records")
        if (cell := tuple(known[field] for field in _CELL)) in tests
    ]
    return pd.DataFrame(rows, columns=[*paper.columns, *_OURS])


def counted(frame: pd.DataFrame, kind: str, seed: int | None = None) -> pd.DataFrame:
    """The records of a kind that count, sorted so that no sum depends on the order of appending.

    Args:
        frame: Records, as from `Store.frame`.
        kind: "test" or "validation".
        seed: Seed whose records are used; None for all.

    Raises:
        InputError: The records lack a field.
    """
    rows = _of_kind(frame, kind, seed)
    if kind == "test":
        rows = rows[rows["rate"] == rows.groupby([*_CELL, "seed"])["rate"].transform("last")]
    order = [*_CELL, "seed", "split", "rate"]
    return rows.drop_duplicates(order, keep="last").sort_values(order, ignore_index=True)


def _of_kind(frame: pd.DataFrame, kind: str, seed: int | None) -> pd.DataFrame:
    if missing := [field for field in _NEEDED if field not in frame and len(frame)]:
        raise InputError(f"tables: the records lack {missing}; they have {list(frame.columns)}")
    rows = frame.reindex(columns=list(dict.fromkeys([*_NEEDED, "rate_from", *_NUMBERS])))
    rows = rows[(rows["kind"] == kind) & (True if seed is None else rows["seed"] == seed)]
    return rows.astype(dict.fromkeys(_NUMBERS, float))


def _by_cell(rows: pd.DataFrame) -> dict[Any, pd.DataFrame]:
    return dict(iter(rows.groupby(_CELL)))


def _averages(rows: pd.DataFrame) -> dict[str, Any]:
    sources = sorted(rows["rate_from"].dropna().unique())
    summary = {"splits": len(rows), "rate": rows["rate"].iloc[-1], "rate_from": "; ".join(sources) or math.nan}
    for metric in (*COMPARED, *_EXTRA):
        summary[metric] = rows[metric].mean(skipna=False)
        summary[f"{metric}_se"] = rows[metric].std(skipna=False) / math.sqrt(len(rows))
    summary["coverage90"] = rows["coverage90"].mean(skipna=False)
    summary["seconds"] = rows["seconds"].sum()
    return summary


def _search(rows: pd.DataFrame | None, tests: pd.DataFrame) -> dict[str, float]:
    """Number of tested splits that were searched, and the mean validation NLL of each rate, NaN if it was not tried."""
    if rows is None:
        return {"searched": 0}
    searched = int(tests["split"].isin(rows["split"]).sum())
    return {"searched": searched} | {
        name: rows.loc[rows["rate"] == rate, "nll"].mean(skipna=False) for rate, name in _VALIDATION.items()
    }


def _runtimes(frame: pd.DataFrame) -> dict[Any, dict[str, float]]:
    """The last measured runtimes of each cell."""
    rows = _of_kind(frame, "runtime", seed=0).drop_duplicates(_CELL, keep="last")
    return {tuple(row[field] for field in _CELL): {name: row[name] for name in _RUNTIMES} for _, row in rows.iterrows()}


def compare(summary: pd.DataFrame) -> pd.DataFrame:
    """Set our numbers beside the paper's.

    For NLL and RMSE: `difference` = ours - paper, `combined_se` = sqrt(se^2 + se_paper^2),
    `z` = difference / combined_se, and `agrees` = |z| <= 2. The paper prints standard errors to three
    decimals; its 0.0 stands for anything below 0.0005 and counts as 0.0005 here. `agrees` is missing where
    we have fewer than two splits, hence no standard error, and false where our metric is not finite.

    Args:
        summary: The result of `summarise`.

    Returns:
        One row per cell of the paper, in its order, `splits` 0 where we have nothing and `published` the number of
        published splits. The paper's columns end in `_paper`; the new ones are `<metric>_<name>` for `nll` and
        `rmse` and the four names above.
    """
    ours = summary.drop(columns=["label", "n", "q"]).astype({"outputs": int})
    table = paper_table().merge(ours, on=_CELL, how="left", suffixes=("_paper", ""))
    numbers = [name for name in ours if name not in (*_CELL, "rate_from")]
    table = table.astype(dict.fromkeys(numbers, float))
    for name in ("splits", "searched"):
        table[name] = table[name].fillna(0).astype(int)
    table["published"] = table["dataset"].map(PUBLISHED_SPLITS).fillna(PAPER_SPLITS).astype(int)
    for metric in COMPARED:
        se_paper = table[f"{metric}_se_paper"].clip(lower=_PAPER_SE_FLOOR)
        table[f"{metric}_difference"] = table[metric] - table[f"{metric}_paper"]
        table[f"{metric}_combined_se"] = np.hypot(table[f"{metric}_se"], se_paper)
        table[f"{metric}_z"] = table[f"{metric}_difference"] / table[f"{metric}_combined_se"]
        agrees = (table[f"{metric}_z"].abs() <= LIMIT).astype("boolean")
        table[f"{metric}_agrees"] = agrees.mask(table["splits"] < 2)
    return table
