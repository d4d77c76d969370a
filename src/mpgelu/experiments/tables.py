"""From records to the paper's four tables, with the paper's numbers beside ours.

    records -> `summarise` -> `compare` -> `markdown_table`, `latex_table`, `overview`
            -> `paired_test`

A *cell* is a data set and a network in one of four settings (outputs 2 or 1, covariance full or diagonal).
Records of seed 0 make the tables. A cell has one dropout rate: if the grid search was extended and chose
anew, the records of the rate appended last count, and of several records of one split the last. A metric
that is not finite on one split makes the cell's mean not finite: no split is left out in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from mpgelu.errors import DataError, InputError
from mpgelu.experiments.store import Store

SETTINGS = ((2, "full"), (2, "diagonal"), (1, "full"), (1, "diagonal"))
RATES = (0.005, 0.01, 0.05, 0.1)
PAPER_SPLITS = 20
TEST_TO_TRAIN = 1 / 9

_SETTING = ["outputs", "covariance", "dataset"]
_CELL = [*_SETTING, "nonlinearity"]
_NETWORKS = {"mpgelu": "MP-GELU", "relu": "ReLU"}
_COMPARED = ("nll", "rmse")
_EXTRA = ("nll_mixture", "nll_gaussian", "crps")
_RUNTIMES = ("runtime_s", "runtime_factored_s")
_VALIDATION = {rate: f"validation_nll_{rate}" for rate in RATES}
_NEEDED = ["kind", *_CELL, "seed", "split", "rate", "nll"]
_NUMBERS = ["rate", *_COMPARED, *_EXTRA, "coverage90", *_RUNTIMES, "seconds"]
_OURS = [
    *("splits", "rate", "rate_from", *_VALIDATION.values()),
    *(name for metric in _EXTRA for name in (metric, f"{metric}_se")),
    *("coverage90", "runtime_factored_s", "seconds"),
]
_PAPER_SE_FLOOR = 0.0005
_LIMIT = 2.0
_LEVEL = 0.05
_MISSING = "\N{EN DASH}"


def paper_table() -> pd.DataFrame:
    """The paper's numbers, one row per cell in the paper's order; a misprinted runtime is corrected."""
    with (files("mpgelu.experiments") / "paper_tables.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


# Summaries


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Average the records of seed 0 over splits.

    The standard error is the sample standard deviation over splits (divisor splits - 1) over sqrt(splits),
    NaN for a single split. Runtimes are averaged over the splits that have one. Data sets that are not in
    the paper are left out.

    Args:
        frame: Records of kind "test" and "validation", as from `Store.frame`.

    Returns:
        One row per cell that has test records, in the paper's order: the paper's columns, then `splits`,
        `rate`, `rate_from`, the mean validation NLL of each rate, the extra metrics and the sum of
        `seconds`.
    """
    tests = _by_cell(_counted(frame, "test", seed=0))
    searches = _by_cell(_counted(frame, "validation", seed=0))
    paper = paper_table()
    rows = [
        {**known, **_averages(tests[cell]), **_search(searches.get(cell))}
        for known in paper[["label", "n", "q", *_CELL]].to_dict("records")
        if (cell := tuple(known[field] for field in _CELL)) in tests
    ]
    return pd.DataFrame(rows, columns=[*paper.columns, *_OURS])


def _counted(frame: pd.DataFrame, kind: str, seed: int | None = None) -> pd.DataFrame:
    """The records that count, sorted so that no sum depends on the order of appending."""
    if missing := [field for field in _NEEDED if field not in frame and len(frame)]:
        raise InputError(f"tables: the records lack {missing}; they have {list(frame.columns)}")
    rows = frame.reindex(columns=list(dict.fromkeys([*_NEEDED, "rate_from", *_NUMBERS])))
    rows = rows[(rows["kind"] == kind) & (True if seed is None else rows["seed"] == seed)]
    rows = rows.astype(dict.fromkeys(_NUMBERS, float))
    if kind == "test":
        rows = rows[rows["rate"] == rows.groupby([*_CELL, "seed"])["rate"].transform("last")]
    order = [*_CELL, "seed", "split", "rate"]
    return rows.drop_duplicates(order, keep="last").sort_values(order, ignore_index=True)


