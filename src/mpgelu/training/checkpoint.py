"""The state of a run of ``fit`` in a file, from which the same call goes on."""

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
_LARGEST_SHARE = 0.1  # of the time that writing may take


class Checkpoint:
    """Keeps the state of a run in a file after its epochs, and takes it up if the file is there.

    The first of several processes reads and writes it. Writing takes at most a tenth of the time: a run of short
    epochs is not written after each of them.

    Args:
        path: File.
        network: Network.
        likelihood: Likelihood, a module or not.
        trainer: Of the run.
        best: Of the run.
        rows: Where its batches come from.
        settings: Numbers that the run depends on.
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
        """Take up the state in the file, if there is one; the losses of the epochs that it has behind it.

        Raises:
            DataError: The file is damaged, or of another run.
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
        """Load every part of a state; the losses of the epochs behind it."""
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
        """Write the state between two epochs unless the last time is too short ago.

        Args:
            history: Losses of the epochs so far.
        """
        if self._took <= _LARGEST_SHARE * (time.monotonic() - self._written):
            self.write(history)

    def write(self, history: list[Tensor]) -> None:
        """Write the state between two epochs.

        Args:
            history: Losses of the epochs so far.
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
        """The state in the file, or ``None`` where there is none."""
        if not self._path.exists():
            return None
        arrays, about = read_arrays(self._path, _KIND, _REMEDY)
        try:
            checked(about, {"run": dict, "state": dict}, "the checkpoint")
            _check_same(about["run"], self._run)
            state: dict[str, Any] = unpack(arrays, about["state"])
            parts = {*self._modules, "trainer", "best", "order", "random", "history"}
            checked(state, dict.fromkeys(parts, object), "its state")
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
    """What must be the same when the run goes on, as far as it can be told."""
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
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise DataError(
                f"its {name} is {found.get(name, 'missing')}, that of this fit {wanted.get(name, 'missing')}"
            )


def _digest(*tensors: Tensor) -> str:
    """Shape and a hash of all numbers."""
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return f"{tuple(tensors[0].shape)} of hash {digest.hexdigest()[:16]}"


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's own generators, which a ``moments`` that draws, or a shuffling loader, uses."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_random_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
