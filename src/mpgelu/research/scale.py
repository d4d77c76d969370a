"""How far it goes: the score against the truth as rows grow, streamed against in memory, and memory at 20 million rows.

``python -m mpgelu.research.scale --part growth --rows 1e3,1e4`` keeps its numbers in ``results/scale/scale.json``.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from mpgelu.estimators import MPGELURegressor
from mpgelu.storage.files import write_atomically, write_between
from mpgelu.tables import TableModel
from mpgelu.tables.dataset import Dataset

Array = NDArray[np.float64]
Numbers = dict[str, Any]

FEATURES = 10
NAMES = [f"x{i}" for i in range(FEATURES)]
SMALL: dict[str, Any] = {"sigma": 1.0, "diverse": False, "folds": 2, "effort": 0.2, "random_state": 0}
_TEST_SEED, _TEST_ROWS = 10**6, 20_000
_ROWS_OF_FILE, _ROWS_OF_GROUP = 1_000_000, 131_072
_PARTS = ("growth", "same", "data", "memory", "score")


def function(X: Array) -> Array:
    """The mean of the target: smooth, with some interactions and fine structure; its variance is about one."""
    smooth = np.sin(np.pi * X[:, 0] * X[:, 1]) + X[:, 2] ** 2 + 0.5 * X[:, 3] - 0.5 * X[:, 4] * X[:, 5]
    fine = 0.5 * np.sin(4 * np.pi * X[:, 6]) * np.cos(2 * np.pi * X[:, 7]) + 0.3 * np.sin(9 * X[:, 8] + 2 * X[:, 9])
    return np.asarray(smooth + fine)


def noise_std(X: Array) -> Array:
    """Standard deviation of the Gaussian noise, from 0.1 to 0.4."""
    return np.asarray(0.1 + 0.3 / (1 + np.exp(-4 * (X[:, 0] + X[:, 5]))))


def rows_of(seed: int, count: int) -> pd.DataFrame:
    """Rows of the synthetic table, features uniform in [-1, 1]."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, (count, FEATURES))
    y = function(X) + noise_std(X) * generator.normal(size=count)
    return pd.DataFrame(X, columns=NAMES).assign(y=y)


def true_log_density(frame: pd.DataFrame) -> Array:
    """Log density of each target under the distribution that it was drawn from."""
    X, y = frame[NAMES].to_numpy(), frame["y"].to_numpy()
    std = noise_std(X)
    return np.asarray(-0.5 * np.log(2 * np.pi) - np.log(std) - 0.5 * ((y - function(X)) / std) ** 2)


