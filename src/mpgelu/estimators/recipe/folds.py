"""Assignment of rows to networks: training rows, held-out rows, and the order of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]

_FEWEST_JUDGES, _LEAST_SHARE_OF_JUDGES = 50, 0.2


@dataclass(frozen=True)
class Rows:
    """Scaled training data, float32.

    Args:
        X: Scaled features, ``(rows, n)``.
        y: Scaled targets, ``(rows,)``.
        weights: Weights of the rows, ``(rows,)``, with mean one.
    """

    X: Tensor
    y: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        return Rows(self.X.to(device), self.y.to(device), self.weights.to(device))

    def judges(self) -> Rows:
        """Return the rows with weights for validation: zero for rows whose features occur more than once.

        A network that leaves out such a row has usually been trained on a duplicate of it, so that its error on the row
        underestimates that on new rows. If fewer than 50 rows or a fifth of all are left, as in tables of categories
        only, new rows are expected to be duplicates, too, and all rows keep their weights.
        """
        _, group, size = np.unique(self.X.numpy(), axis=0, return_inverse=True, return_counts=True)
        weights = self.weights * torch.as_tensor(size[group.reshape(-1)] == 1, device="cpu")
        if (weights > 0).sum() < max(_FEWEST_JUDGES, _LEAST_SHARE_OF_JUDGES * len(weights)):
            return self
        return replace(self, weights=weights / weights.mean())


@dataclass(frozen=True)
class Folds:
    """Training rows and held-out rows of each network; every row is held out from exactly one network.

    Args:
        trained: Numbers of the training rows, ``(networks, rows)``.
        held: Numbers of the held-out rows, ``(networks, longest fold)``; shorter folds are padded by repetition.
        counts: Whether an entry of ``held`` is a row instead of padding, in the same shape.
    """

    trained: Tensor
    held: Tensor
    counts: Tensor

    @staticmethod
    def of(rows: int, folds: int, seed: int) -> Folds:
        """Return a random partition of the rows into folds, of which fold k is held out from network k.

        All networks have the same number of training rows, so that a network may miss one row outside its fold.

        Args:
            rows: Number of rows.
            folds: Number of folds, at most that of the rows.
            seed: Seed of the partition.
        """
        from sklearn.model_selection import KFold  # a slow import

        splitter = KFold(min(rows, folds), shuffle=True, random_state=seed)
        split = list(splitter.split(np.zeros(rows)))
        shortest = min(len(train) for train, _ in split)
        random = np.random.default_rng(seed)  # the missing row is a random one
        return Folds.padded([random.permutation(train)[:shortest] for train, _ in split], [held for _, held in split])

    @staticmethod
    def padded(trained: Sequence[Numbers], held: Sequence[Numbers]) -> Folds:
        """Return folds of row numbers for each network: as many training rows for each, any number of held-out rows."""
        longest = max(map(len, held))
        counts = np.stack([np.arange(longest) < len(rows) for rows in held])
        parts = np.stack(trained), np.stack([np.resize(rows, longest) for rows in held]), counts
        return Folds(*(torch.as_tensor(part, device="cpu") for part in parts))

    def gather(self, values: Tensor) -> Tensor:
        """Return values of held-out rows in the order of all rows.

        Args:
            values: Values that network k has for its held-out rows, ``(networks, longest fold, ...)``.

        Returns:
            One value for each row, ``(rows, ...)``.
        """
        found = values.new_empty(int(self.counts.sum()), *values.shape[2:])
        found[self.held[self.counts]] = values[self.counts]
        return found


class Batches:
    """Row numbers of the batches: every network passes through its rows in a new random order in each epoch.

    The order is a function of the seed and the number of the epoch, so that a resumed run has the same batches. Epochs
    follow each other without a gap; a batch may contain rows of two epochs.

    Args:
        trained: Numbers of the training rows, ``(networks, rows)``.
        size: Number of rows in a batch.
        seed: Seed of the orders.
    """

    def __init__(self, trained: Tensor, size: int, seed: int) -> None:
        self.trained, self.size, self.seed = trained, size, seed
        self._orders: dict[int, Tensor] = {}

    def rows(self, first: int, count: int) -> Tensor:
        """Return the row numbers of ``count`` batches from number ``first`` on, ``(networks, count, size)``."""
        networks, rows = self.trained.shape
        start, stop = first * self.size, (first + count) * self.size
        epochs = range(start // rows, (stop - 1) // rows + 1)
        self._orders = {epoch: self._order(epoch) for epoch in epochs}  # kept while the epoch lasts
        offset = start - epochs[0] * rows
        orders = list(self._orders.values())
        order = (orders[0] if len(orders) == 1 else torch.cat(orders, 1))[:, offset : offset + stop - start]
        return torch.take_along_dim(self.trained, order, 1).view(networks, count, self.size)

    def _order(self, epoch: int) -> Tensor:
        """Return a random permutation for each network, ``(networks, rows)``."""
        if epoch in self._orders:
            return self._orders[epoch]
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.trained.shape, generator=generator, dtype=torch.float32, device="cpu").argsort(1)
