"""From the records of a comparison to its tables and its figure.

    records -> `summarise` -> `write_report`: compare.csv, compare.md, compare.png

Of several records of one method and split the last counts. A score that is missing or not finite on one split makes
the mean not finite: no split is left out in silence.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd

from mpgelu.errors import DataError
from mpgelu.research.compare.methods import METHODS
from mpgelu.research.compare.run import IDENTITY, LEVEL
from mpgelu.research.datasets import UCI_NAMES
from mpgelu.research.paper.layout import MISSING, markdown
from mpgelu.research.paper.paired import TEST_TO_TRAIN
from mpgelu.research.paper.uci import LARGE
from mpgelu.research.store import Store
from mpgelu.storage.files import write_atomically, write_between

NEW_ROWS = "wine, new rows"
COLUMNS = (*sorted({*UCI_NAMES, NEW_ROWS} - {*LARGE}), *LARGE)  # small sets first
PARTS = {"all": range(20), "0-9": range(10), "10-19": range(10, 20)}

_OURS, _PEER = "#d95f02", "#1f78b4"


@dataclass(frozen=True)
class Table:
    """One table of the page.

    Args:
        heading: Above it.
        column: Of the summary.
        form: Format of a number; empty for three digits.
        target: The best value: infinity, minus infinity or one between; none is best if this is NaN.
        spread: Column of the standard error beside the number, if any.
    """

    heading: str
    column: str
    form: str
    target: float
    spread: str | None = None


TABLES = (
    Table("Log-likelihood, mean ± standard error", "log_likelihood", ".2f", math.inf, "log_likelihood_se"),
    Table("Log-likelihood, median over splits", "log_likelihood_median", ".2f", math.inf),
    Table("Log-likelihood, worst split", "log_likelihood_worst", ".2f", math.inf),
    Table("RMSE", "rmse", "", -math.inf, "rmse_se"),
    Table("CRPS", "crps", "", -math.inf, "crps_se"),
    Table("Coverage of the 90 % interval", "coverage90", ".1%", LEVEL),
    Table("Mean width of the 90 % interval", "width90", "", math.nan),
    Table("Fit, seconds of one processor", "fit_cpu_seconds", "", -math.inf),
    Table("Prediction, microseconds per row, all test rows at once", "predict_us_per_row", "", -math.inf),
    Table("Prediction of one row, milliseconds", "predict_one_row_ms", "", -math.inf),
)
_SCORES = ("log_likelihood", "rmse", "crps", "coverage90", "width90")
_TIMES = ("fit_seconds", "fit_cpu_seconds", "predict_us_per_row", "predict_one_row_ms")
_OTHERS = ("log_likelihood_mixture", "log_likelihood_gaussian", *_TIMES)
_METRICS = (*_SCORES, *_OTHERS)


def counted(frame: pd.DataFrame) -> pd.DataFrame:
    """The records that count, in order of method, data set and split; wine's new rows are a data set of their own.

    Args:
        frame: Records, as from `Store.frame`.

    Raises:
        DataError: A record is of an unknown method.
    """
    if unknown := set(frame["method"]) - set(METHODS):
        raise DataError(f"compare: the records hold unknown methods {sorted(unknown)}; known are {', '.join(METHODS)}")
    names = [*IDENTITY, "error", "repeats", *_METRICS, *(f"{score}_new" for score in _SCORES)]
    rows = frame.reindex(columns=names).drop_duplicates(list(IDENTITY), keep="last")
    rows = rows.astype(dict.fromkeys(names[4:], float))
    wine = rows[rows["dataset"] == "wine"]
    new = {score: wine[f"{score}_new"].where(wine["repeats"] > 0, wine[score]) for score in _SCORES}
    both = pd.concat([rows, wine.assign(dataset=NEW_ROWS, **new, **dict.fromkeys(_OTHERS, math.nan))])
    order = {name: place for place, name in enumerate([*METHODS, *COLUMNS])}
    return both.sort_values(list(IDENTITY), key=lambda column: column.replace(order), ignore_index=True)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Average the records of every method and data set over splits.

    Splits 0-9, on which our estimator was developed, and 10-19 are also averaged apart for our methods. A standard
    error is the sample standard deviation over splits over sqrt(splits), NaN for a single split.

    Args:
        frame: Records, as from `Store.frame`.

    Returns:
        One row per method, part and data set: `splits`, the mean of each metric and its `_se`, and `_median` and
        `_worst` of the log-likelihood.
    """
    rows = counted(frame)
    summary = [
        {"method": method, "part": part, "dataset": dataset, **_averages(chosen)}
        for (method, dataset), cell in rows.groupby(["method", "dataset"], sort=False)
        for part, splits in PARTS.items()
        if (part == "all" or METHODS[str(method)].ours) and len(chosen := cell[cell["split"].isin(splits)])
    ]
    return pd.DataFrame(summary)


