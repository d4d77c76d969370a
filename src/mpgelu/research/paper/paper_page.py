"""The whole comparison on a page, and everything that is made of a store, as files."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from mpgelu.errors import DataError
from mpgelu.research.paper.agreement import repeats
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
from mpgelu.research.paper.paired import LEVEL, OTHERS, paired_test
from mpgelu.research.paper.tables import (
    COMPARED,
    LIMIT,
    NETWORKS,
    PAPER_SPLITS,
    PUBLISHED_SPLITS,
    SETTING,
    SETTINGS,
    compare,
    summarise,
)
from mpgelu.research.paper.variants import VARIANTS
from mpgelu.research.store import Store
from mpgelu.storage.files import write_atomically


def overview(comparison: pd.DataFrame) -> str:
    """Say in Markdown how many cells agree, which network wins, how runtimes compare, and what disagrees.

    MP-GELU beats ReLU where its mean is strictly lower. Runtime ratios are medians over data sets and
    outputs. Both are taken over the pairs of cells in which both networks have a finite number.

    Args:
        comparison: The result of `compare`.

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
    complete = comparison[comparison["splits"] >= comparison["published"]]
    missing = int((comparison["splits"] == 0).sum())
    nll, rmse = (list(complete[f"{metric}_agrees"]) for metric in COMPARED)
    counts = (
        f"Of {len(comparison)} cells {len(complete)} have all published splits, {missing} have none and "
        f"{len(comparison) - len(complete) - missing} some. "
        f"Of those with all, within {LIMIT:g} combined standard errors of the paper:"
    )
    body = [["NLL", _share(nll)], ["RMSE", _share(rmse)], ["together", _share(nll + rmse)]]
    return f"{counts}\n\n{markdown(['', 'agree'], body)}"


def same_splits(repeated: pd.DataFrame) -> str:
    """Say in Markdown how lenient combined standard errors are, and what a stricter comparison finds.

    Args:
        repeated: The result of `repeats`.

    Returns:
        A section with the cells that differ from the paper by more than training again on the same splits would.
    """
    heading = "## Agreement on the same splits"
    if not len(repeated):
        return f"{heading}\n\nNo cell was trained with a second seed, so that this cannot be judged.\n"
    ratio, correlation = repeated["combined_se"] / repeated["repeat_se"], repeated["correlation"]
    text = (
        "Combined standard errors treat the paper's splits and ours as independent. They are the same splits, whose "
        "difficulty cancels in the difference, so that the limit above is too wide. Where we have several seeds, the "
        "spread of a split's score over seeds says what training again would change: between two of our own seeds the "
        f"splits' scores correlate by {correlation.median():.2f} in the median ({correlation.min():.2f} to "
        f"{correlation.max():.2f}), and a combined standard error is {ratio.median():.1f} times that of the difference "
        f"between the paper and the mean over our seeds in the median ({ratio.min():.1f} to {ratio.max():.1f} times). "
        f"By the stricter measure, within {LIMIT:g} standard errors:"
    )
    agrees = [list(repeated.loc[repeated["metric"] == metric, "agrees"]) for metric in COMPARED]
    body = [[metric.upper(), _share(cells)] for metric, cells in zip(COMPARED, agrees, strict=True)]
    body.append(["together", _share([cell for cells in agrees for cell in cells])])
    head = ["outputs", "covariance", "cell", "metric", "seeds", "correlation", "ours", "paper", "standard error", "z"]
    beyond = [
        [
            *(str(row["outputs"]), row["covariance"], cell_name(row), row["metric"].upper(), str(row["seeds"])),
            *(f"{row['correlation']:.2f}", f"{row['ours']:.3f}", f"{row['paper']:.3f}", f"{row['repeat_se']:.3f}"),
            f"{row['z']:+.1f}",
        ]
        for row in rows_of(repeated[~repeated["agrees"].astype(bool)])
    ]
    listed = f"Beyond it:\n\n{markdown(head, beyond)}" if beyond else "None is beyond it."
    note = "Ours is the mean over seeds here. `agreement.csv` has all cells."
    return f"{heading}\n\n{text}\n\n{markdown(['', 'agree'], body)}\n\n{listed}\n\n{note}\n"


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


NOT_CHANCE = "Is the difference between MP-GELU and ReLU more than chance?"
FIRST_LAYER = "GELU in the first layer"
_QUESTIONS = {NOT_CHANCE: ("relu", "relu_input"), FIRST_LAYER: ("gelu_input", "gelu_hidden")}
_AGAINST = {
    "relu": "ReLU with dropout before each dense layer, as in the paper",
    "relu_input": "ReLU with dropout on the input alone, as MP-GELU has it",
    "gelu_input": "GELU on the features in place of dropout",
    "gelu_hidden": "GELU as the first nonlinearity and no dropout",
}


