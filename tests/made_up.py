"""Made-up records and a made-up data set, for the tests of the experiments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import mpgelu
from mpgelu.research import datasets
from mpgelu.research.paper.tables import compare, paper_table, summarise

Record = dict[str, Any]
DASH = "\N{EN DASH}"
SPLITS, ROWS, TESTED = 4, 60, 6  # of the made-up data set


def final_record(**changes: Any) -> Record:
    record = {
        **{"kind": "test", "dataset": "boston", "nonlinearity": "mpgelu", "outputs": 2, "covariance": "full"},
        **{"seed": 0, "split": 0, "rate": 0.01, "rate_from": "grid over 20 splits", "nll": 1.2, "rmse": 0.8},
        **{"nll_mixture": 1.1, "nll_gaussian": 1.3, "crps": 0.4, "coverage90": 0.9},
        **{"versions": {"torch": "2"}, "seconds": 1.5},
    }
    return record | changes


def validation_record(**changes: Any) -> Record:
    fields = ("dataset", "nonlinearity", "outputs", "covariance", "seed", "split", "rate", "nll")
    return {"kind": "validation"} | {field: final_record()[field] for field in fields} | changes


def runtime_record(runtime_s: float | None, **changes: Any) -> Record:
    return validation_record(kind="runtime", nll=None, runtime_s=runtime_s) | changes


def splits(nll: Iterable[float], **changes: Any) -> list[Record]:
    return [final_record(split=split, nll=value, **changes) for split, value in enumerate(nll)]


def around(mean: float, se: float) -> list[float]:
    """Two splits with this mean and this standard error."""
    return [mean - se, mean + se]


def twenty(nll: float, **changes: Any) -> list[Record]:
    return splits([nll] * 20, **changes)


def compared(records: Sequence[Record]) -> pd.DataFrame:
    return compare(summarise(pd.DataFrame(records)))


def only_row(table: pd.DataFrame, **where: Any) -> pd.Series:
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


BOSTON: Record = {"outputs": 2, "covariance": "full", "dataset": "boston", "nonlinearity": "mpgelu"}


def the_papers_numbers() -> list[Record]:
    """Records that repeat the paper's means in every cell, with 20 splits."""
    records = []
    for row in paper_table().to_dict("records"):
        cell = {field: row[field] for field in ("outputs", "covariance", "dataset", "nonlinearity")}
        records += [*twenty(row["nll"], rmse=row["rmse"], **cell), runtime_record(row["runtime_s"], **cell)]
    return records


def pairs(differences: Iterable[float | None], **changes: Any) -> list[Record]:
    """Both networks on each split, the NLL of MP-GELU larger by the difference."""
    records = []
    for split, difference in enumerate(differences):
        nll = None if difference is None else 5.0 + difference
        records.append(final_record(split=split, nll=nll, **changes))
        records.append(final_record(split=split, nll=5.0, nonlinearity="relu", rate=0.05, **changes))
    return records


def markdown_cells(text: str) -> list[list[str]]:
    """The cells of the Markdown table in a text, without the line under the head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in lines)
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    assert set(rows.pop(1)) == {"---"}
    return rows


def publish(
    root: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = ("yacht",), splits: int = SPLITS
) -> Path:
    """Put a small data set in the place of published ones, here and in processes started from now on.

    New processes find a package that differs from the real one in the list of published files alone.

    Returns:
        The folder to give as ``data``.
    """
    contents = {
        f"{datasets.SETS[name].folder}/data/{file}": text for name in names for file, text in _files(splits).items()
    }
    for file, text in contents.items():
        (root / "UCI_Datasets" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "UCI_Datasets" / file).write_text(text)
    checksums = {file: sha256(text.encode()).hexdigest() for file, text in contents.items()}
    monkeypatch.setattr(datasets, "_checksums", lambda: checksums)
    package, original = root / "site" / "mpgelu", Path(mpgelu.__file__).parent
    (package / "research").mkdir(parents=True)
    for path in (*original.iterdir(), *(original / "research").iterdir()):
        if path.name not in ("research", "uci_sha256.txt", "__pycache__"):
            (package / path.relative_to(original)).symlink_to(path)
    lines = [f"{digest}  UCI_Datasets/{file}\n" for file, digest in checksums.items()]
    (package / "research" / "uci_sha256.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", os.fspath(package.parent))
    monkeypatch.delenv("MPGELU_DATA", raising=False)
    return root


def _files(splits: int) -> dict[str, str]:
    """A noisy function of three features in the published layout; the target is the last column."""
    generator = np.random.default_rng(0)
    X = generator.normal(5, 2, (ROWS, 3))
    y = X[:, 0] * X[:, 1] + generator.normal(0, 1, ROWS)
    files = {"data.txt": _lines(np.column_stack([X, y])), "n_splits.txt": f"{splits}\n"}
    files |= {"index_features.txt": _lines(np.arange(3)), "index_target.txt": _lines(np.array([3]))}
    for split in range(splits):
        order = generator.permutation(ROWS)
        files[f"index_test_{split}.txt"] = _lines(order[:TESTED])
        files[f"index_train_{split}.txt"] = _lines(order[TESTED:])
    return files


def _lines(values: Any) -> str:
    return "".join(" ".join(map(str, np.atleast_1d(row))) + "\n" for row in values)
