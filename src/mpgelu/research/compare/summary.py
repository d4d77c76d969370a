"""From the records of a comparison to one row of averages per method and data set, over its report splits.

Of several records of one method and split the last counts. A score that is missing or not finite on one split makes
the mean not finite: no split is left out in silence. Wine and keggdirected, where many test rows repeat a training row,
are scored on the other rows, the new ones; their scores on all rows stand under a name of their own.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from mpgelu.errors import DataError
from mpgelu.predictive import Predictive
from mpgelu.research.compare.methods import METHODS
from mpgelu.research.compare.predicted import SCORES
from mpgelu.research.compare.run import IDENTITY
from mpgelu.research.datasets import SECOND, SETS

REPEATED = ("wine", "keggdirected")  # 26 and 73 % of the test rows repeat a training row; elsewhere at most 6 %
ALL_ROWS = {name: f"{name}, all rows" for name in REPEATED}
ORDER = tuple(sorted(SETS, key=lambda name: (SETS[name].suite is SECOND, SETS[name].rows)))

_SCORES = SCORES[Predictive]
_TIMES = ("fit_seconds", "fit_cpu_seconds", "predict_us_per_row", "predict_one_row_ms")
_METRICS = (*_SCORES, "log_likelihood_mixture", "log_likelihood_gaussian", *_TIMES)


def counted(frame: pd.DataFrame) -> pd.DataFrame:
    """The records of report splits that count, in order of method, data set and split.

    Args:
        frame: Records, as from `Store.frame`.

    Raises:
        DataError: A record is of an unknown method or data set.
    """
    for field, known in (("method", METHODS), ("dataset", SETS)):
        if unknown := set(frame[field]) - set(known):
            raise DataError(
                f"compare: the records hold unknown {field}s {sorted(unknown)}; known are {', '.join(known)}"
            )
    names = [*IDENTITY, "error", "repeats", *_METRICS, *(f"{score}_new" for score in _SCORES)]
    rows = frame.reindex(columns=names).drop_duplicates(list(IDENTITY), keep="last")
    rows = rows.astype(dict.fromkeys(names[4:], float))
    rows = rows[[split in SETS[name].report for name, split in zip(rows["dataset"], rows["split"], strict=True)]]
    repeated = rows["dataset"].isin(REPEATED)
    everything = rows[repeated].assign(dataset=rows.loc[repeated, "dataset"].map(ALL_ROWS))
    for score in _SCORES:
        rows[score] = rows[f"{score}_new"].where(repeated & (rows["repeats"] > 0), rows[score])
    order = {name: place for place, name in enumerate([*METHODS, *ORDER, *ALL_ROWS.values()])}
    both = pd.concat([rows, everything])
    return both.sort_values(list(IDENTITY), key=lambda column: column.replace(order), ignore_index=True)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Average the records of every method and data set over the report splits.

    A standard error is the sample standard deviation over splits over sqrt(splits), NaN for a single split.

    Args:
        frame: Records, as from `Store.frame`.

    Returns:
        One row per method and data set: `splits`, `complete` (whether these are all report splits), `failed`, the mean
        of each metric and its `_se`, and `_median` and `_worst` of the log-likelihood.
    """
    summary = [
        {"method": method, "dataset": dataset, **_averages(cell), "complete": len(cell) == report_splits(str(dataset))}
        for (method, dataset), cell in counted(frame).groupby(["method", "dataset"], sort=False)
    ]
    return pd.DataFrame(summary)


def report_splits(dataset: str) -> int:
    """Number of report splits of a data set, under either of its names."""
    return len(SETS[dataset.partition(",")[0]].report)


def _averages(rows: pd.DataFrame) -> dict[str, Any]:
    summary: dict[str, Any] = {"splits": len(rows), "failed": int(rows["error"].notna().sum())}
    for metric in _METRICS:
        summary[metric] = rows[metric].mean(skipna=False)
        summary[f"{metric}_se"] = rows[metric].std(skipna=False) / math.sqrt(len(rows))
    summary["log_likelihood_median"] = rows["log_likelihood"].median(skipna=False)
    summary["log_likelihood_worst"] = rows["log_likelihood"].min(skipna=False)
    return summary