def _by_cell(rows: pd.DataFrame) -> dict[Any, pd.DataFrame]:
    return dict(iter(rows.groupby(_CELL)))


def _averages(rows: pd.DataFrame) -> dict[str, Any]:
    last = rows.iloc[-1]
    summary = {"splits": len(rows), "rate": last["rate"], "rate_from": last["rate_from"]}
    for metric in (*_COMPARED, *_EXTRA):
        summary[metric] = rows[metric].mean(skipna=False)
        summary[f"{metric}_se"] = rows[metric].std(skipna=False) / math.sqrt(len(rows))
    summary["coverage90"] = rows["coverage90"].mean(skipna=False)
    summary["seconds"] = rows["seconds"].sum()
    return summary | {name: rows[name].mean() for name in _RUNTIMES}


def _search(rows: pd.DataFrame | None) -> dict[str, float]:
    """Mean validation NLL of each rate; NaN for a rate that was not tried."""
    if rows is None:
        return {}
    return {name: rows.loc[rows["rate"] == rate, "nll"].mean(skipna=False) for rate, name in _VALIDATION.items()}


def compare(summary: pd.DataFrame) -> pd.DataFrame:
    """Set our numbers beside the paper's.

    For NLL and RMSE: `difference` = ours - paper, `combined_se` = sqrt(se^2 + se_paper^2),
    `z` = difference / combined_se, and `agrees` = |z| <= 2. The paper prints standard errors to three
    decimals; its 0.0 stands for anything below 0.0005 and counts as 0.0005 here. `agrees` is missing where
    we have fewer than two splits, hence no standard error, and false where our metric is not finite.

    Args:
        summary: From `summarise`.

    Returns:
        One row per cell of the paper, in its order, `splits` 0 where we have nothing. The paper's columns
        end in `_paper`; the new ones are `<metric>_<name>` for `nll` and `rmse` and the four names above.
    """
    ours = summary.drop(columns=["label", "n", "q"]).astype({"outputs": int})
    table = paper_table().merge(ours, on=_CELL, how="left", suffixes=("_paper", ""))
    numbers = [name for name in ours if name not in (*_CELL, "rate_from")]
    table = table.astype(dict.fromkeys(numbers, float))
    table["splits"] = table["splits"].fillna(0).astype(int)
    for metric in _COMPARED:
        se_paper = table[f"{metric}_se_paper"].clip(lower=_PAPER_SE_FLOOR)
        table[f"{metric}_difference"] = table[metric] - table[f"{metric}_paper"]
        table[f"{metric}_combined_se"] = np.hypot(table[f"{metric}_se"], se_paper)
        table[f"{metric}_z"] = table[f"{metric}_difference"] / table[f"{metric}_combined_se"]
        agrees = (table[f"{metric}_z"].abs() <= _LIMIT).astype("boolean")
        table[f"{metric}_agrees"] = agrees.mask(table["splits"] < 2)
    return table


# The paper's layout


def markdown_table(comparison: pd.DataFrame, outputs: int, covariance: str) -> str:
    """One of the paper's tables in Markdown; a cell reads "ours (paper's; difference in standard errors)".

    Args:
        comparison: From `compare`.
        outputs: 2 or 1.
        covariance: "full" or "diagonal".

    Returns:
        A caption and a table with one row per data set, in the paper's order.
    """
    rows = _of_setting(comparison, outputs, covariance)
    groups = ("NLL", "RMSE", "Runtime [s]", "Splits, rate")
    head = [
        "Data set",
        "N",
        "Q",
        *(f"{group} {network}" for group in groups for network in _NETWORKS.values()),
    ]
    return f"{_caption(rows)}\n\n{_markdown(head, [_markdown_cells(pair) for pair in _by_dataset(rows)])}\n"


