"""The paper's four tables in Markdown and LaTeX, with its numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd

from mpgelu.errors import InputError
from mpgelu.research.paper.tables import COMPARED, LIMIT, NETWORKS, PAPER_SPLITS, SETTINGS

MISSING = "\N{EN DASH}"


def markdown_table(comparison: pd.DataFrame, outputs: int, covariance: str) -> str:
    """One of the paper's tables in Markdown; a cell reads "ours (paper's; difference in standard errors)".

    Args:
        comparison: The result of `compare`.
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
        *(f"{group} {network}" for group in groups for network in NETWORKS.values()),
    ]
    return f"{_caption(rows)}\n\n{markdown(head, [_markdown_cells(pair) for pair in _by_dataset(rows)])}\n"


def _markdown_cells(pair: list[pd.Series]) -> list[str]:
    values = zip(_metrics(pair, show_ours), _metrics(pair, show_paper), _metrics(pair, show_z), strict=True)
    runtimes = zip(_runtimes(pair, "runtime_s"), _runtimes(pair, "runtime_s_paper"), strict=True)
    return [
        *_names(pair),
        *(f"{ours} ({paper}; {z.replace('≠', '**≠**')})" for ours, paper, z in values),
        *(f"{ours} ({paper})" for ours, paper in runtimes),
        *map(_splits_and_rate, pair),
    ]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex_table(comparison: pd.DataFrame, outputs: int, covariance: str) -> str:
    """One of the paper's tables in LaTeX, for the packages booktabs and multirow.

    Each data set takes three lines: ours, the paper's, and their difference in combined standard errors (z).

    Args:
        comparison: The result of `compare`.
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
    MISSING: "--",
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_lines(pair: list[pd.Series]) -> str:
    names = [rf"\multirow{{3}}{{*}}{{{_escape(name)}}}" for name in _names(pair)]
    ours = ["ours", *_metrics(pair, show_ours), *_runtimes(pair, "runtime_s"), *map(_splits_and_rate, pair)]
    paper = ["paper", *_metrics(pair, show_paper), *_runtimes(pair, "runtime_s_paper"), "", ""]
    z = ["z", *_metrics(pair, show_z), "", "", "", ""]
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
    return [rows_of(pair) for _, pair in rows.groupby("dataset", sort=False)]


def _names(pair: list[pd.Series]) -> list[str]:
    first = pair[0]
    return [first["dataset"].capitalize(), f"{first['n']:,}", str(first["q"])]


def _metrics(pair: list[pd.Series], show: Callable[[pd.Series, str], str]) -> list[str]:
    """NLL of both networks, then RMSE of both."""
    return [show(row, metric) for metric in COMPARED for row in pair]


def show_ours(row: pd.Series, metric: str) -> str:
    """Our mean and standard error of a metric, or why there is none."""
    if row["splits"] == 0:
        return MISSING
    return _plus_minus(row[metric], row[f"{metric}_se"]) if math.isfinite(row[metric]) else "not finite"


def show_paper(row: pd.Series, metric: str) -> str:
    """The paper's mean and standard error of a metric."""
    return _plus_minus(row[f"{metric}_paper"], row[f"{metric}_se_paper"])


def _plus_minus(value: float, se: float) -> str:
    return f"{value:.3f}" + (f" ± {se:.3f}" if math.isfinite(se) else "")


def show_z(row: pd.Series, metric: str) -> str:
    """The difference in combined standard errors, marked where it is beyond the limit."""
    z = row[f"{metric}_z"]
    return show_number(z, "+.1f") + (" ≠" if abs(z) > LIMIT else "")


def _runtimes(pair: list[pd.Series], column: str) -> list[str]:
    return [show_number(row[column], ".3g") for row in pair]


def show_number(value: float, form: str) -> str:
    """A number in the given format, or a dash if it is not finite."""
    return f"{value:{form}}" if math.isfinite(value) else MISSING


def _splits_and_rate(row: pd.Series) -> str:
    if row["splits"] == 0:
        return MISSING
    searched = f" ({row['searched']} searched)" if row["searched"] < row["splits"] else ""
    return f"{row['splits']}{searched}, {row['rate']:g}" + (f" ({row['source']})" if pd.notna(row["source"]) else "")


def _caption(rows: pd.DataFrame) -> str:
    """Return a caption of the table that states in which respects its runs are less than the protocol of the paper."""
    done = rows[rows["splits"] > 0]
    sources = done.dropna(subset="source").drop_duplicates("source").sort_values("source")
    partial = rows_of(done[done["splits"] < done["published"]])
    fewer = rows[(rows["published"] < PAPER_SPLITS) & (rows["splits"] > 0)].drop_duplicates("dataset")
    broken = rows_of(done[done["nll"].isna() | done["rmse"].isna()])
    setting = rows.iloc[0]
    sentences = [
        f"Outputs: {setting['outputs']}; covariance: {setting['covariance']}.",
        "Ours (mean ± standard error over splits), the paper's, and their difference in combined standard "
        f"errors, marked ≠ beyond {LIMIT:g}.",
        _listing("Rate chosen by", [f"({row['source']}) {row['rate_from']}" for row in rows_of(sources)]),
        _NOT_SEARCHED if (done["searched"] < done["splits"]).any() else "",
        _listing("The table is incomplete; missing:", [cell_name(row) for row in rows_of(rows[rows["splits"] == 0])]),
        _listing("Partial, not all published splits:", [f"{cell_name(row)} ({row['splits']})" for row in partial]),
        _listing(
            f"Fewer than the paper's {PAPER_SPLITS} splits are published for",
            [f"{row['dataset'].capitalize()} ({row['published']})" for row in rows_of(fewer)],
        ),
        _listing("Not finite on some split:", [cell_name(row) for row in broken]),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


_NOT_SEARCHED = (
    '"n searched": the search for the rate was run on n of the splits; the others take the rate without a search of '
    "their own."
)


def _listing(heading: str, items: list[str]) -> str:
    return f"{heading} {', '.join(items)}." if items else ""


def cell_name(row: pd.Series) -> str:
    """Data set and network of a row, for people."""
    return f"{row['dataset'].capitalize()} {NETWORKS[row['nonlinearity']]}"


def rows_of(table: pd.DataFrame) -> list[pd.Series]:
    """The rows of a table, each with its column names."""
    return [row for _, row in table.iterrows()]
