from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mpgelu as mp

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
