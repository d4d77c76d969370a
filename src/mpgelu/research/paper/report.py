"""The whole comparison on a page, and everything that is made of a store, as files."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from mpgelu.errors import DataError
from mpgelu.research.paper.costs import costs
from mpgelu.research.paper.layout import (
    MISSING,
    cell_name,
    latex_table,
    markdown,
    markdown_table,
    rows_of,
    show_number,
    show_ours,
    show_paper,
    show_z,
)
from mpgelu.research.paper.paired import LEVEL, paired_test
from mpgelu.research.paper.tables import COMPARED, LIMIT, NETWORKS, PAPER_SPLITS, SETTING, SETTINGS, compare, summarise
from mpgelu.research.store import Store
from mpgelu.storage.files import write_atomically


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
    nll, rmse = (list(complete[f"{metric}_agrees"]) for metric in COMPARED)
    counts = (
        f"Of {len(comparison)} cells {len(complete)} have {PAPER_SPLITS} splits, {missing} have none and "
        f"{len(comparison) - len(complete) - missing} another number. "
        f"Of those with {PAPER_SPLITS}, within {LIMIT:g} combined standard errors of the paper:"
    )
    body = [["NLL", _share(nll)], ["RMSE", _share(rmse)], ["together", _share(nll + rmse)]]
    return f"{counts}\n\n{markdown(['', 'agree'], body)}"


def _share(cells: list[bool]) -> str:
    percent = f" ({100 * sum(cells) / len(cells):.1f} %)" if cells else ""
    return f"{sum(cells)} of {len(cells)}{percent}"


def _wins(comparison: pd.DataFrame) -> str:
    body = [
        [
            metric.upper(),
            *(_share(list(pairs["mpgelu"] < pairs["relu"])) for pairs in _both(comparison, metric)),
        ]
        for metric in COMPARED
    ]
    splits = _pairs(comparison[comparison["splits"] > 0], "splits")
    uneven = int((splits["mpgelu"] != splits["relu"]).sum())
    note = f"In {uneven} of our pairs the two networks have different numbers of splits."
    return f"{markdown(['MP-GELU lower in', 'ours', 'paper'], body)}\n\n{note}"


def _ratios(comparison: pd.DataFrame) -> str:
    body = []
    for covariance in ("full", "diagonal"):
        pairs = _both(comparison[comparison["covariance"] == covariance], "runtime_s")
        medians = [(pair["relu"] / pair["mpgelu"]).median() for pair in pairs]
        body.append([f"ReLU / MP-GELU, {covariance}", *(show_number(median, ".2f") for median in medians)])
    exact = comparison[(comparison["covariance"] == "full") & (comparison["nonlinearity"] == "mpgelu")]
    factored = (exact["runtime_s"] / exact["runtime_factored_s"]).median()
    body.append(["MP-GELU, n x n / factored", show_number(factored, ".2f"), MISSING])
    return markdown(["median of", "ours", "paper"], body)


def _both(comparison: pd.DataFrame, column: str) -> list[pd.DataFrame]:
    return [_pairs(comparison, column), _pairs(comparison, f"{column}_paper")]


def _pairs(comparison: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column for each network, a row for each data set and setting in which both have a finite number."""
    table = comparison.pivot(index=SETTING, columns="nonlinearity", values=column)
    return table.reindex(columns=list(NETWORKS)).dropna()


def _disagreements(comparison: pd.DataFrame) -> str:
    head = ["outputs", "covariance", "cell", "metric", "splits", "ours", "paper", "z"]
    body = [
        [
            *(str(row["outputs"]), row["covariance"], cell_name(row), metric.upper(), str(row["splits"])),
            *(show(row, metric) for show in (show_ours, show_paper, show_z)),
        ]
        for metric in COMPARED
        for row in rows_of(comparison[~comparison[f"{metric}_agrees"].fillna(True)])
    ]
    return markdown(head, body) if body else "None."


