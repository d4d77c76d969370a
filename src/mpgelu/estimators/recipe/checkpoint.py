"""The state of a training run in a file, from which the same call goes on."""

from __future__ import annotations

import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from mpgelu.estimators.recipe.settings import Settings
from mpgelu.estimators.recipe.steps import Steps
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.training import Best

_SECONDS_BETWEEN_CHECKPOINTS = 30


class Keeper:
    """Keeps the state of a training run in a file named after it, and takes it up again if it is there."""

    def __init__(self, folder: Path, trainer: Steps, best: Best, data: tuple[Tensor, ...], settings: Settings) -> None:
        run = _fingerprint(data, settings, trainer)
        self.path, self.trainer, self.best = folder / f"training-{run[:16]}.safetensors", trainer, best
        self.written = time.monotonic()
        if self.path.exists():
            arrays, about = read_arrays(self.path, "checkpoint")
            best.load(arrays)
            trainer.load(arrays, about["taken"])

    def write_now_and_then(self) -> None:
        """Write if the last time is long enough ago."""
        if time.monotonic() - self.written > _SECONDS_BETWEEN_CHECKPOINTS:
            self.write()

    def write(self) -> None:
        """Write the state."""
        arrays = self.trainer.state() | self.best.arrays()
        write_arrays(self.path, "checkpoint", arrays, {"taken": self.trainer.taken})
        self.written = time.monotonic()


def _fingerprint(data: tuple[Tensor, ...], settings: Settings, trainer: Steps) -> str:
    """A hash of everything that the result depends on, the starting weights included."""
    digest = sha256(repr(asdict(settings)).encode())
    for tensor in (*data, *trainer.state().values()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
