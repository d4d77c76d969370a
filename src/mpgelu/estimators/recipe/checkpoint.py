"""The state of a training run in a file, from which the same call goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from mpgelu.errors import DataError
from mpgelu.estimators.recipe.folds import Rows
from mpgelu.estimators.recipe.settings import Settings
from mpgelu.estimators.recipe.steps import Steps
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.storage.files import check_writable, remove_abandoned
from mpgelu.storage.schema import checked

_SECONDS_BETWEEN_CHECKPOINTS = 30


class Keeper:
    """Keeps the state of a training run in a file named after it, and takes it up again if it is there.

    What killed runs left half-written in the folder is removed.

    Raises:
        DataError: The folder cannot be written to, or the file in it is damaged.
    """

    def __init__(self, folder: Path, trainer: Steps, rows: Rows, settings: Settings) -> None:
        run = _fingerprint(rows, settings, trainer)
        self.path, self.trainer = folder / f"training-{run[:16]}.safetensors", trainer
        self.written = time.monotonic()
        check_writable(self.path)
        remove_abandoned(folder, "training-*.safetensors")
        if self.path.exists():
            self._resume(settings.steps)

    def write_now_and_then(self) -> None:
        """Write if the last time is long enough ago."""
        if time.monotonic() - self.written > _SECONDS_BETWEEN_CHECKPOINTS:
            self.write()

    def write(self) -> None:
        """Write the state."""
        state = {name: tensor.cpu() for name, tensor in self.trainer.state().items()}
        write_arrays(self.path, "checkpoint", state, {"taken": self.trainer.taken})
        self.written = time.monotonic()

    def _resume(self, steps: int) -> None:
        """Take up the state in the file."""
        remedy = "delete it, and the same fit starts anew"
        arrays, about = read_arrays(self.path, "checkpoint", remedy)
        try:
            taken = checked(about, {"taken": int}, "the checkpoint")["taken"]
            if not 0 <= taken <= steps:
                raise DataError(f"it took {taken} steps of {steps}")
            self._check(arrays)
        except DataError as error:
            raise DataError(f"{self.path} is not a checkpoint of this fit: {error}; {remedy}") from error
        self.trainer.load(arrays, taken)

    def _check(self, arrays: Mapping[str, Tensor]) -> None:
        """Refuse arrays that are not those of :meth:`write`."""
        wanted = self.trainer.state()
        for name, like in wanted.items():
            found = arrays.get(name, torch.empty(0))
            if (found.shape, found.dtype) != (like.shape, like.dtype):
                raise DataError(f"its array {name!r} is missing, or has another shape or type")


def _fingerprint(rows: Rows, settings: Settings, trainer: Steps) -> str:
    """A hash of everything that the result depends on, the starting weights included."""
    numbers = {name: value for name, value in vars(settings).items() if name not in ("network", "likelihood")}
    digest = sha256(repr(sorted(numbers.items(), key=str)).encode())
    for tensor in (rows.X, rows.y, rows.weights, *trainer.state().values()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