@contextmanager
def folder_of(rows: int) -> Iterator[Path]:
    """A folder of Parquet files with so many rows, in the system's folder for temporary files; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mpgelu-scale-"))
    try:
        write_rows(folder, rows)
        yield folder
    finally:
        shutil.rmtree(folder)


def write_rows(folder: Path, rows: int) -> None:
    """Write Parquet files with so many rows together into a folder; a file that is there already stays.

    Random numbers hardly repeat, so that a dictionary of them would take 18 times as long to write, and more space.
    """
    for number, start in enumerate(range(0, rows, _ROWS_OF_FILE)):
        path = folder / f"{number:04}.parquet"
        if not path.exists():
            table = pa.Table.from_pandas(rows_of(number, min(_ROWS_OF_FILE, rows - start)), preserve_index=False)
            settings: Any = {"row_group_size": _ROWS_OF_GROUP, "use_dictionary": False, "write_page_checksum": True}
            pq.write_table(table, path.with_suffix(".part"), **settings)
            path.with_suffix(".part").replace(path)


def score(model: TableModel, test: pd.DataFrame) -> Numbers:
    """Mean log density of the test rows, and how far it lies below that of the truth, with standard errors."""
    X, y = model.encoder.encode(test).X, test["y"].to_numpy().copy()
    found = np.concatenate([p.log_prob(torch.as_tensor(y[at])).numpy() for at, p in model.regressor.distributions(X)])
    mean = model.regressor.predict(X)
    gap, root = true_log_density(test) - found, np.sqrt(len(found))
    return {
        "log_likelihood": float(found.mean()),
        "log_likelihood_se": float(found.std() / root),
        "gap": float(gap.mean()),
        "gap_se": float(gap.std() / root),
        "rmse_of_mean": float(np.sqrt(np.mean((mean - function(test[NAMES].to_numpy())) ** 2))),
    }


def growth(rows: Sequence[int], streamed_from: int = 1_000_000, **settings: Any) -> list[Numbers]:
    """The score as rows grow, with the same small setting; from ``streamed_from`` rows on from Parquet files."""
    test, found = rows_of(_TEST_SEED, _TEST_ROWS), []
    for count in rows:
        with folder_of(count) as folder:
            started = time.process_time()
            streamed = count >= streamed_from
            table: Any = folder if streamed else pd.concat([pd.read_parquet(path) for path in sorted(folder.iterdir())])
            model = TableModel.fit(table, "y", stream=True if streamed else None, **SMALL | settings)
            seconds = time.process_time() - started
        kind = next(iter(model.regressor.kind_weights_))
        found.append({"rows": count, "streamed": streamed, "cpu_seconds": seconds, "kind": kind, **_sizes(model)})
        found[-1] |= score(model, test)
        print(json.dumps(found[-1]), flush=True)
    return found


def same(rows: int = 100_000, seeds: Sequence[int] = (0, 1), **settings: Any) -> list[Numbers]:
    """The streamed fit beside the fit in memory of the same rows, with the same settings."""
    test, found = rows_of(_TEST_SEED, _TEST_ROWS), []
    with folder_of(rows) as folder:
        for seed in seeds:
            for stream in (False, True):
                model = TableModel.fit(folder, "y", stream=stream, **SMALL | settings | {"random_state": seed})
                found.append({"rows": rows, "seed": seed, "streamed": stream, **score(model, test)})
                print(json.dumps(found[-1]), flush=True)
    return found


def memory(folder: Path, **settings: Any) -> Numbers:
    """One epoch of a small model over a folder of Parquet files, with the peak memory of this process; it is kept."""
    table = Dataset(folder)
    chosen = (
        SMALL | {"hidden": (32, 32), "batch_size": 1024, "effort": 1.0, "steps": table.rows // 2 // 1024} | settings
    )
    started, model = _clocks(), TableModel.fit(folder, "y", stream=True, **chosen)
    rates = _rates(table.rows, started, _clocks())
    model.save(folder / "model.mpgelu")
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    found = {"rows": table.rows, "gigabytes": size / 1e9, "peak_memory_mb": _peak_memory(), **rates}
    return found | {"settings": {name: str(value) for name, value in chosen.items()}}


def scored(folder: Path) -> Numbers:
    """The score of all rows of a folder by the model that :func:`memory` kept, with the peak memory of this process."""
    started, model = _clocks(), TableModel.load(folder / "model.mpgelu")
    sums = np.sum([_summed(model, part) for part in Dataset(folder).frames(_ROWS_OF_GROUP)], axis=0)
    count, squares, log_density, truth = map(float, sums)
    return {
        "rows": int(count),
        "trained_on": model.rows,
        "peak_memory_mb": _peak_memory(),
        **_rates(int(count), started, _clocks()),
        "rmse": float(np.sqrt(squares / count)),
        "log_likelihood": log_density / count,
        "truth": truth / count,
    }


def _summed(model: TableModel, part: pd.DataFrame) -> Array:
    """Sums over rows: their number, squared errors, log densities, and log densities of the truth."""
    X, y = model.encoder.encode(part).X, part["y"].to_numpy(dtype=np.float64).copy()
    sums = np.array([len(y), 0, 0, true_log_density(part.astype("float64")).sum()])
    for at, p in model.regressor.distributions(X, nodes=2, rows_at_once=8192):
        sums[1:3] += float(np.square(y[at] - p.mean.numpy()).sum()), float(p.log_prob(torch.as_tensor(y[at])).sum())
    return sums


def _sizes(model: TableModel) -> Numbers:
    regressor: MPGELURegressor = model.regressor
    stack: Any = regressor.ensemble_.stacks[0]
    widths = [int(p.shape[-1]) for name, p in stack.state()[0].items() if name.endswith("bias")]
    return {"networks": len(regressor.ensemble_), "steps": regressor.n_iter_, "widths": widths}


def _peak_memory() -> float:
    """Largest resident memory of this process so far, in megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _rates(rows: int, before: tuple[float, float], after: tuple[float, float]) -> Numbers:
    wall, cpu = (b - a for a, b in zip(before, after, strict=True))
    return {"seconds": wall, "cpu_seconds": cpu, "rows_per_second": rows / wall, "rows_per_cpu_second": rows / cpu}


