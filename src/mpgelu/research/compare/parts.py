"""What each part of our estimator buys: its scores against those of the estimator without the part."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from mpgelu.research.compare.methods import GROUPS, METHODS
from mpgelu.research.compare.ranks import SIGNS
from mpgelu.research.compare.summary import ORDER, summarise
from mpgelu.research.paper.layout import MISSING, markdown

_HEAD = ("setting", "sets", "CRPS", "RMSE", "log-likelihood", "default better in CRPS", "worst CRPS")


def parts_table(frame: pd.DataFrame) -> str:
    """Return a table of all ablations in Markdown; empty if none has run on all report splits of a set.

    Changes are from the default to the ablation, over the sets on which both have all report splits: of CRPS and RMSE
    the geometric mean of the ratios, of log-likelihoods the mean difference in nats.

    Args:
        frame: Records, as from `Store.frame`.
    """
    summary = summarise(frame)
    scores = summary[summary["complete"].astype(bool) & summary["dataset"].isin(ORDER)].set_index(["method", "dataset"])
    body = [
        _line(name, scores.loc[name], scores.loc["mpgelu"])
        for name in GROUPS["ablations"]
        if {name, "mpgelu"} <= {*scores.index.get_level_values("method")}
    ]
    return markdown(_HEAD, [line for line in body if line])


def _line(name: str, theirs: pd.DataFrame, default: pd.DataFrame) -> list[str]:
    sets = [dataset for dataset in ORDER if dataset in theirs.index and dataset in default.index]
    if not sets:
        return []
    theirs, default = theirs.loc[sets, [*SIGNS]], default.loc[sets, [*SIGNS]]
    ratios = np.exp(np.log(theirs[["crps", "rmse"]] / default[["crps", "rmse"]]).mean(skipna=False)) - 1
    nats = float((theirs["log_likelihood"] - default["log_likelihood"]).mean(skipna=False))
    crps = (theirs["crps"] / default["crps"]).to_numpy()
    worst = int(crps.argmax())
    cells = [_percent(ratios["crps"]), _percent(ratios["rmse"]), MISSING if math.isnan(nats) else f"{nats:+.2f}"]
    better = f"{(crps > 1).sum()} of {len(sets)}"
    return [METHODS[name].title, str(len(sets)), *cells, better, f"{_percent(crps[worst] - 1)} ({sets[worst]})"]


def _percent(change: float) -> str:
    return MISSING if math.isnan(change) else f"{change:+.1%}"
