"""Checkpoints of ``fit``: the state of a run in a file, from which the same call continues."""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpgelu.errors import DataError
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.storage.files import check_writable
from mpgelu.storage.nested import pack, unpack
from mpgelu.storage.schema import checked
from mpgelu.training.best import Best
from mpgelu.training.data import Loader, Rows
from mpgelu.training.distributed import ManyProcesses, OneProcess
from mpgelu.training.trainer import Trainer

_KIND = "training checkpoint"
_REMEDY = "delete it to start anew, or give fit(checkpoint=...) the name of another file"
_LARGEST_SHARE = 0.1  # largest fraction of the time that is spent writing


class Checkpoint:
    """Writes the state of a run to a file between epochs, and restores it if the file exists.

    The file contains parameters, state of the optimiser and the scheduler, best state, random generators and losses, as
    safetensors with a description of the run; it contains no code. A run is continued only if network shapes,
    likelihood, optimiser, scheduler, data (by their hash) and settings are the same. Only the first of several
    processes reads and writes the file. Writing takes at most a tenth of the time: if epochs are short, not every epoch
    is written.

    Args:
        path: File of the checkpoint.
        network: Network that is trained.
        likelihood: Likelihood; its state is included if it is a module.
        trainer: Trainer of the run.
        best: Record of the best states.
        rows: Source of the batches.
        settings: Further numbers that must be equal for a run to be continued, by name.
        processes: The processes that train together.

    Raises:
        DataError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        network: nn.Module,
        likelihood: object,
        trainer: Trainer,
        best: Best,
        rows: Rows | Loader,
        settings: Mapping[str, Any],
        processes: OneProcess | ManyProcesses,
    ) -> None:
        self._path, self._trainer, self._best, self._rows, self._processes = path, trainer, best, rows, processes
        self._modules = {"network": network}
        if isinstance(likelihood, nn.Module):
            self._modules["likelihood"] = likelihood
        self._run = _described(self._modules, likelihood, trainer, rows, settings)
        self._written, self._took = -float("inf"), 0.0
        processes.from_first(lambda: check_writable(path))

    def resume(self) -> list[Tensor]:
        """Restore the state in the file, if it exists.

        Returns:
            The losses ``(*models,)`` of the completed epochs; an empty list without a file.

        Raises:
            DataError: The file is damaged, or belongs to a different run.
        """
        state = self._processes.from_first(self._read)
        if state is None:
            return []
        try:
            return self._taken_up(state)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise DataError(f"{self._path} holds a state that cannot be taken up ({words}); {_REMEDY}") from error

    def _taken_up(self, state: Mapping[str, Any]) -> list[Tensor]:
        """Load every part of a state, and return the losses of the completed epochs, ``(*models,)`` each."""
        for name, module in self._modules.items():
            module.load_state_dict(state[name])
        self._trainer.load(state["trainer"])
        self._best.load({name: tensor.to(self._trainer.device) for name, tensor in state["best"].items()})
        if self._rows.generator is not None and state["order"] is not None:
            self._rows.generator.set_state(state["order"])
        if self._processes.is_first:
            _set_random_state(self._trainer.device, state["random"])
        return [losses.to(self._trainer.device) for losses in state["history"]]

    def write_now_and_then(self, history: list[Tensor]) -> None:
        """Write the state between two epochs, if the last write took at most a tenth of the time since then.

        Args:
            history: Losses of the completed epochs, ``(*models,)`` each.
        """
        if self._took <= _LARGEST_SHARE * (time.monotonic() - self._written):
            self.write(history)

    def write(self, history: list[Tensor]) -> None:
        """Write the state between two epochs.

        Args:
            history: Losses of the completed epochs, ``(*models,)`` each.
        """
        if not self._processes.is_first:
            return
        started = time.monotonic()
        order = self._rows.generator
        state = {name: module.state_dict() for name, module in self._modules.items()} | {
            "trainer": self._trainer.state(),
            "best": self._best.arrays(),
            "order": None if order is None else order.get_state(),
            "random": _random_state(self._trainer.device),
            "history": history,
        }
        arrays, text = pack(state, "fit: the state of the run")
        write_arrays(self._path, _KIND, arrays, {"run": self._run, "state": text})
        self._written = time.monotonic()
        self._took = self._written - started

    def _read(self) -> dict[str, Any] | None:
        """Return the state in the file, or ``None`` if the file does not exist."""
        if not self._path.exists():
            return None
        arrays, about = read_arrays(self._path, _KIND, _REMEDY)
        try:
            checked(about, {"run": dict, "state": dict}, "the checkpoint")
            _check_same(about["run"], self._run)
            state: dict[str, Any] = unpack(arrays, about["state"])
            parts = {*self._modules, "trainer", "best", "order", "random", "history"}
            checked(state, dict.fromkeys(parts, object) | {"history": [object]}, "its state")
        except DataError as error:
            raise DataError(f"{self._path} is not a checkpoint of this fit: {error}; {_REMEDY}") from error
        return state


def _described(
    modules: Mapping[str, nn.Module],
    likelihood: object,
    trainer: Trainer,
    rows: Rows | Loader,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what must be equal for a run to be continued; functions such as ``penalty`` cannot be compared."""
    arrays = {
        f"{name}.{key}": f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, module in modules.items()
        for key, tensor in module.state_dict().items()
    }
    return {
        "likelihood": type(likelihood).__name__,
        "optimizer": type(trainer.optimizer).__name__,
        "scheduler": type(trainer.scheduler).__name__,
        "data": _digest(rows.X, rows.y) if isinstance(rows, Rows) else "a loader",
        **settings,
        **arrays,
    }


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a :class:`DataError` that names the first difference between two descriptions of runs."""
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise DataError(
                f"its {name} is {found.get(name, 'missing')}, that of this fit {wanted.get(name, 'missing')}"
            )


def _digest(*tensors: Tensor) -> str:
    """Return the shape of the first tensor and a hash of the values of all."""
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return f"{tuple(tensors[0].shape)} of hash {digest.hexdigest()[:16]}"


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's default generators, which random ``moments`` or a shuffling loader may use."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_random_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Restore states that :func:`_random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