def _markdown_cells(pair: list[pd.Series]) -> list[str]:
    values = zip(_metrics(pair, _ours), _metrics(pair, _paper), _metrics(pair, _z), strict=True)
    runtimes = zip(_runtimes(pair, "runtime_s"), _runtimes(pair, "runtime_s_paper"), strict=True)
    return [
        *_names(pair),
        *(f"{ours} ({paper}; {z.replace('≠', '**≠**')})" for ours, paper, z in values),
        *(f"{ours} ({paper})" for ours, paper in runtimes),
        *map(_splits_and_rate, pair),
    ]


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex_table(comparison: pd.DataFrame, outputs: int, covariance: str) -> str:
    """One of the paper's tables in LaTeX, for the packages booktabs and multirow.

    Each data set takes three lines: ours, the paper's, and their difference in combined standard errors (z).

    Args:
        comparison: From `compare`.
        outputs: 2 or 1.
        covariance: "full" or "diagonal".

    Returns:
        A `table*` environment with caption and label.
    """
    rows = _of_setting(comparison, outputs, covariance)
    return _LATEX_TABLE % {
        "body": "\n\\addlinespace\n".join(_latex_lines(pair) for pair in _by_dataset(rows)),
        "caption": _escape(_caption(rows)),
        "label": rows["label"].iloc[0],
    }


_LATEX_TABLE = r"""\begin{table*}
\centering
\footnotesize
\setlength{\tabcolsep}{3pt}
\begin{tabular}{lrrlllllllll}
\toprule
 & $N$ & $Q$ & & \multicolumn{2}{c}{Test NLL} & \multicolumn{2}{c}{Test RMSE}
 & \multicolumn{2}{c}{Test runtime [s]} & \multicolumn{2}{c}{Splits, rate} \\
 & & & & MP-GELU & ReLU & MP-GELU & ReLU & MP-GELU & ReLU & MP-GELU & ReLU \\
\midrule
%(body)s
\bottomrule
\end{tabular}
\caption{%(caption)s}
\label{%(label)s}
\end{table*}
"""

_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "≠": r"$\neq$",
    _MISSING: "--",
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_lines(pair: list[pd.Series]) -> str:
    names = [rf"\multirow{{3}}{{*}}{{{_escape(name)}}}" for name in _names(pair)]
    ours = ["ours", *_metrics(pair, _ours), *_runtimes(pair, "runtime_s"), *map(_splits_and_rate, pair)]
    paper = ["paper", *_metrics(pair, _paper), *_runtimes(pair, "runtime_s_paper"), "", ""]
    z = ["z", *_metrics(pair, _z), "", "", "", ""]
    lines = [[*names, *map(_escape, ours)], *(["", "", "", *map(_escape, line)] for line in (paper, z))]
    return "\n".join(" & ".join(line) + r" \\" for line in lines)


def _of_setting(comparison: pd.DataFrame, outputs: int, covariance: str) -> pd.DataFrame:
    """The rows of one table; `source` is a letter for how the rate was chosen."""
    if (outputs, covariance) not in SETTINGS:
        raise InputError(f"tables: ({outputs!r}, {covariance!r}) is not among the settings {list(SETTINGS)}")
    rows = comparison[(comparison["outputs"] == outputs) & (comparison["covariance"] == covariance)]
    letters = {source: chr(ord("a") + i) for i, source in enumerate(sorted(rows["rate_from"].dropna().unique()))}
    return rows.assign(source=rows["rate_from"].map(letters))


def _by_dataset(rows: pd.DataFrame) -> list[list[pd.Series]]:
    """Pairs of rows, MP-GELU and ReLU, in the paper's order."""
    return [_rows(pair) for _, pair in rows.groupby("dataset", sort=False)]


