"""Who is first: ranks over data sets, and whether our estimator differs from the best peer by more than chance."""

from __future__ import annotations

import math

import pandas as pd
from scipy import stats

from mpgelu.research.compare.methods import GROUPS, METHODS
from mpgelu.research.compare.summary import ORDER, counted, summarise
from mpgelu.research.datasets import SETS
from mpgelu.research.paper.paired import LEVEL, TEST_TO_TRAIN, _holm

SIGNS = {"crps": 1, "rmse": 1, "log_likelihood": -1}  # times the score: lower is better


def compared(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The scores that take part in ranks and tests of a metric, signed so that lower is better.

    Methods with all report splits of a data set take part there, except those that are parts of our estimator.

    Args:
        frame: Records, as from `Store.frame`.
        metric: A key of `SIGNS`.

    Returns:
        One row per method and data set: `score` and its standard error `se`.
    """
    summary = summarise(frame)
    taking_part = summary["complete"] & summary["dataset"].isin(ORDER) & ~summary["method"].isin(GROUPS["ablations"])
    able = summary["method"].isin([method for method, recipe in METHODS.items() if not recipe.lacks(metric)])
    rows = summary.loc[taking_part & able, ["method", "dataset", metric, f"{metric}_se"]]
    rows[metric] *= SIGNS[metric]
    return rows.set_axis(["method", "dataset", "score", "se"], axis=1)


def ranks(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rank the methods on every data set and average over those that each took part in.

    Our settings do not compete with each other: peers are ranked beside the default, the fast settings in its place. A
    data set counts where ours and at least one peer took part, so that nobody is first for being alone.

    Args:
        frame: Records, as from `Store.frame`.
        metric: A key of `SIGNS`.

    Returns:
        One row per method, best first: `sets`, mean `rank`, on how many sets it was `first`, on how many within one
        standard error of the first's mean (`near`, the first included), and `worst`, the largest distance from the
        first as a share of the first's score (of a log-likelihood: in nats).
    """
    rows = compared(frame, metric)
    default, *others = GROUPS["ours"]
    tables = [_ranked(_beside(rows, default), metric)]
    for other in others:
        table = _ranked(_beside(rows, other), metric)
        tables.append(table[table["method"] == other])
    return pd.concat(tables).sort_values("rank", ignore_index=True)


def _beside(rows: pd.DataFrame, ours: str) -> pd.DataFrame:
    """One of our settings and all peers, on the data sets on which both took part."""
    peers = rows[~rows["method"].isin(GROUPS["ours"])]
    own = rows[rows["method"] == ours]
    shared = {*peers["dataset"]} & {*own["dataset"]}
    both = rows["method"].isin({ours, *peers["method"]}) & rows["dataset"].isin(shared)
    return rows[both]


def _ranked(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    scores = rows.groupby("dataset")["score"]
    best = scores.transform("min")
    first = rows[rows["score"] == best].drop_duplicates("dataset").set_index("dataset")
    behind, allowed = rows["score"] - best, rows["dataset"].map(first["se"]).astype(float).fillna(0)
    scale = 1 if metric == "log_likelihood" else best
    rows = rows.assign(
        rank=scores.rank(na_option="bottom"), first=behind == 0, near=behind <= allowed, far=behind / scale
    )
    averages = {"sets": ("rank", "size"), "rank": ("rank", "mean"), "first": ("first", "sum")}
    return rows.groupby("method").agg(**averages, near=("near", "sum"), worst=("far", "max")).reset_index()


def against_best_peer(frame: pd.DataFrame, metric: str, ours: str = "mpgelu") -> pd.DataFrame:
    r"""Test on every data set whether our method differs from the peer that scores best there.

    With the differences d_1, ..., d_J on the same splits, mean d and sample variance s^2, the corrected resampled
    t-test (Nadeau and Bengio, 2003) takes t = d / sqrt((1 / J + 1 / 9) s^2) with J - 1 degrees of freedom, two-sided.
    P-values are Holm-corrected over the data sets. The peer is chosen by the scores that are tested, which favours it.

    Args:
        frame: Records, as from `Store.frame`.
        metric: A key of `SIGNS`.
        ours: A method.

    Returns:
        One row per data set, in their order: `measured` and `eligible`, how many peers have all report splits
        and how many could (they give such a score, and the set is not too large for them), `peer`, `ours` and
        `theirs` (mean scores), `difference` (ours minus theirs), its corrected `se`, `splits`, `p_holm` and
        `verdict`.
    """
    rows = compared(frame, metric)
    peers = rows[rows["method"].isin(GROUPS["peers"])].sort_values("score").drop_duplicates("dataset")
    pairs = rows[rows["method"] == ours].merge(peers, on="dataset", suffixes=("", "_peer"))
    columns = ["dataset", "peer", "ours", "theirs", "difference", "se", "splits", "p"]
    tested = [
        _tested(frame, metric, dataset, ours, peer)
        for dataset, peer in zip(pairs["dataset"], pairs["method_peer"], strict=True)
    ]
    table = pd.DataFrame(tested, columns=columns)
    measured = rows[rows["method"].isin(GROUPS["peers"])].groupby("dataset").size()
    table["measured"] = table["dataset"].map(measured)
    table["eligible"] = [len(eligible_peers(name, metric)) for name in table["dataset"]]
    table["p_holm"] = _holm(table["p"].astype(float))
    better = SIGNS[metric] * table["difference"] < 0
    table["verdict"] = [
        "no difference shown" if not p < LEVEL else "better" if good else "worse"
        for p, good in zip(table["p_holm"], better, strict=True)
    ]
    return table.sort_values("dataset", key=lambda column: column.map(ORDER.index), ignore_index=True)


def eligible_peers(dataset: str, metric: str) -> list[str]:
    """Peers that give a score and are run on sets as large as this one."""
    able = [name for name in GROUPS["peers"] if not METHODS[name].lacks(metric)]
    return [name for name in able if SETS[dataset].rows <= METHODS[name].most_rows]


def _tested(frame: pd.DataFrame, metric: str, dataset: str, ours: str, peer: str) -> dict[str, object]:
    rows = counted(frame)
    rows = rows[rows["dataset"] == dataset].pivot(index="split", columns="method", values=metric)
    differences = rows[ours] - rows[peer]
    count, mean = len(differences), differences.mean(skipna=False)
    se = math.sqrt(1 / count + TEST_TO_TRAIN) * differences.std(skipna=False)
    p = 2 * float(stats.t.sf(abs(mean / se), count - 1)) if se > 0 else math.nan
    means = {"ours": rows[ours].mean(skipna=False), "theirs": rows[peer].mean(skipna=False)}
    return {"dataset": dataset, "peer": peer, **means, "difference": mean, "se": se, "splits": count, "p": p}
