"""Checkpoints of the training of an ensemble: one file for each kind of networks."""

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
    """Writes the state of a training run to a file, and restores it if the file exists.

    The name of the file contains a hash of the data, the settings and the initial weights, so that only the same run
    continues from it. Incomplete files of killed runs are removed from the folder.

    Args:
        folder: Folder of the checkpoints.
        trainer: Optimiser of the networks, whose state is written and restored.
        rows: Training data, for the hash.
        settings: Settings of the training, for the hash.

    Raises:
        DataError: The folder is not writable, or the file is damaged.
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
        """Write the state, if the last write is more than 30 seconds ago."""
        if time.monotonic() - self.written > _SECONDS_BETWEEN_CHECKPOINTS:
            self.write()

    def write(self) -> None:
        """Write the state."""
        state = {name: tensor.cpu() for name, tensor in self.trainer.state().items()}
        write_arrays(self.path, "checkpoint", state, {"taken": self.trainer.taken})
        self.written = time.monotonic()

    def _resume(self, steps: int) -> None:
        """Restore the state in the file.

        Args:
            steps: Number of steps in the settings, which the state must not exceed.

        Raises:
            DataError: The file is damaged, or its arrays do not fit the networks.
        """
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
        """Raise a :class:`DataError` if an array is missing, or has another shape or dtype than :meth:`write` gives."""
        wanted = self.trainer.state()
        for name, like in wanted.items():
            found = arrays.get(name, torch.empty(0, device="cpu"))
            if (found.shape, found.dtype) != (like.shape, like.dtype):
                raise DataError(f"its array {name!r} is missing, or has another shape or type")


def _fingerprint(rows: Rows, settings: Settings, trainer: Steps) -> str:
    """Return a hash of data, settings and initial weights; ``network`` and ``likelihood`` enter by the weights only."""
    numbers = {name: value for name, value in vars(settings).items() if name not in ("network", "likelihood")}
    digest = sha256(repr(sorted(numbers.items(), key=str)).encode())
    for tensor in (rows.X, rows.y, rows.weights, *trainer.state().values()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