def tables(found: Numbers) -> str:
    """The numbers as the tables of the documentation.

    Args:
        found: The content of ``scale.json``.
    """
    parts = [_growth_table(found["growth"]), _same_table(found["same"])]
    if "memory" in found:
        parts = [_memory_table(found["memory"], found.get("score")), *parts]
    return "\n\n".join(map("\n".join, parts))


def _memory_table(fit: Numbers, score: Numbers | None) -> list[str]:
    rows = [("fit, one epoch", fit)]
    if score:
        by = "" if score["trained_on"] == fit["rows"] else f" by a model of {score['trained_on']:,} rows"
        found = f"log-likelihood {score['log_likelihood']:.3f}; truth {score['truth']:.3f}"
        rows.append((f"score{by} ({found})", score))
    title = f"{fit['rows']:,} rows, {fit['gigabytes']:.2f} GB of Parquet"
    lines = [f"| {title} | peak memory | rows per processor second | processor seconds |", "|---|---|---|---|"]
    for name, numbers in rows:
        memory, rate = f"{numbers['peak_memory_mb']:,.0f} MB", f"{numbers['rows_per_cpu_second']:,.0f}"
        lines.append(f"| {name} | {memory} | {rate} | {numbers['cpu_seconds']:,.0f} |")
    return lines


def _same_table(found: Any) -> list[str]:
    lines = [
        f"| {found[0]['rows']:,} rows, log-likelihood | in memory | streamed | standard error |",
        "|---|---|---|---|",
    ]
    for inside, streamed in zip(found[::2], found[1::2], strict=True):
        scores = (inside["log_likelihood"], streamed["log_likelihood"], inside["log_likelihood_se"])
        lines.append(f"| seed {inside['seed']} | " + " | ".join(f"{score:.4f}" for score in scores) + " |")
    return lines


def _growth_table(found: Any) -> list[str]:
    lines = ["| rows | units | steps | nats below the truth | error of the mean | processor seconds |"]
    lines += ["|---|---|---|---|---|---|"]
    for numbers in found:
        name = f"{numbers['rows']:,}" + ", streamed" * numbers["streamed"]
        units, steps = " x ".join(map(str, numbers["widths"][:-1])), f"{numbers['steps']:,}"
        gap = f"{numbers['gap']:.4f} ± {numbers['gap_se']:.4f}"
        cells = (name, units, steps, gap, f"{numbers['rmse_of_mean']:.4f}", f"{numbers['cpu_seconds']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one part and keep its numbers beside those of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=_PARTS, help="Without it, --docs writes what was measured before.")
    parser.add_argument("--rows", type=lambda text: [int(float(part)) for part in text.split(",")], default=[100_000])
    parser.add_argument(
        "--folder", type=Path, help="Of the parts data, memory and score, which need it one after the other."
    )
    parser.add_argument("--output", type=Path, default=Path("results/scale"))
    parser.add_argument("--name", help="Name of the numbers in the file; the part by default.")
    parser.add_argument("--docs", type=Path, help="Page to write the tables into, between its marks.")
    parser.add_argument("--settings", type=json.loads, default={}, help="Of the estimator, as JSON.")
    given = parser.parse_args(arguments)
    path = given.output / "scale.json"
    kept: Numbers = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if given.part == "data":
        given.folder.mkdir(parents=True, exist_ok=True)
        write_rows(given.folder, given.rows[0])
    elif given.part is not None:
        kept[given.name or given.part] = found = _measured(given, kept)
        write_atomically(path, json.dumps(kept, indent=1) + "\n")
        print(json.dumps(found))
    if given.docs is not None:
        write_between(given.docs, "scale", tables(kept))


def _measured(given: argparse.Namespace, kept: Numbers) -> Any:
    """Numbers of a part, with those of other sizes that were kept."""
    if given.part == "memory":
        return memory(given.folder, **given.settings)
    if given.part == "score":
        return scored(given.folder)
    if given.part == "same":
        return same(given.rows[0], **given.settings)
    others = [old for old in kept.get(given.name or given.part, []) if old["rows"] not in given.rows]
    found = [*others, *growth(given.rows, **given.settings)]
    return sorted(found, key=lambda numbers: int(numbers["rows"]))


if __name__ == "__main__":
    main()
