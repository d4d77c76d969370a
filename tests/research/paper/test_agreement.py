"""Agreement on the same splits: standard errors that can be worked out by hand, and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from made_up import final_record, only_row, splits
from mpgelu.research.paper.agreement import repeats
from mpgelu.research.paper.tables import paper_table

ROUNDING = 0.001 / math.sqrt(12)


def test_the_standard_error_of_training_again() -> None:
    records = splits([1.0, 2.0, 3.0]) + splits([1.2, 2.2, 3.2], seed=1)  # seeds differ by 0.2: variance 0.02
    row = only_row(repeats(pd.DataFrame(records)), metric="nll")
    assert row[["splits", "seeds", "correlation"]].tolist() == pytest.approx([3, 2, 1])
    assert row["ours"] == pytest.approx(2.1)
    assert row["paper"] == 1.204
    assert row["repeat_se"] == pytest.approx(math.sqrt(0.02 / 3 * 1.5 + ROUNDING**2))
    assert row["z"] == pytest.approx((2.1 - 1.204) / row["repeat_se"])
    assert row["combined_se"] == pytest.approx(math.hypot(1 / math.sqrt(3), 0.029))
    assert not row["agrees"]


def test_only_cells_with_two_seeds_on_common_splits() -> None:
    records = splits([1.0, 2.0]) + splits([1.0, 2.0], dataset="wine", seed=1)
    records += [*splits([1.0, 2.0], dataset="yacht"), final_record(dataset="yacht", seed=1, split=5)]
    assert len(repeats(pd.DataFrame(records))) == 0
    assert len(repeats(pd.DataFrame([*records, *splits([1.1, 2.1], seed=3)]))) == 2
    assert len(repeats(pd.DataFrame())) == 0


def test_a_second_run_on_the_same_splits_is_judged_right() -> None:
    generator, chance, records = np.random.default_rng(0), 0.05, []
    for paper in paper_table().to_dict("records"):
        cell = {name: paper[name] for name in ("outputs", "covariance", "dataset", "nonlinearity")}
        difficulty = generator.normal(0, 1, (20, 2))
        printed = (difficulty + generator.normal(0, chance, (20, 2))).mean(0).round(3)  # of a run of the paper
        for seed, split in itertools.product(range(3), range(20)):
            scores = difficulty[split] - printed + generator.normal(0, chance, 2)
            metrics = {"nll": paper["nll"] + scores[0], "rmse": paper["rmse"] + scores[1]}
            records.append(final_record(seed=seed, split=split, **metrics, **cell))
    z = repeats(pd.DataFrame(records))["z"]
    assert len(z) == 144
    assert abs(z.mean()) < 4 / math.sqrt(144)
    assert abs(z.std() - 1) < 4 / math.sqrt(2 * 144)