def _averages(rows: pd.DataFrame) -> dict[str, Any]:
    summary: dict[str, Any] = {"splits": len(rows), "failed": int(rows["error"].notna().sum())}
    for metric in _METRICS:
        summary[metric] = rows[metric].mean(skipna=False)
        summary[f"{metric}_se"] = rows[metric].std(skipna=False) / math.sqrt(len(rows))
    summary["log_likelihood_median"] = rows["log_likelihood"].median(skipna=False)
    summary["log_likelihood_worst"] = rows["log_likelihood"].min(skipna=False)
    return summary


def differences(frame: pd.DataFrame, ours: str = "mpgelu") -> pd.DataFrame:
    """Log-likelihood of our method minus that of each other, on the splits that both have.

    Training sets of random splits overlap, so that the standard error takes the correction of Nadeau and Bengio
    (2003), sqrt((1 / splits + 1 / 9) variance).

    Args:
        frame: Records, as from `Store.frame`.
        ours: A method.

    Returns:
        One row per other method and data set: `splits`, `difference` (positive where ours is better), `se`.
    """
    rows = counted(frame)[[*IDENTITY, "log_likelihood"]]
    pairs = rows[rows["method"] == ours].merge(rows[rows["method"] != ours], on=["dataset", "split"])
    pairs["difference"] = pairs["log_likelihood_x"] - pairs["log_likelihood_y"]
    grouped = pairs.groupby(["method_y", "dataset"], sort=False)["difference"]
    found = [
        {
            **{"method": method, "part": "all", "dataset": dataset, "splits": len(values)},
            "difference": values.mean(skipna=False),
            "se": math.sqrt(1 / len(values) + TEST_TO_TRAIN) * values.std(skipna=False),
        }
        for (method, dataset), values in grouped
    ]
    return pd.DataFrame(found, columns=["method", "part", "dataset", "splits", "difference", "se"])


