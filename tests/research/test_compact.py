"""The programs behind docs/compact.md in smoke mode, and the method of the comparison."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from made_up import publish
from mpgelu.estimators import distillation
from mpgelu.estimators.regressor import MPGELURegressor
from mpgelu.research import compact, modes
from mpgelu.research.compare import compact as method
from mpgelu.research.compare.methods import METHODS
from mpgelu.research.compare.run import Task, evaluate
from mpgelu.research.datasets import load_uci
from mpgelu.research.store import Store

QUICK: dict[str, Any] = {"steps": 20, "folds": 2, "hidden": (8,), "sigma": 0.4, "diverse": False}
PAGE = "before\n<!-- {0}:start -->\nold\n<!-- {0}:end -->\nafter\n"

COMPARED: list[dict[str, Any]] = [
    {"method": method, "dataset": "yacht", "split": split, "log_likelihood": likelihood, "crps": crps, "rmse": rmse}
    for split, more in ((5, -0.25), (6, 0.25))
    for method, likelihood, crps, rmse in (
        ("mpgelu", 1.5 + more, 0.1, 0.2),
        ("mpgelu-compact", 1.4 + more, 0.11, 0.19),
        ("deep-ensemble", 0.5, 0.2, 0.18),
    )
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_STEPS", 10)
    monkeypatch.setattr(distillation, "_MADE_ROWS", 100)
    for name, value in (("_ROWS", 20), ("_SECONDS", 0.0), ("_CALLS", 2), ("_EFFORTS", (0.5, 1.0))):
        monkeypatch.setattr(compact, name, value)


@pytest.mark.filterwarnings("ignore:distill. the network predicts")  # after ten steps
def test_measurements_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, page = str(publish(tmp_path, monkeypatch)), tmp_path / "page.md"
    page.write_text(PAGE.format("compact") + PAGE.format("compact-report"))
    compared = tmp_path / "compare"
    for record in COMPARED:
        Store(compared / "records.jsonl").append(record)
    measured: list[str] = []

    def quick(dataset: str, split: int, **chosen: object) -> dict[str, Any]:
        measured.append(dataset)
        return measure(dataset, split, data=data, fitted=tmp_path / "fitted", alone=True, **QUICK)

    measure = compact.measure
    monkeypatch.setattr(compact, "measure", quick)
    for _ in range(2):  # the second finds everything measured
        where = ["-o", str(tmp_path / "out"), "--page", str(page), "--compare", str(compared)]
        compact.main(["--sets", "yacht", "--splits", "0", *where])
    assert measured == ["yacht"]
    text = page.read_text()
    assert "old" not in text
    assert re.search(r"\| yacht 0 \| -?\d+\.\d+ \| -?\d+\.\d+ \| [+-]", text)
    assert re.search(r"\| yacht 0 \| (0.5|1) \|( -?\d+\.\d+ \|){8}", text)
    assert re.search(r"\| one row alone in onnxruntime, 41 nodes: .* \| \d+ us \|", text)
    assert len(re.findall(r"\| (?:exact|diagonal) \| \d+\.\d \|( -?\d+\.\d+ \|){2}", text)) == 2
    assert "| yacht [2] | 1.500 | 1.400 | 0.500 | -0.100 | +10.0% | -5.0% | log-likelihood, CRPS |" in text
    assert "| mean | | | | -0.100 (worst -0.100) | +10.0% | -5.0% | |" in text
    assert len(list((tmp_path / "fitted").iterdir())) == 1


def test_the_figure_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("modes"))
    before = modes.branches
    monkeypatch.setattr(modes, "branches", lambda rows, seed: before(min(rows, 200), seed))
    modes.main(["-o", str(tmp_path), "--page", str(page), "--epochs", "1"])
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")
    assert "| mixture of five |" in page.read_text()


def test_branches_are_the_inverse_of_a_curve() -> None:
    x, y = modes.branches(500, 0)
    x, y = (x[:, 0] + 2) / 4, (y + 2) / 4
    assert ((y + 0.3 * torch.sin(2 * np.pi * y)) - x).std() == pytest.approx(0.03, rel=0.15)


@pytest.mark.filterwarnings("ignore:distill. the network predicts")  # after ten steps
def test_the_method_of_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(publish(tmp_path, monkeypatch))

    class Quick(MPGELURegressor):
        def __init__(self, random_state: int | None = None) -> None:
            super().__init__(**QUICK, random_state=random_state)

    class Module:
        MPGELURegressor = Quick

    monkeypatch.setattr(method, "import_module", lambda name: Module)
    record = evaluate(Task("mpgelu-compact", "yacht", 0), load_uci("yacht", data))
    assert np.isfinite(record["log_likelihood"])
    assert record["teacher_cpu_seconds"] > 0
    assert record["distill_cpu_seconds"] > 0
    assert METHODS["mpgelu-compact"].ours
