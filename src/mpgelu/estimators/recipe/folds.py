"""Which rows each network is trained on, in which order, and which rows it is judged by."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

_FEWEST_JUDGES, _LEAST_SHARE_OF_JUDGES = 50, 0.2


@dataclass(frozen=True)
class Rows:
    """Scaled training data.

    Args:
        X: Features ``(rows, n)``.
        y: Targets ``(rows,)``.
        weights: How much each row counts, ``(rows,)``, of mean one.
    """

    X: Tensor
    y: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        return Rows(self.X.to(device), self.y.to(device), self.weights.to(device))

    def judges(self) -> Rows:
        """The same rows, of which those whose features occur more than once have weight zero.

        A network that leaves out such a row has mostly been trained on its twin, and what it says about the row is no
        measure of its error on new ones. Where too few rows are left, as in tables of categories alone, new rows are
        repetitions as well, and all rows count.
        """
        _, group, size = np.unique(self.X.numpy(), axis=0, return_inverse=True, return_counts=True)
        weights = self.weights * torch.as_tensor(size[group.reshape(-1)] == 1)
        if (weights > 0).sum() < max(_FEWEST_JUDGES, _LEAST_SHARE_OF_JUDGES * len(weights)):
            return self
        return replace(self, weights=weights / weights.mean())


@dataclass(frozen=True)
class Folds:
    """Rows of each network: those it is trained on, and those that it leaves out; every row is left out once.

    Args:
        trained: ``(networks, rows)``.
        held: Rows left out, the shorter folds filled up by repetition, ``(networks, rows)``.
        counts: True for a row, false for a repetition, ``(networks, rows)``.
    """

    trained: Tensor
    held: Tensor
    counts: Tensor

    @staticmethod
    def of(rows: int, folds: int, seed: int) -> Folds:
        """A random partition of the rows; fold k is left out by network k."""
        from sklearn.model_selection import KFold  # here, for it brings most of scikit-learn

        splitter = KFold(min(rows, folds), shuffle=True, random_state=seed)
        split = list(splitter.split(np.zeros(rows)))
        shortest, longest = min(len(train) for train, _ in split), max(len(held) for _, held in split)
        random = np.random.default_rng(seed)  # networks have equally many rows: one may miss some, not always the last
        trained = np.stack([random.permutation(train)[:shortest] for train, _ in split])
        held = np.stack([np.resize(held, longest) for _, held in split])
        counts = np.stack([np.arange(longest) < len(held) for _, held in split])
        return Folds(*map(torch.as_tensor, (trained, held, counts)))

    def gather(self, values: Tensor) -> Tensor:
        """What network k found for its held-out rows, ``(networks, held)``, in the order of the rows, ``(rows,)``."""
        found = values.new_empty(int(self.counts.sum()), *values.shape[2:])
        found[self.held[self.counts]] = values[self.counts]
        return found


class Batches:
    """Row numbers of the batches: every network goes through its rows in a new random order each epoch.

    The order depends on the number of the epoch alone, so that a resumed run meets the same batches.
    """

    def __init__(self, trained: Tensor, size: int, seed: int) -> None:
        self.trained, self.size, self.seed = trained, size, seed
        self._orders: dict[int, Tensor] = {}

    def rows(self, first: int, count: int) -> Tensor:
        """Row numbers of ``count`` batches from number ``first`` on, ``(networks, count, size)``."""
        networks, rows = self.trained.shape
        start, stop = first * self.size, (first + count) * self.size
        epochs = range(start // rows, (stop - 1) // rows + 1)
        self._orders = {epoch: self._order(epoch) for epoch in epochs}  # drawn once, kept while it is in use
        offset = start - epochs[0] * rows
        orders = list(self._orders.values())
        order = (orders[0] if len(orders) == 1 else torch.cat(orders, 1))[:, offset : offset + stop - start]
        return torch.take_along_dim(self.trained, order, 1).view(networks, count, self.size)

    def _order(self, epoch: int) -> Tensor:
        if epoch in self._orders:
            return self._orders[epoch]
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.trained.shape, generator=generator, dtype=torch.float32).argsort(1)