def _names(pair: list[pd.Series]) -> list[str]:
    first = pair[0]
    return [first["dataset"].capitalize(), f"{first['n']:,}", str(first["q"])]


def _metrics(pair: list[pd.Series], show: Callable[[pd.Series, str], str]) -> list[str]:
    """NLL of both networks, then RMSE of both."""
    return [show(row, metric) for metric in _COMPARED for row in pair]


def _ours(row: pd.Series, metric: str) -> str:
    if row["splits"] == 0:
        return _MISSING
    return _plus_minus(row[metric], row[f"{metric}_se"]) if math.isfinite(row[metric]) else "not finite"


def _paper(row: pd.Series, metric: str) -> str:
    return _plus_minus(row[f"{metric}_paper"], row[f"{metric}_se_paper"])


def _plus_minus(value: float, se: float) -> str:
    return f"{value:.3f}" + (f" ± {se:.3f}" if math.isfinite(se) else "")


def _z(row: pd.Series, metric: str) -> str:
    z = row[f"{metric}_z"]
    return _number(z, "+.1f") + (" ≠" if abs(z) > _LIMIT else "")


def _runtimes(pair: list[pd.Series], column: str) -> list[str]:
    return [_number(row[column], ".3g") for row in pair]


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else _MISSING


def _splits_and_rate(row: pd.Series) -> str:
    if row["splits"] == 0:
        return _MISSING
    return f"{row['splits']}, {row['rate']:g}" + (f" ({row['source']})" if pd.notna(row["source"]) else "")


