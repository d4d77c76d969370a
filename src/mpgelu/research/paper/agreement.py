"""How well our numbers agree with the paper's, judged by what training again on the same splits would change."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from mpgelu.research.paper.tables import COMPARED, LIMIT, SETTING, counted, paper_table

_ROUNDING = 0.001 / math.sqrt(12)  # standard deviation of what is lost by printing three decimals
_KEY = [*SETTING, "nonlinearity"]


def repeats(frame: pd.DataFrame) -> pd.DataFrame:
    r"""Compare the paper's means with ours on the same splits, for the cells that were trained with several seeds.

    The standard errors of the tables are over splits. Ours and the paper's are means over the same published splits, so
    that the splits' own ease or difficulty is in both and cancels in their difference. What is left is the chance of
    training: with J splits, S seeds and s^2 the variance over seeds of one split's score, averaged over splits,

    .. math:: \operatorname{se}^2 = \frac{s^2}{J}\left(1 + \frac1S\right) + \frac{0.001^2}{12},

    the 1 for the paper's single run, 1/S for the mean of ours, and the last term for its three decimals. Approximate:
    it supposes that the paper's training has the variance of ours.

    Args:
        frame: Records of kind "test", as from `Store.frame`.

    Returns:
        One row per cell of the paper with at least two seeds on two common splits, and metric: `splits`, `seeds`,
        `correlation` (mean over pairs of seeds, of the scores on the splits), `ours` (mean over splits and seeds),
        `paper`, `combined_se` (as in `compare`, of one of our seeds on average), `repeat_se`, `z` = (ours - paper) /
        `repeat_se`, and `agrees` = \|z\| <= 2.
    """
    tests = dict(iter(counted(frame, "test").groupby(_KEY)))
    rows = [
        {**{name: known[name] for name in _KEY}, "metric": metric, **numbers}
        for known in paper_table().to_dict("records")
        if (key := tuple(known[name] for name in _KEY)) in tests
        for metric in COMPARED
        if (numbers := _repeat(tests[key], metric, known[metric], known[f"{metric}_se"]))
    ]
    columns = ["splits", "seeds", "correlation", "ours", "paper", "combined_se", "repeat_se", "z", "agrees"]
    return pd.DataFrame(rows, columns=[*_KEY, "metric", *columns])


def _repeat(rows: pd.DataFrame, metric: str, paper: float, paper_se: float) -> dict[str, float | bool]:
    scores = rows.pivot(index="split", columns="seed", values=metric).dropna()
    splits, seeds = scores.shape
    if splits < 2 or seeds < 2:
        return {}
    chance = float(scores.var(axis=1).mean())
    repeat_se = math.sqrt(chance / splits * (1 + 1 / seeds) + _ROUNDING**2)
    ours = float(scores.to_numpy().mean())
    z = (ours - paper) / repeat_se
    pairs = np.triu_indices(seeds, 1)
    return {
        "splits": splits,
        "seeds": seeds,
        "correlation": float(scores.corr().to_numpy()[pairs].mean()),
        "ours": ours,
        "paper": paper,
        "combined_se": math.hypot(float(scores.sem().mean()), paper_se),
        "repeat_se": repeat_se,
        "z": z,
        "agrees": abs(z) <= LIMIT,
    }
