"""Peak memory of fit and prediction, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from mpgelu.errors import DataError
from mpgelu.research.bench.sections import Rows, Settings

_SIZES = ((1_000, 10), (10_000, 10), (100_000, 10), (10_000, 100))  # rows and features
_PREDICTED = 100_000  # rows: memory must not grow with them beyond what they take themselves
_PROGRAM = """
import json, resource, sys
import numpy as np
import mpgelu

rows, features, steps, predicted, width = map(int, sys.argv[1:])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

rng = np.random.default_rng(0)
X = rng.normal(size=(rows, features))
y = X[:, 0] + 0.1 * rng.normal(size=rows)
hidden = (width, width) if width else None
small = mpgelu.MPGELURegressor((4,), steps=1, folds=2, random_state=0, n_jobs=1).fit(X[:50], y[:50])
small.predict_interval(X[:2])
loaded = peak()
model = mpgelu.MPGELURegressor(hidden, steps=steps, random_state=0, n_jobs=1).fit(X, y)
fitted = peak()
some = np.resize(X, (predicted, features))
before = peak()
model.predict_interval(some)
print(json.dumps([loaded, fitted - loaded, peak() - before]))
"""


def memory(settings: Settings) -> Rows:
    """Megabytes at the peak: of a process that has fitted and predicted a tiny table, and what larger ones add to it.

    A prediction adds nothing if the fit before it needed more. The number of steps is small: it does not matter here.
    """
    table: Rows = []
    for rows, features in ((60, 3),) if settings.quick else _SIZES:
        predicted, width = (100, 8) if settings.quick else (_PREDICTED, 0)
        sizes = (rows, features, 2 if settings.quick else 20, predicted, width)
        command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DataError(f"memory: the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
        loaded, fit, prediction = json.loads(done.stdout)
        table.append(
            {
                "rows": rows,
                "features": features,
                "before, MB": loaded,
                "fit adds, MB": fit,
                f"{predicted:,} intervals add, MB": prediction,
            }
        )
    return table
