"""Which rows each network is trained on, in which order, and which rows it is judged by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import Tensor

from mpgelu.estimators.recipe.settings import Settings

FEWEST_FOLDS = 5
_MOST_HELD_OUT = 4000  # rows of each fold that networks are judged by


@dataclass(frozen=True)
class Folds:
    """Which rows each network is trained on and which it is judged by; networks are ordered by rate, then fold."""

    trained: Tensor  # (networks, rows)
    held: Tensor  # (networks, rows), the shorter folds filled up by repetition
    counts: Tensor  # (networks, rows): 1 for a row, 0 for a repetition

    @staticmethod
    def of(rows: int, settings: Settings) -> Folds:
        """At least five folds, the first ones left out by the members in turn, the same for every rate."""
        splitter = KFold(min(rows, max(FEWEST_FOLDS, settings.members)), shuffle=True, random_state=settings.seed)
        random = np.random.default_rng(settings.seed)
        split = list(splitter.split(np.zeros(rows)))[: settings.members]
        folds = [(train, random.permutation(held)[:_MOST_HELD_OUT]) for train, held in split]
        shortest, longest = min(len(train) for train, _ in folds), max(len(held) for _, held in folds)
        trained = np.stack([train[:shortest] for train, _ in folds])
        held = np.stack([np.resize(held, longest) for _, held in folds])
        counts = np.stack([np.arange(longest) < len(held) for _, held in folds])
        parts = (torch.as_tensor(part).repeat(len(settings.rates), 1) for part in (trained, held, counts))
        return Folds(*parts)


class Batches:
    """Row numbers of the batches: every network goes through its rows in a new random order each epoch.

    The order depends on the number of the epoch alone, so that a resumed run meets the same batches.
    """

    def __init__(self, folds: Folds, size: int, seed: int) -> None:
        self.folds, self.size, self.seed = folds, size, seed
        self._orders: dict[int, Tensor] = {}

    def rows(self, first: int, count: int) -> Tensor:
        """Row numbers of ``count`` batches from number ``first`` on, ``(networks, count, size)``."""
        networks, rows = self.folds.trained.shape
        start, stop = first * self.size, (first + count) * self.size
        epochs = range(start // rows, (stop - 1) // rows + 1)
        self._orders = {epoch: self._order(epoch) for epoch in epochs}  # drawn once, kept while it is in use
        offset = start - epochs[0] * rows
        orders = list(self._orders.values())
        order = (orders[0] if len(orders) == 1 else torch.cat(orders, 1))[:, offset : offset + stop - start]
        return torch.take_along_dim(self.folds.trained, order, 1).view(networks, count, self.size)

    def _order(self, epoch: int) -> Tensor:
        if epoch in self._orders:
            return self._orders[epoch]
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        return torch.rand(self.folds.trained.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