def verdict(paired: pd.DataFrame, question: str) -> str:
    """Say in Markdown where MP-GELU or another network is shown to be better, and where nothing is shown.

    Comparisons on fewer than the published splits are left out, unless there are no others.

    Args:
        paired: The result of `paired_test`.
        question: `NOT_CHANCE`, against both ReLU networks, or `FIRST_LAYER`, against both that begin with GELU.

    Returns:
        A section: how often each network is better after Holm's correction, and the table of comparisons.
    """
    asked = paired[paired["against"].isin(_QUESTIONS[question])]
    if not len(asked):
        return f"## {question}\n\nNo split was run with both networks.\n"
    published = asked["dataset"].map(PUBLISHED_SPLITS).fillna(PAPER_SPLITS)
    complete = asked[asked["splits"] >= published]
    rows = complete if len(complete) else asked
    left_out = (len(asked) - len(rows)) // len(COMPARED)
    head = ["outputs", "covariance", "data set", "against", "splits", "seeds"]
    head += [f"{metric.upper()} {what}" for metric in COMPARED for what in ("difference", "p", "verdict")]
    body = [_comparison(cells) for _, cells in rows.groupby([*SETTING, "against"], sort=False)]
    text = (
        "Both networks of a comparison have the same splits, seeds and starting weights. Differences are MP-GELU - "
        "other (negative: MP-GELU is better) ± standard error, by the corrected resampled t-test. P-values carry "
        "Holm's correction for all tests of a metric against the same network in `paired.csv`, which has the "
        f"dropout rates too; a verdict needs p < {LEVEL:g}. Where no difference is shown, there may still be one."
    )
    if left_out:
        text += f" {left_out} comparison{'s' * (left_out > 1)} on part of the published splits: see `paired.csv`."
    counts = [_counts(rows[rows["against"] == other], _AGAINST[other]) for other in _QUESTIONS[question]]
    listed = "\n".join(f"- {line}" for line in counts if line)
    return f"## {question}\n\n{text}\n\n{listed}\n\n{markdown(head, body)}\n"


def _counts(rows: pd.DataFrame, against: str) -> str:
    """Return how often each of the two is significantly better, and the median difference."""
    if not len(rows):
        return ""
    parts = []
    for metric in COMPARED:
        tests = rows[rows["metric"] == metric]
        verdicts = list(tests["verdict"])
        mpgelu, neither = verdicts.count("MP-GELU better"), verdicts.count("no difference shown")
        other = len(verdicts) - mpgelu - neither
        parts.append(
            f"by {metric.upper()} MP-GELU is shown better in {mpgelu} of {len(verdicts)}, the other in {other}, no "
            f"difference in {neither}; median difference {show_number(tests['mean_difference'].median(), '+.4f')}"
        )
    return f"Against {against}: {'; '.join(parts)}."


def _comparison(cells: pd.DataFrame) -> list[str]:
    """A data set in one setting: both metrics on one line."""
    first = cells.iloc[0]
    line = [str(first["outputs"]), first["covariance"], first["dataset"].capitalize(), OTHERS[first["against"]]]
    line += [str(first["splits"]), str(first["seeds"])]
    for row in rows_of(cells):
        difference = f"{show_number(row['mean_difference'], '+.4f')} ± {show_number(row['corrected_se'], '.4f')}"
        line += [difference, show_number(row["p_holm"], ".2g"), row["verdict"]]
    return line


def write_tables(store_path: str | os.PathLike[str], out_folder: str | os.PathLike[str]) -> None:
    """Write every table and the summary of a store.

    The files are `tables.csv`, `table_1` to `table_4` as `.md` and `.tex` in the paper's order (outputs 2
    full, 2 diagonal, 1 full, 1 diagonal), `summary.md`, `paired.csv` and `agreement.csv`. Each replaces its old
    version at once. The same records give the same bytes.

    Args:
        store_path: A file of records, see `Store`. Records of variants (`VARIANTS`) are looked for beside it, in a
            file named after each; they count in the paired tests alone.
        out_folder: Made if it is not there.

    Raises:
        DataError: The store has no records, or a file cannot be written.
    """
    frame = Store(store_path).frame()
    if frame.empty:
        raise DataError(f"write_tables: no records in {store_path}; is this the file the runs were stored in?")
    summary = summarise(frame)
    comparison = compare(summary)
    beside = [Store(Path(store_path).with_name(f"{variant}.jsonl")).frame() for variant in VARIANTS]
    paired = paired_test(pd.concat([frame, *(records for records in beside if len(records))], ignore_index=True))
    repeated = repeats(frame)
    sections = [overview(comparison), same_splits(repeated)]
    sections += [verdict(paired, question) for question in _QUESTIONS]
    texts = {
        "tables.csv": _csv(summary),
        "summary.md": "\n".join([*sections, costs(frame)]),
        "paired.csv": _csv(paired),
        "agreement.csv": _csv(repeated),
    }
    for number, setting in enumerate(SETTINGS, start=1):
        texts[f"table_{number}.md"] = markdown_table(comparison, *setting)
        texts[f"table_{number}.tex"] = latex_table(comparison, *setting)
    for name, text in texts.items():
        write_atomically(Path(out_folder) / name, text)


def _csv(table: pd.DataFrame) -> str:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
