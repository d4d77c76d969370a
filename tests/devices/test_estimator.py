from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import mpgelu as mp
from mpgelu.tables import TableModel

SCRIPT = Path(__file__).parent / "accelerator.py"
X = np.linspace(0, 1, 40)[:, None]
Y = np.sin(5 * X[:, 0])


def on_accelerator(rows_on: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), rows_on], capture_output=True, text=True, check=False)


def test_every_kind_of_networks_trains_on_another_device() -> None:
    done = on_accelerator("elsewhere")
    assert done.returncode == 0, done.stderr


def test_the_check_sees_a_tensor_elsewhere() -> None:
    done = on_accelerator("cpu")
    assert done.returncode != 0
    assert "found at least two devices" in done.stderr, done.stderr


@pytest.mark.parametrize(("device", "words"), [("meta", "holds no values"), ("nonsense", "nonsense"), (1.5, "1.5")])
def test_devices_that_cannot_train(device: object, words: str) -> None:
    with pytest.raises(mp.InputError, match=words):
        mp.MPGELURegressor(steps=2, device=device).fit(X, Y)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(mp.InputError, match="cannot use device 'cuda' here: Torch not compiled with CUDA"):
        mp.MPGELURegressor(steps=2, device="cuda").fit(X, Y)


def test_a_device_is_kept_in_the_file(tmp_path: Path) -> None:
    model = mp.MPGELURegressor(steps=5, folds=2, hidden=(4,), random_state=0, device=torch.device("cpu")).fit(X, Y)
    model.save(tmp_path / "model.mpgelu")
    loaded = mp.load(tmp_path / "model.mpgelu")
    assert loaded.device == "cpu"
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


def test_the_default_device_of_torch_changes_nothing(tmp_path: Path) -> None:
    """With "meta" as default, every tensor that is created without a device would have no values."""
    settings: dict[str, Any] = {"hidden": (8,), "steps": 10, "folds": 2, "random_state": 0}

    def results(folder: Path) -> list[Any]:
        model = mp.MPGELURegressor(**settings).fit(X, Y)
        folder.mkdir()
        model.save(folder / "model.mpgelu")
        loaded: mp.MPGELURegressor = mp.load(folder / "model.mpgelu")
        numbers = [*loaded.predict_parts(X), *model.predict_interval(X), model.predict(X, input_std=0.1)]
        numbers += [model.calibrate(X, Y).predict_interval(X)[0], mp.attribute(loaded, X[:3]).to_numpy()]
        audit = mp.verify(loaded, X[:2], draws=200)
        return [*numbers, str(audit)]

    expected = results(tmp_path / "before")
    with torch.device("meta"):
        found = results(tmp_path / "during")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stream_is_trained_on_the_same_whatever_the_default_device(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(generator.normal(size=(1200, 2)), columns=["a", "b"])
    frame.assign(y=frame["a"] + 0.1 * generator.normal(size=1200)).to_parquet(tmp_path / "table.parquet")

    def model() -> TableModel:
        return TableModel.fit(tmp_path, "y", stream=True, steps=5, folds=2, hidden=(8,), random_state=0)

    expected = model().predict(frame)
    with torch.device("meta"):
        found = model().predict(frame)
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=0)