def verdict(paired: pd.DataFrame) -> str:
    """Say in Markdown where MP-GELU or ReLU is shown to be better, and where nothing is shown.

    If some comparisons were repeated with several seeds, only those count: they are the repeat study.

    Args:
        paired: From `paired_test`.

    Returns:
        A section: how often each network is better after Holm's correction, and the table of comparisons.
    """
    repeated = paired[paired["seeds"] >= 2]
    rows = repeated if len(repeated) else paired
    head = ["outputs", "covariance", "data set", "splits", "seeds"]
    head += [f"{metric.upper()} {what}" for metric in COMPARED for what in ("difference", "p", "verdict")]
    body = [_comparison(cells) for _, cells in rows.groupby(SETTING, sort=False)]
    heading = "## Is the difference between MP-GELU and ReLU more than chance?"
    if not body:
        return f"{heading}\n\nNo split was run with both networks.\n"
    which = "Repeated with several seeds" if len(repeated) else "No comparison was repeated with a second seed"
    text = (
        f"{which}: {len(body)} comparison{'s' * (len(body) != 1)} on the same splits and seeds. {_counts(rows)} "
        "Differences are MP-GELU - ReLU (negative: MP-GELU is better) ± standard error, by the corrected resampled "
        "t-test. P-values carry Holm's correction for all tests of a metric in `paired.csv`; a verdict needs "
        f"p < {LEVEL:g}. Where no difference is shown, there may still be one."
    )
    return f"{heading}\n\n{text}\n\n{markdown(head, body)}\n"


def _counts(rows: pd.DataFrame) -> str:
    sentences = []
    for metric in COMPARED:
        verdicts = list(rows.loc[rows["metric"] == metric, "verdict"])
        mpgelu, relu = (verdicts.count(f"{network} better") for network in NETWORKS.values())
        sentences.append(
            f"By {metric.upper()}, MP-GELU is shown better in {mpgelu} of {len(verdicts)}, ReLU in {relu}, "
            f"and no difference in {len(verdicts) - mpgelu - relu}."
        )
    return " ".join(sentences)


def _comparison(cells: pd.DataFrame) -> list[str]:
    """A data set in one setting: both metrics on one line."""
    first = cells.iloc[0]
    line = [str(first["outputs"]), first["covariance"], first["dataset"].capitalize()]
    line += [str(first["splits"]), str(first["seeds"])]
    for row in rows_of(cells):
        difference = f"{show_number(row['mean_difference'], '+.3f')} ± {show_number(row['corrected_se'], '.3f')}"
        line += [difference, show_number(row["p_holm"], ".2g"), row["verdict"]]
    return line


def write_tables(store_path: str | os.PathLike[str], out_folder: str | os.PathLike[str]) -> None:
    """Write every table and the summary of a store.

    The files are `tables.csv`, `table_1` to `table_4` as `.md` and `.tex` in the paper's order (outputs 2
    full, 2 diagonal, 1 full, 1 diagonal), `summary.md` and `paired.csv`. Each replaces its old version at
    once. The same records give the same bytes.

    Args:
        store_path: A file of records, see `Store`.
        out_folder: Made if it is not there.

    Raises:
        DataError: The store has no records, or a file cannot be written.
    """
    frame = Store(store_path).frame()
    if frame.empty:
        raise DataError(f"write_tables: no records in {store_path}; is this the file the runs were stored in?")
    summary = summarise(frame)
    comparison = compare(summary)
    paired = paired_test(frame)
    texts = {
        "tables.csv": _csv(summary),
        "summary.md": f"{overview(comparison)}\n{verdict(paired)}\n{costs(frame)}",
        "paired.csv": _csv(paired),
    }
    for number, setting in enumerate(SETTINGS, start=1):
        texts[f"table_{number}.md"] = markdown_table(comparison, *setting)
        texts[f"table_{number}.tex"] = latex_table(comparison, *setting)
    for name, text in texts.items():
        write_atomically(Path(out_folder) / name, text)


def _csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
