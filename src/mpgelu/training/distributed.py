"""One network over several processes: torch's ``DistributedDataParallel``, and what the processes must agree on."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpgelu.errors import MPGELUError, TrainingError
from mpgelu.training.data import Loader, Pair, Rows
from mpgelu.training.interrupts import Interrupts

T = TypeVar("T")
Losses = Callable[..., Tensor]
_BACKENDS = ("gloo", "nccl")  # names that stand in errors of their communication


class OneProcess:
    """Training in this process alone. The interface is that of :class:`ManyProcesses`."""

    is_first = True

    def objective(self, network: nn.Module, likelihood: object, losses: Losses) -> Losses:
        """The losses as they are."""
        return losses

    def mean(self, losses: Tensor) -> Tensor:
        """The losses as they are."""
        return losses

    def batches(
        self, epoch: Iterator[Pair], source: Rows | Loader, interrupts: Interrupts
    ) -> Iterator[tuple[Tensor, ...]]:
        """The batches of an epoch, until an interruption."""
        return takewhile(lambda _: not interrupts.seen, epoch)

    def part(self, pair: Pair, is_whole: bool) -> tuple[Tensor, ...]:
        """All of a batch."""
        return pair

    def from_first(self, make: Callable[[], T]) -> T:
        """What a function gives."""
        return make()


class ManyProcesses:
    """The processes that train one network together, each on its part of every batch.

    Every method is called by all processes at the same time: each of them communicates.

    Args:
        device: Where the network is, and where numbers are exchanged.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0

    def objective(self, network: nn.Module, likelihood: object, losses: Losses) -> Losses:
        """The losses by a ``DistributedDataParallel``, which averages their gradients over the processes.

        Parameters and buffers of all processes become those of the first.
        """
        modules = [module for module in (network, likelihood) if isinstance(module, nn.Module)]
        for buffer in (buffer for module in modules for buffer in module.buffers()):
            dist.broadcast(buffer, src=0)
        return nn.parallel.DistributedDataParallel(_Objective(modules, losses))

    def mean(self, losses: Tensor) -> Tensor:
        """Mean over the processes: the loss of the whole batch, and not a number if it is so anywhere."""
        total = losses.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def batches(
        self, epoch: Iterator[Pair], source: Rows | Loader, interrupts: Interrupts
    ) -> Iterator[tuple[Tensor, ...]]:
        """Parts of the batches of an epoch; ends for all when all have none left, or one was interrupted."""
        while True:
            pair = next(epoch, None)
            more, interrupted = self._sum(pair is not None, interrupts.seen)
            if interrupted:
                interrupts.seen = True
            if interrupted or not more:
                return
            yield self.part(pair or source.first, source.is_whole, idle=pair is None)

    def part(self, pair: Pair, is_whole: bool, idle: bool = False) -> tuple[Tensor, ...]:
        """Rows of this process and the weight of their sum, so that the mean over processes is that over all rows.

        Args:
            pair: Features and targets.
            is_whole: Whether every process holds the same rows, of which each takes a part.
            idle: Whether this process has no rows, as when its loader has fewer batches than another's.
        """
        X, y = pair
        rows = y.shape[-1]
        start, stop = (rows * rank // self.size for rank in (self.rank, self.rank + 1)) if is_whole else (0, rows)
        total = rows if is_whole else self._sum(0 if idle else rows)[0]
        weight = y.new_tensor(self.size / total)
        if idle or start == stop:  # a network takes no empty batch: one row, which does not count
            start, stop, weight = 0, 1, torch.zeros_like(weight)
        return X[..., start:stop, :], y[..., start:stop], weight

    def from_first(self, make: Callable[[], T]) -> T:
        """What a function gives in the first process, or the error that it raises there."""
        sent: list[Any] = [None]
        if self.is_first:
            try:
                sent = [make()]
            except MPGELUError as error:
                sent = [error]
        dist.broadcast_object_list(sent, src=0, device=self.device)
        if isinstance(sent[0], MPGELUError):
            raise sent[0]
        received: T = sent[0]
        return received

    def _sum(self, *numbers: float) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return list(total.tolist())


class _Objective(nn.Module):
    """The losses as a module with all parameters, for ``DistributedDataParallel``; buffers never change."""

    def __init__(self, modules: list[nn.Module], losses: Losses) -> None:
        super().__init__()
        self._parameters_of_all = nn.ParameterList([p for module in modules for p in module.parameters()])
        self._losses = losses

    def forward(self, *batch: Tensor) -> Tensor:
        return self._losses(*batch)


@contextmanager
def cooperating(device: torch.device, remedy: str) -> Iterator[OneProcess | ManyProcesses]:
    """The processes that train together.

    Under ``torchrun`` with more than one process, or where the caller has initialised a process group of more than one,
    these are all of its processes; otherwise this one alone.

    Args:
        device: Where the network is: nccl for CUDA, gloo for others.
        remedy: What to do when a process is lost, as the end of a sentence.

    Raises:
        TrainingError: Another process has ended.
    """
    if not _in_group(device):
        yield OneProcess()
        return
    try:
        yield ManyProcesses(device)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(name in str(error).lower() for name in _BACKENDS):
            raise
        raise TrainingError(
            f"fit: process {dist.get_rank()} of {dist.get_world_size()} lost contact with the others, because one has "
            f"ended or cannot be reached ({' '.join(str(error).split())[:120]}); {remedy}"
        ) from error


def _in_group(device: torch.device) -> bool:
    """Whether there are other processes, after beginning a process group where torchrun has started several.

    A group that began here stays until the process ends: torch cannot begin it a second time.
    """
    if not dist.is_available():
        return False
    if not dist.is_initialized() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        atexit.register(_leave)
    return dist.is_initialized() and dist.get_world_size() > 1


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
