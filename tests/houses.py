"""A made-up table as people have them: names, gaps, a constant, noise that depends on a column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

QUICK: dict[str, Any] = {"steps": 60, "folds": 2, "sigma": None, "hidden": (12,), "random_state": 0}


def houses(rows: int = 300, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    area = random.uniform(20, 200, rows).round()
    city = random.choice(["Oslo", "Bergen", "Tromsø"], rows)
    noise = np.where(city == "Oslo", 40, 10)
    price = 3 * area + 100 * (city == "Oslo") + noise * random.normal(size=rows)
    frame = pd.DataFrame({"id": np.arange(rows).astype(str), "area": area, "city": city, "price": price.round(2)})
    frame["id"] = "house " + frame["id"]
    frame["year"] = random.integers(1900, 2020, rows)
    frame["garage"] = random.choice(["yes", "no"], rows)
    frame["country"] = "Norway"
    frame["year"] = frame["year"].where(random.random(rows) > 0.1).astype("Int64")
    frame["garage"] = frame["garage"].where(random.random(rows) > 0.1)
    return frame