def _caption(rows: pd.DataFrame) -> str:
    """What the table shows, and what it lacks of the paper's protocol."""
    done = rows[rows["splits"] > 0]
    sources = done.dropna(subset="source").drop_duplicates("source").sort_values("source")
    partial = _rows(done[done["splits"] != PAPER_SPLITS])
    broken = _rows(done[done["nll"].isna() | done["rmse"].isna()])
    setting = rows.iloc[0]
    sentences = [
        f"Outputs: {setting['outputs']}; covariance: {setting['covariance']}.",
        "Ours (mean ± standard error over splits), the paper's, and their difference in combined standard "
        f"errors, marked ≠ beyond {_LIMIT:g}.",
        _listing("Rate chosen by", [f"({row['source']}) {row['rate_from']}" for row in _rows(sources)]),
        _listing("The table is incomplete; missing:", [_name(row) for row in _rows(rows[rows["splits"] == 0])]),
        _listing(f"Partial, not {PAPER_SPLITS} splits:", [f"{_name(row)} ({row['splits']})" for row in partial]),
        _listing("Not finite on some split:", [_name(row) for row in broken]),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _listing(heading: str, items: list[str]) -> str:
    return f"{heading} {', '.join(items)}." if items else ""


def _name(row: pd.Series) -> str:
    return f"{row['dataset'].capitalize()} {_NETWORKS[row['nonlinearity']]}"


def _rows(table: pd.DataFrame) -> list[pd.Series]:
    return [row for _, row in table.iterrows()]


# The whole comparison on a page


def overview(comparison: pd.DataFrame) -> str:
    """Say in Markdown how many cells agree, which network wins, how runtimes compare, and what disagrees.

    MP-GELU beats ReLU where its mean is strictly lower. Runtime ratios are medians over data sets and
    outputs. Both are taken over the pairs of cells in which both networks have a finite number.

    Args:
        comparison: From `compare`.

    Returns:
        Four sections with a heading each.
    """
    sections = {
        "Agreement with the paper": _agreement(comparison),
        "MP-GELU against ReLU": _wins(comparison),
        "Runtime ratios": _ratios(comparison),
        "Cells that disagree": _disagreements(comparison),
    }
    return "\n".join(f"## {heading}\n\n{text}\n" for heading, text in sections.items())


def _agreement(comparison: pd.DataFrame) -> str:
    complete = comparison[comparison["splits"] == PAPER_SPLITS]
    missing = int((comparison["splits"] == 0).sum())
    nll, rmse = (list(complete[f"{metric}_agrees"]) for metric in _COMPARED)
    counts = (
        f"Of {len(comparison)} cells {len(complete)} have {PAPER_SPLITS} splits, {missing} have none and "
        f"{len(comparison) - len(complete) - missing} another number. "
        f"Of those with {PAPER_SPLITS}, within {_LIMIT:g} combined standard errors of the paper:"
    )
    body = [["NLL", _share(nll)], ["RMSE", _share(rmse)], ["together", _share(nll + rmse)]]
    return f"{counts}\n\n{_markdown(['', 'agree'], body)}"


def _share(cells: list[bool]) -> str:
    percent = f" ({100 * sum(cells) / len(cells):.1f} %)" if cells else ""
    return f"{sum(cells)} of {len(cells)}{percent}"


def _wins(comparison: pd.DataFrame) -> str:
    body = [
        [
            metric.upper(),
            *(_share(list(pairs["mpgelu"] < pairs["relu"])) for pairs in _both(comparison, metric)),
        ]
        for metric in _COMPARED
    ]
    splits = _pairs(comparison[comparison["splits"] > 0], "splits")
    uneven = int((splits["mpgelu"] != splits["relu"]).sum())
    note = f"In {uneven} of our pairs the two networks have different numbers of splits."
    return f"{_markdown(['MP-GELU lower in', 'ours', 'paper'], body)}\n\n{note}"


def _ratios(comparison: pd.DataFrame) -> str:
    body = []
    for covariance in ("full", "diagonal"):
        pairs = _both(comparison[comparison["covariance"] == covariance], "runtime_s")
        medians = [(pair["relu"] / pair["mpgelu"]).median() for pair in pairs]
        body.append([f"ReLU / MP-GELU, {covariance}", *(_number(median, ".2f") for median in medians)])
    exact = comparison[(comparison["covariance"] == "full") & (comparison["nonlinearity"] == "mpgelu")]
    factored = (exact["runtime_s"] / exact["runtime_factored_s"]).median()
    body.append(["MP-GELU, n x n / factored", _number(factored, ".2f"), _MISSING])
    return _markdown(["median of", "ours", "paper"], body)


def _both(comparison: pd.DataFrame, column: str) -> list[pd.DataFrame]:
    return [_pairs(comparison, column), _pairs(comparison, f"{column}_paper")]


def _pairs(comparison: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column for each network, a row for each data set and setting in which both have a finite number."""
    table = comparison.pivot(index=_SETTING, columns="nonlinearity", values=column)
    return table.reindex(columns=list(_NETWORKS)).dropna()


def _disagreements(comparison: pd.DataFrame) -> str:
    head = ["outputs", "covariance", "cell", "metric", "splits", "ours", "paper", "z"]
    body = [
        [
            *(str(row["outputs"]), row["covariance"], _name(row), metric.upper(), str(row["splits"])),
            *(show(row, metric) for show in (_ours, _paper, _z)),
        ]
        for metric in _COMPARED
        for row in _rows(comparison[~comparison[f"{metric}_agrees"].fillna(True)])
    ]
    return _markdown(head, body) if body else "None."


# The repeat study


def paired_test(frame: pd.DataFrame) -> pd.DataFrame:
    """Test whether MP-GELU and ReLU differ, on the same splits and seeds.

    The difference MP-GELU - ReLU is averaged over seeds in each split, to d_1, ..., d_J with mean d and
    sample variance s^2. Random splits share training data, so that s^2 / J is too small a variance for d.
    The corrected resampled t-test (Nadeau & Bengio, 2003, "Inference for the Generalization Error") takes

        t = d / sqrt((1 / J + n_test / n_train) s^2),    n_test / n_train = 1 / 9,

    with J - 1 degrees of freedom, two-sided. It is approximate: the correction is a rule of thumb. There is
    no t (NaN, and "no difference shown") for one split, without spread, or where a metric is not finite.
    P-values are Holm-corrected over all tests of a metric in the frame; a verdict needs `p_holm` < 0.05.

    Args:
        frame: Records of kind "test", as from `Store.frame`. All seeds count, seed 0 too, wherever
            both networks have a record of the split.

    Returns:
        One row per setting, data set and metric: `splits`, `seeds`, `mean_difference` (negative where
        MP-GELU is better), `corrected_se`, `t`, `p`, `p_holm` and `verdict`.
    """
    tests = _counted(frame, "test")
    mpgelu, relu = (tests[tests["nonlinearity"] == network] for network in _NETWORKS)
    pairs = mpgelu.merge(relu, on=[*_SETTING, "seed", "split"], suffixes=("", "_relu"))
    rows = [
        {**dict(zip(_SETTING, setting, strict=True)), "metric": metric, **_corrected_t(cells, metric)}
        for setting, cells in pairs.groupby(_SETTING)
        for metric in _COMPARED
    ]
    numbers = ["splits", "seeds", "mean_difference", "corrected_se", "t", "p"]
    table = pd.DataFrame(rows, columns=[*_SETTING, "metric", *numbers])
    table["p_holm"] = table.groupby("metric")["p"].transform(_holm)
    table["verdict"] = [_verdict(*row) for row in zip(table["mean_difference"], table["p_holm"], strict=True)]
    return table


def _corrected_t(pairs: pd.DataFrame, metric: str) -> dict[str, float]:
    difference = pairs[metric] - pairs[f"{metric}_relu"]
    by_split = difference.groupby(pairs["split"]).agg(lambda seeds: seeds.mean(skipna=False))
    splits = len(by_split)
    mean = by_split.mean(skipna=False)
    se = math.sqrt(1 / splits + TEST_TO_TRAIN) * by_split.std(skipna=False)
    t = mean / se if se > 0 else math.nan
    return {
        "splits": splits,
        "seeds": pairs["seed"].nunique(),
        "mean_difference": mean,
        "corrected_se": se,
        "t": t,
        "p": 2 * float(stats.t.sf(abs(t), splits - 1)),
    }


def _holm(p: pd.Series) -> pd.Series:
    """Holm's step-down correction; a test without a p-value is not counted."""
    ordered = p.dropna().sort_values()
    steps = ordered * np.arange(len(ordered), 0, -1)
    return steps.cummax().clip(upper=1).reindex(p.index)


def _verdict(mean_difference: float, p: float) -> str:
    if not p < _LEVEL:
        return "no difference shown"
    return "MP-GELU better" if mean_difference < 0 else "ReLU better"


# Files


def write_tables(store_path: str | os.PathLike[str], out_folder: str | os.PathLike[str]) -> None:
    """Write everything this module makes of a store.

    The files are `tables.csv`, `table_1` to `table_4` as `.md` and `.tex` in the paper's order (outputs 2
    full, 2 diagonal, 1 full, 1 diagonal), `summary.md` and `paired.csv`. Each replaces its old version at
    once. The same records give the same bytes.

    Args:
        store_path: A file of records, see `Store`.
        out_folder: Made if it is not there.

    Raises:
        DataError: The store has no records.
    """
    frame = Store(store_path).frame()
    if frame.empty:
        raise DataError(f"write_tables: no records in {store_path}; is this the file the runs were stored in?")
    summary = summarise(frame)
    comparison = compare(summary)
    texts = {
        "tables.csv": _csv(summary),
        "summary.md": overview(comparison),
        "paired.csv": _csv(paired_test(frame)),
    }
    for number, setting in enumerate(SETTINGS, start=1):
        texts[f"table_{number}.md"] = markdown_table(comparison, *setting)
        texts[f"table_{number}.tex"] = latex_table(comparison, *setting)
    for name, text in texts.items():
        _replace(Path(out_folder) / name, text)


def _csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _replace(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
