"""What the experiments cost: hand-made seconds and the sums they must give."""

from __future__ import annotations

import pandas as pd

from made_up import DASH, final_record, markdown_cells, runtime_record, validation_record
from mpgelu.research.paper.costs import costs


def test_minutes_by_network_and_for_everything() -> None:
    records = [final_record(split=split, seconds=60) for split in range(3)]
    records += [validation_record(split=0, rate=rate, seconds=30) for rate in (0.005, 0.01)]
    records += [final_record(dataset="protein", nonlinearity="relu", seconds=120)]  # it borrowed its rate
    records += [final_record(seed=1, seconds=1e6), runtime_record(0.1)]
    text = costs(pd.DataFrame(records))
    head, small, protein = markdown_cells(text)
    assert head[1:] == ["MP-GELU, diagonal", "MP-GELU, full", "ReLU, diagonal", "ReLU, full"]
    none = f"{DASH} ({DASH})"
    assert small == ["small sets", none, "4 (60)", none, none]  # 20 splits of 60 s and 4 rates of 30 s
    assert protein == ["protein", none, none, none, "2 (42)"]  # 5 splits of 120 s and 4 rates of 96 s
    assert "Together 0.1 hours, and 1.7 for the whole protocol." in text
