"""Training runs that one process and several must agree on; a program for torchrun, and a module for its tests.

``torchrun --nproc-per-node=2 together.py all folder`` writes what each process found to ``folder/<rank>.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpgelu as mp
from mpgelu.training import History

Found = dict[str, Tensor]
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def data(rows: int = 64, models: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.rand(*models, rows, 2, generator=generator) * 2 - 1
    noise = torch.randn(*models, rows, generator=generator)
    return X.to(dtype), (torch.sin(3 * X[..., 0]) + X[..., 1] + 0.1 * noise).to(dtype)


def net(seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return mp.network(2, **{"hidden": (8,), **settings}).to(dtype)


def trained(network: nn.Module, given: Any, likelihood: Any = None, **settings: Any) -> Found:
    likelihood = likelihood or mp.HeteroscedasticGaussian()
    chosen = {"epochs": 6, "batch_size": 16, "progress": False, **settings}
    history = mp.fit(network, likelihood, given, **chosen)
    return found(history, network, *([likelihood] if isinstance(likelihood, nn.Module) else []))


def found(history: History, *modules: nn.Module) -> Found:
    state = [p.detach().flatten() for module in modules for p in module.parameters()]
    return {
        "state": torch.cat(state),
        "loss": history.loss,
        "validation": history.validation,
        "best_epoch": history.best_epoch,
        "recoveries": torch.tensor(len(history.recoveries)),
        "interrupted": torch.tensor(history.interrupted),
    }


class Failing(nn.Module):
    """A likelihood that is NaN at one call, in the last process alone."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def expected_log_prob(self, moments: Any, y: Tensor) -> Tensor:
        value: Tensor = mp.HeteroscedasticGaussian().expected_log_prob(moments, y)
        self.calls += 1
        return value * torch.nan if self.calls == self.at and RANK == SIZE - 1 else value


class Signal(torch.optim.lr_scheduler.LRScheduler):
    """Sends a signal to the last process, itself, in a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, number: signal.Signals, at: int) -> None:
        self.send = number, at
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "send"}

    def get_lr(self) -> Any:
        number, at = self.send
        if self.last_epoch == at and RANK == SIZE - 1:
            os.kill(os.getpid(), number)
        return [group["lr"] for group in self.optimizer.param_groups]


class Joined:
    """What a ``DistributedSampler`` gives to two processes, batch by batch, in one."""

    def __init__(self, X: Tensor, y: Tensor, size: int) -> None:
        dataset = TensorDataset(X, y)
        self.samplers: list[DistributedSampler[Any]] = [
            DistributedSampler(dataset, num_replicas=2, rank=rank, seed=3) for rank in (0, 1)
        ]
        self.X, self.y, self.size, self.sampler = X, y, size, self

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, second = (list(sampler) for sampler in self.samplers)
        for start in range(0, len(first), self.size):
            part = slice(start, start + self.size)
            rows = first[part] + second[part]
            yield self.X[rows], self.y[rows]


def even() -> Found:
    """Kernels, Adam, validation; every process has drawn other weights."""
    given = data(dtype=torch.float32)
    network = net(RANK, torch.float32)
    return trained(network, given, validation=data(21, dtype=torch.float32), epochs=12)


def uneven() -> Found:
    """Batches of 9, the last of 1, a penalty, a learned noise, clipped gradients."""
    network = net(outputs=1, gaussian_weights=True)
    layers = [layer for layer in network if isinstance(layer, mp.GaussianLinear)]
    likelihood = mp.Gaussian(0.5, learn_noise=True).double()
    penalty = lambda: torch.stack([layer.kl() for layer in layers]).sum() / 37  # noqa: E731
    return trained(network, data(37), likelihood, batch_size=9, penalty=penalty, clip=1.0)


def patient() -> Found:
    """Ends by patience, at the best weights."""
    rate: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    return trained(net(), data(), validation=data(5), patience=2, epochs=60, optimizer=rate, clip=1.0)


def stacked() -> Found:
    """Three networks as one."""
    return trained(mp.Stack([net(seed) for seed in range(3)]), data(models=(3,)), validation=data(9, (3,)))


def second_order() -> Found:
    """Several evaluations in a step."""
    lbfgs: Callable[[Any], Any] = lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4)  # noqa: E731
    return trained(net(), data(), optimizer=lbfgs, batch_size=32, epochs=3)


def recovering() -> Found:
    """One process alone meets a loss that is not a number."""
    return trained(net(), data(), Failing(7))


def interrupted() -> Found:
    """One process alone is interrupted in the third epoch."""
    scheduler = lambda optimizer: Signal(optimizer, signal.SIGINT, 10)  # noqa: E731
    return trained(net(), data(), scheduler=scheduler, validation=data(9), epochs=50)


def sampled() -> Found:
    """A loader with a sampler that gives each process its part."""
    X, y = data(37)
    if SIZE == 1:
        return trained(net(), Joined(X, y, 5))
    dataset = TensorDataset(X, y)
    return trained(net(), DataLoader(dataset, batch_size=5, sampler=DistributedSampler(dataset, seed=3)))


def lists() -> Found:
    """Loaders of different lengths: three batches in the first process, one in the second."""
    X, y = data(40)
    first, second = [(X[:9], y[:9]), (X[9:20], y[9:20]), (X[20:30], y[20:30])], [(X[30:], y[30:])]
    joined = [(torch.cat([first[0][0], second[0][0]]), torch.cat([first[0][1], second[0][1]])), *first[1:]]
    return trained(net(), [first, second][RANK] if SIZE > 1 else joined, validation=[(X, y)])


RUNS = (even, uneven, patient, stacked, second_order, recovering, interrupted, sampled, lists)


def checkpointed(folder: Path) -> Found:
    """A run with a checkpoint; where ``DIE`` is set, a process is killed in its fourth epoch."""
    at = int(os.environ.get("DIE", "0"))
    steps: list[int] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return Signal(optimizer, signal.SIGKILL, at or -1)

    kept = folder / "run.checkpoint"
    result = trained(net(), data(37), epochs=8, batch_size=9, validation=data(9), scheduler=scheduler, checkpoint=kept)
    return result | {"steps": torch.tensor(len(steps))}


def alone_afterwards() -> Found:
    """In a process group that was there before, and after it the network is not tied to the other processes."""
    assert dist.get_rank() == RANK
    network = net()
    result = trained(network, data())
    if RANK == 0:
        network(data()[0]).sum().backward()
    return result


def main(what: str, folder: Path) -> None:
    """Run under torchrun."""
    if what == "all":
        results = {run.__name__: run() for run in (*RUNS, alone_afterwards)}
    else:
        results = {"checkpointed": checkpointed(folder)}
    torch.save(results, folder / f"{RANK}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
