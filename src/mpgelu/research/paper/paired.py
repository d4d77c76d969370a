"""Whether MP-GELU and another network differ by more than chance, on the same splits and seeds."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from mpgelu.research.paper.tables import COMPARED, SETTING, counted

TEST_TO_TRAIN = 1 / 9
LEVEL = 0.05
OTHERS = {
    "relu": "ReLU",
    "relu_input": "ReLU, input dropout",
    "gelu_input": "GELU on the input",
    "gelu_hidden": "GELU first",
}  # what MP-GELU is compared with


def paired_test(frame: pd.DataFrame) -> pd.DataFrame:
    """Test whether MP-GELU and each other network differ, on the same splits and seeds.

    The difference MP-GELU - other is averaged over seeds in each split, to d_1, ..., d_J with mean d and
    sample variance s^2. Random splits share training data, so that s^2 / J is too small a variance for d.
    The corrected resampled t-test (Nadeau & Bengio, 2003, "Inference for the Generalization Error") takes

        t = d / sqrt((1 / J + n_test / n_train) s^2),    n_test / n_train = 1 / 9,

    with J - 1 degrees of freedom, two-sided. It is approximate: the correction is a rule of thumb. There is
    no t (NaN, and "no difference shown") for one split, without spread, or where a metric is not finite.
    P-values are Holm-corrected over all tests of one metric against one network; a verdict needs `p_holm` < 0.05.

    Args:
        frame: Records of kind "test", as from `Store.frame`. All seeds count, seed 0 too, wherever
            both networks have a record of the split.

    Returns:
        One row per setting, data set, other network (`against`) and metric: `splits`, `seeds`, the dropout rates of
        MP-GELU and of the other network (`rate`, `rate_against`), `mean_difference` (negative where MP-GELU is
        better), `corrected_se`, `t`, `p`, `p_holm` and `verdict`.
    """
    tests = counted(frame, "test")
    mpgelu, others = tests[tests["nonlinearity"] == "mpgelu"], tests[tests["nonlinearity"].isin(OTHERS)]
    others = others.rename(columns={"nonlinearity": "against"})
    pairs = mpgelu.merge(others, on=[*SETTING, "seed", "split"], suffixes=("", "_against"))
    compared = [*SETTING, "against"]
    rows = [
        {**dict(zip(compared, key, strict=True)), "metric": metric, **_corrected_t(cells, metric)}
        for key, cells in pairs.groupby(compared)
        for metric in COMPARED
    ]
    numbers = ["splits", "seeds", "rate", "rate_against", "mean_difference", "corrected_se", "t", "p"]
    table = pd.DataFrame(rows, columns=[*compared, "metric", *numbers])
    table["p_holm"] = table.groupby(["against", "metric"])["p"].transform(_holm)
    table["verdict"] = [
        _verdict(*row) for row in zip(table["against"], table["mean_difference"], table["p_holm"], strict=True)
    ]
    return table


def _corrected_t(pairs: pd.DataFrame, metric: str) -> dict[str, float | str]:
    difference = pairs[metric] - pairs[f"{metric}_against"]
    by_split = difference.groupby(pairs["split"]).agg(lambda seeds: seeds.mean(skipna=False))
    splits = len(by_split)
    mean = by_split.mean(skipna=False)
    se = math.sqrt(1 / splits + TEST_TO_TRAIN) * by_split.std(skipna=False)
    t = mean / se if se > 0 else math.nan
    return {
        "splits": splits,
        "seeds": pairs["seed"].nunique(),
        "rate": _rates(pairs["rate"]),
        "rate_against": _rates(pairs["rate_against"]),
        "mean_difference": mean,
        "corrected_se": se,
        "t": t,
        "p": 2 * float(stats.t.sf(abs(t), splits - 1)),
    }


def _rates(rates: pd.Series) -> str:
    """The rates that occur; seeds may differ in theirs."""
    return ", ".join(f"{rate:g}" for rate in sorted(rates.unique()))


def _holm(p: pd.Series) -> pd.Series:
    """Holm's step-down correction; a test without a p-value is not counted."""
    ordered = p.dropna().sort_values()
    steps = ordered * np.arange(len(ordered), 0, -1)
    return steps.cummax().clip(upper=1).reindex(p.index)


def _verdict(against: str, mean_difference: float, p: float) -> str:
    if not p < LEVEL:
        return "no difference shown"
    return f"{'MP-GELU' if mean_difference < 0 else OTHERS[against]} better"
