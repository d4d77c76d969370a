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
    scores = summary[summary["complete"].astype(bool) & summary["dataset"].isin(ORDER)]
    of = {name: scores[scores["method"] == name].set_index("dataset") for name in ("mpgelu", *GROUPS["ablations"])}
    lines = [line for name in GROUPS["ablations"] if (line := _line(name, of[name], of["mpgelu"]))]
    return markdown(_HEAD, lines) if lines else ""


def _line(name: str, theirs: pd.DataFrame, default: pd.DataFrame) -> list[str]:
    sets = [dataset for dataset in ORDER if dataset in theirs.index and dataset in default.index]
    if not sets:
        return []
    pairs = {
        metric: (theirs.loc[sets, metric].to_numpy(float), default.loc[sets, metric].to_numpy(float))
        for metric in SIGNS
    }
    crps, rmse = (np.divide(*pairs[metric]) for metric in ("crps", "rmse"))
    nats = float(np.subtract(*pairs["log_likelihood"]).mean())
    means = [_percent(float(np.exp(np.log(ratios).mean())) - 1) for ratios in (crps, rmse)]
    better, worst = f"{(crps > 1).sum()} of {len(sets)}", int(crps.argmax())
    cells = [*means, MISSING if math.isnan(nats) else f"{nats:+.2f}", better]
    return [METHODS[name].title, str(len(sets)), *cells, f"{_percent(float(crps[worst]) - 1)} ({sets[worst]})"]


def _percent(change: float) -> str:
    return MISSING if math.isnan(change) else f"{change:+.1%}"
