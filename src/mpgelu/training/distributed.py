"""Training of one network by several processes: ``DistributedDataParallel``, and agreement on losses and interrupts."""

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
_BACKENDS = ("gloo", "nccl")  # names by which errors of communication are recognised


class OneProcess:
    """Training in this process alone, with the interface of :class:`ManyProcesses`."""

    is_first = True

    def objective(self, network: nn.Module, likelihood: object, losses: Losses) -> Losses:
        """Return the losses unchanged."""
        return losses

    def mean(self, losses: Tensor) -> Tensor:
        """Return the losses unchanged."""
        return losses

    def batches(
        self, epoch: Iterator[Pair], source: Rows | Loader, interrupts: Interrupts
    ) -> Iterator[tuple[Tensor, ...]]:
        """Return the batches of an epoch up to an interruption."""
        return takewhile(lambda _: not interrupts.seen, epoch)

    def part(self, pair: Pair, is_whole: bool) -> tuple[Tensor, ...]:
        """Return the whole batch."""
        return pair

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the value of a function."""
        return make()


class ManyProcesses:
    """The processes that train one network together, each on its part of every batch.

    Methods communicate, so that all processes must call them in the same order.

    Args:
        device: Device of the network, on which numbers are exchanged.

    Attributes:
        rank: Number of this process, from 0.
        size: Number P of processes.
        is_first: Whether this is the process of rank 0, which reads and writes files and shows progress.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0

    def objective(self, network: nn.Module, likelihood: object, losses: Losses) -> Losses:
        """Return the losses as a ``DistributedDataParallel`` module, which averages gradients over the processes.

        Parameters and buffers of the first process are copied to all others.

        Args:
            network: Network that is trained.
            likelihood: Likelihood; its parameters are averaged too if it is a module.
            losses: Function from a part of a batch, with its weight, to the loss of each model.
        """
        modules = [module for module in (network, likelihood) if isinstance(module, nn.Module)]
        for buffer in (buffer for module in modules for buffer in module.buffers()):
            dist.broadcast(buffer, src=0)
        return nn.parallel.DistributedDataParallel(_Objective(modules, losses))

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of losses ``(*models,)`` over the processes, NaN if one of them is.

        With the weights of :meth:`part` it is the mean loss over all rows of the batch.
        """
        total = losses.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def batches(
        self, epoch: Iterator[Pair], source: Rows | Loader, interrupts: Interrupts
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of the batches of an epoch that belong to this process.

        All processes yield the same number of parts: a process whose loader has ended yields rows of weight zero until
        the loaders of all others have ended, too. All stop after the same batch if one of them is interrupted.

        Args:
            epoch: Batches of this process.
            source: Their source.
            interrupts: Interrupts of this process; set if another process was interrupted.
        """
        while True:
            pair = next(epoch, None)
            more, interrupted = self._sum(pair is not None, interrupts.seen)
            if interrupted:
                interrupts.seen = True
            if interrupted or not more:
                return
            yield self.part(pair or source.first, source.is_whole, idle=pair is None)

    def part(self, pair: Pair, is_whole: bool, idle: bool = False) -> tuple[Tensor, ...]:
        r"""Return the rows of this process and the weight of the sum of their losses.

        The weight is :math:`P / B` for P processes and B rows in all parts together. The mean of the weighted sums over
        the processes is then the mean loss over all rows, also if the parts have different sizes.

        Args:
            pair: Features ``(*models, rows, n)`` and targets ``(*models, rows)``.
            is_whole: Whether all processes hold the same rows, of which each takes a part, or different ones.
            idle: Whether this process has no rows because its loader has fewer batches than another.

        Returns:
            Features, targets and the weight, a scalar; it is zero if there are no rows.
        """
        X, y = pair
        rows = y.shape[-1]
        start, stop = (rows * rank // self.size for rank in (self.rank, self.rank + 1)) if is_whole else (0, rows)
        total = rows if is_whole else self._sum(0 if idle else rows)[0]
        weight = y.new_tensor(self.size / total)
        if idle or start == stop:  # networks do not accept empty batches: one row of weight zero
            start, stop, weight = 0, 1, torch.zeros_like(weight)
        return X[..., start:stop, :], y[..., start:stop], weight

    def from_first(self, make: Callable[[], T]) -> T:
        """Call a function in the first process, and return its value, or raise its error, in all processes."""
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
        """Return the sums of numbers over the processes."""
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
    """Return a context with the processes that train together.

    They are all processes of the process group, if the caller initialised one or ``torchrun`` started several
    processes; otherwise this process alone.

    Args:
        device: Device of the network. Processes communicate by nccl for CUDA devices and by gloo for others.
        remedy: Advice for the loss of a process, as the end of a sentence.

    Raises:
        TrainingError: Communication failed, for example because another process has ended.
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
    """Return whether there are other processes; initialises a process group if ``torchrun`` started several.

    A group that is initialised here lasts until the process ends, because torch cannot initialise it a second time.
    """
    if not dist.is_available():
        return False
    if not dist.is_initialized() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        atexit.register(_leave)
    return dist.is_initialized() and dist.get_world_size() > 1


def _leave() -> None:
    """Destroy the process group at the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