def write_report(store_path: str | os.PathLike[str], out_folder: str | os.PathLike[str]) -> None:
    """Write `compare.csv`, `compare.md` and `compare.png` from a store; each replaces its old version at once.

    Args:
        store_path: A file of records, see `Store`.
        out_folder: Made if it is not there.

    Raises:
        DataError: The store has no records, or a file cannot be written.
    """
    frame = Store(store_path).frame()
    if frame.empty:
        raise DataError(f"compare: no records in {store_path}; run the comparison first, without --tables-only")
    summary, folder = summarise(frame), Path(out_folder)
    write_atomically(folder / "compare.csv", summary.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    write_atomically(folder / "compare.md", page(frame))
    write_atomically(folder / "compare.png", draw(summary))


def update_readme(store_path: str | os.PathLike[str], readme: Path) -> None:
    """Write the log-likelihoods of all splits between the marks ``compare`` of a README.

    Args:
        store_path: A file of records, see `Store`.
        readme: The file.
    """
    summary = summarise(Store(store_path).frame())
    table = _section(TABLES[0], summary[(summary["part"] == "all") & (summary["dataset"] != NEW_ROWS)])
    write_between(readme, "compare", table.split("\n\n", 1)[1].strip())


def page(frame: pd.DataFrame) -> str:
    """All tables in Markdown.

    Args:
        frame: Records, as from `Store.frame`.
    """
    summary = summarise(frame)
    matched = summary[[METHODS[method].matched for method in summary["method"]]]
    mixture = Table("Log-likelihood of the exact mixture", "log_likelihood_mixture", ".2f", math.nan)
    paired = Table(
        "Log-likelihood of MP-GELU minus that of the other, same splits", "difference", "+.2f", math.nan, "se"
    )
    sections = [_INTRODUCTION, *(_section(table, summary) for table in TABLES)]
    sections += [_section(paired, differences(frame)), _section(mixture, matched), _failures(frame)]
    return "\n".join(section for section in sections if section)


_INTRODUCTION = f"""# Comparison on the published UCI splits

The number of splits is in brackets. The best of the methods that have the most splits in a column is bold. Everything
is in original units; the target and features are standardised on the training rows. The deep ensemble is scored as the
Gaussian with the mixture's mean and variance, as is customary. "{NEW_ROWS}" leaves out the test rows that repeat a
training row, features and target. Our estimator was developed on splits 0-9: its splits are also shown apart. Times are
of one thread and include standardising and, for predictions, mean and standard deviation of every row.
"""


def _section(table: Table, summary: pd.DataFrame) -> str:
    """A heading and a table with one line per method and part, one column per data set."""
    columns = [name for name in COLUMNS if summary.loc[summary["dataset"] == name, table.column].notna().any()]
    if not columns:
        return ""
    cells = {(row["method"], row["part"], row["dataset"]): row for _, row in summary.iterrows()}
    best = {name: _best(table, summary[summary["dataset"] == name]) for name in columns}
    body = []
    for method, part in dict.fromkeys((method, part) for method, part, _ in cells):
        shown = [_cell(table, cells.get((method, part, name)), best[name]) for name in columns]
        title = METHODS[method].title
        body.append([title if part == "all" else f"{title}, splits {part}", *shown])
    return f"## {table.heading}\n\n{markdown(['', *columns], body)}\n"


def _best(table: Table, rows: pd.DataFrame) -> float:
    """The best number of a column, among the methods that have the most splits."""
    rows = rows[rows["part"] == "all"]
    values = rows.loc[rows["splits"] == rows["splits"].max(), table.column].dropna()
    if math.isnan(table.target) or values.empty:
        return math.nan
    if math.isinf(table.target):
        return float(values.max() if table.target > 0 else values.min())
    return float(values.loc[(values - table.target).abs().idxmin()])


def _cell(table: Table, row: pd.Series | None, best: float) -> str:
    if row is None:
        return MISSING
    value, count = row[table.column], row["splits"]
    if not math.isfinite(value):
        return f"not finite [{count}]"
    number = _show(value, table.form)
    number = f"**{number}**" if value == best and row["part"] == "all" else number
    spread = row[table.spread] if table.spread else math.nan
    beside = f" ± {_show(spread, table.form.replace('+', ''), 1)}" if math.isfinite(spread) else ""
    return f"{number}{beside} [{count}]"


def _show(value: float, form: str, digits: int = 3) -> str:
    """A number in a format, or with so many digits and no exponent."""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:{form or f'.{max(0, decimals)}f'}}"


def _failures(frame: pd.DataFrame) -> str:
    rows = counted(frame)
    failed = rows[rows["error"].notna() & (rows["dataset"] != NEW_ROWS)]
    lines = [
        f"- {METHODS[row['method']].title}, {row['dataset']} split {row['split']}: {row['error']}"
        for _, row in failed.iterrows()
    ]
    return "\n".join(["## Failed", "", *lines, ""]) if lines else ""


def draw(summary: pd.DataFrame) -> bytes:
    """Log-likelihood of every method with its standard error, a panel for each data set; a PNG file.

    Args:
        summary: From `summarise`.
    """
    rows = summary[summary["part"] == "all"]
    names = [name for name in COLUMNS if name in set(rows["dataset"])]
    methods = [method for method in METHODS if method in set(rows["method"])]
    width = min(5, len(names))
    height = math.ceil(len(names) / width)
    figure = matplotlib.figure.Figure(
        figsize=(2.0 + 2.6 * width, height * (0.9 + 0.28 * len(methods))), layout="constrained"
    )
    panels = figure.subplots(height, width, sharey=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=False):
        _draw_panel(axes, name, rows[rows["dataset"] == name].set_index("method"), methods)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    figure.suptitle("test log-likelihood, mean ± standard error over splits (right is better)", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    return image.getvalue()


def _draw_panel(axes: Any, name: str, rows: pd.DataFrame, methods: Sequence[str]) -> None:
    for place, method in enumerate(methods):
        if method in rows.index:
            row = rows.loc[method]
            colour = _OURS if METHODS[method].ours else _PEER
            se = np.nan_to_num(row["log_likelihood_se"])
            axes.errorbar(row["log_likelihood"], place, xerr=se, fmt="o", ms=4, color=colour, capsize=2)
    axes.set_yticks(range(len(methods)), [METHODS[method].title for method in methods], fontsize=8)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(name, fontsize=9)
