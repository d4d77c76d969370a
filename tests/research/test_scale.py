"""The program that measures how far it goes, on tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from mpgelu.research import scale

TINY = {"hidden": (8,), "steps": 20, "noise": "homoscedastic"}


def test_the_truth_of_the_synthetic_problem() -> None:
    frame = scale.rows_of(3, 4000)
    X, y = frame[scale.NAMES].to_numpy(), frame["y"].to_numpy()
    z = (y - scale.function(X)) / scale.noise_std(X)
    assert abs(z.mean()) < 4 / np.sqrt(4000)
    assert abs(z.std() - 1) < 4 / np.sqrt(2 * 4000)
    np.testing.assert_allclose(scale.true_log_density(frame), norm.logpdf(y, scale.function(X), scale.noise_std(X)))


def test_every_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scale, "_TEST_ROWS", 300)
    monkeypatch.setattr(scale, "_ROWS_OF_FILE", 700)
    monkeypatch.setattr(scale, "_ROWS_OF_GROUP", 200)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    common = ["--output", str(tmp_path / "out"), "--settings", json.dumps(TINY)]
    for part, rows in (("growth", "1200"), ("growth", "1000"), ("same", "1500")):
        scale.main(["--part", part, "--rows", rows, *common])
    for part in ("data", "memory", "score"):
        scale.main(["--part", part, "--rows", "1500", "--folder", str(tmp_path / "data"), *common])
    page = tmp_path / "page.md"
    page.write_text("<!-- scale:start -->\n<!-- scale:end -->\n")
    scale.main(["--output", str(tmp_path / "out"), "--docs", str(page)])
    assert "| fit, one epoch |" in page.read_text()
    assert "| 1,000 | 8 | 4 |" in page.read_text()
    found = json.loads((tmp_path / "out" / "scale.json").read_text())
    assert [numbers["rows"] for numbers in found["growth"]] == [1000, 1200]  # kept from the run before, in order
    assert [(numbers["seed"], numbers["streamed"]) for numbers in found["same"]] == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    assert found["memory"]["rows"] == found["score"]["rows"] == 1500
    assert found["memory"]["peak_memory_mb"] > 50
    assert found["score"]["log_likelihood"] < found["score"]["truth"]
    assert not list(tmp_path.glob("mpgelu-scale-*"))  # the data are removed
    assert "log_likelihood" in capsys.readouterr().out
