"""Training data: arrays or tensors of all rows, or a loader of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpgelu.errors import InputError

Pair = tuple[Tensor, Tensor]
Shuffle = Callable[[torch.Generator], Tensor]
Data = tuple[Tensor, Tensor] | tuple[NDArray[Any], NDArray[Any]] | Iterable[Any]


class Rows:
    """All rows in memory, shuffled anew for each epoch and cut into batches.

    Args:
        data: Features ``(*models, rows, n)`` and targets ``(*models, rows)``.
        size: Number of rows in a batch.
        drop_last: Whether to skip an incomplete last batch, unless it is the only one.
        seed: Seed of the order of the rows.
        shuffle: Function from a generator to random numbers ``(*models, rows)``, whose ranks are the order of the rows.
    """

    is_whole = True  # each of several processes holds all rows

    def __init__(self, data: Pair, size: int, drop_last: bool, seed: int, shuffle: Shuffle | None = None) -> None:
        self.X, self.y = data
        self.first = self.X[..., :size, :], self.y[..., :size]
        self._size, self._drop_last = size, drop_last
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self._shuffle = shuffle or (
            lambda generator: torch.rand(self.y.shape, generator=generator, device=generator.device)
        )

    def epoch(self, number: int = 0) -> Iterator[Pair]:
        """Shuffle the rows of every model once, then cut slices: no copying per batch.

        Args:
            number: Number of the epoch; not used, because the generator advances by itself.
        """
        order = self._shuffle(self.generator).argsort(-1).to(self.y.device)
        X, y = torch.take_along_dim(self.X, order.unsqueeze(-1), dim=-2), torch.take_along_dim(self.y, order, dim=-1)
        rows, size = y.shape[-1], self._size
        end = rows - rows % size if self._drop_last and rows >= size else rows
        for start in range(0, end, size):
            yield X[..., start : start + size, :], y[..., start : start + size]


class Loader:
    """Batches from an iterable of (features, targets), such as a torch ``DataLoader``, iterated anew for each epoch.

    Args:
        batches: The iterable.
        like: Tensor whose device the batches are moved to, and whose dtype numpy arrays get.
    """

    is_whole = False  # each of several processes has a loader that gives its part

    def __init__(self, batches: Iterable[Any], like: Tensor) -> None:
        if isinstance(batches, Iterator):
            raise InputError(
                f"fit: data is an iterator ({type(batches).__name__}), which gives its batches once; use a DataLoader "
                "or a list of batches, which every epoch can iterate again"
            )
        self._batches, self._like = batches, like
        self.generator: torch.Generator | None = getattr(batches, "generator", None)
        self.first = next(self.epoch())

    def epoch(self, number: int = 0) -> Iterator[Pair]:
        """Yield the batches of one pass through the data.

        Args:
            number: Number of the epoch, for samplers that seed their shuffling with it, as ``DistributedSampler`` does.

        Raises:
            InputError: There is no batch, or one is not a valid pair.
        """
        sampler = getattr(self._batches, "sampler", None)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(number)
        empty = True
        for batch in self._batches:
            empty = False
            yield check_data("data", batch, self._like)
        if empty:
            raise InputError("fit: data gave no batch; a loader must give at least one in each epoch")


def source(
    data: Data, like: Tensor, size: int, drop_last: bool, seed: int, shuffle: Shuffle | None = None
) -> Rows | Loader:
    """Return the source of batches: :class:`Rows` for a pair of arrays, :class:`Loader` for an iterable of batches.

    Args:
        data: A pair of features and targets, or an iterable of such pairs.
        like: Tensor whose device the batches are moved to, and whose dtype numpy arrays get.
        size: Number of rows in a batch; used for a pair only, as the following arguments.
        drop_last: Whether to skip an incomplete last batch.
        seed: Seed of the order of the rows.
        shuffle: Function from a generator to random numbers ``(*models, rows)``, whose ranks are the order of the rows.
    """
    if not is_whole(data):
        return Loader(data, like)
    return Rows(check_data("data", data, like), size, drop_last, seed, shuffle)


def all_rows(name: str, data: Data, like: Tensor) -> Pair:
    """Return features ``(*models, rows, n)`` and targets ``(*models, rows)`` of a pair, or of all batches of a loader.

    Args:
        name: Name of the argument in error messages.
        data: The pair or the loader.
        like: Tensor whose device is used, and whose dtype numpy arrays get.
    """
    if is_whole(data):
        return check_data(name, data, like)
    pairs = [check_data(name, batch, like) for batch in data]
    if not pairs:
        raise InputError(f"fit: {name} gave no batch")
    X, y = zip(*pairs, strict=True)
    return torch.cat(X, -2), torch.cat(y, -1)


def is_whole(data: object) -> bool:
    """Return whether the data are not a loader: a pair of all rows, or an object that :func:`check_data` rejects."""
    return _is_pair(data) or not isinstance(data, Iterable) or isinstance(data, Tensor | np.ndarray | str)


def _is_pair(data: object) -> bool:
    """Return whether data is a pair (features, targets) and not an iterable of batches."""
    return isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data[0], tuple | list)


def check_data(name: str, data: Any, like: Tensor) -> Pair:
    """Return features and targets as finite float tensors of matching shapes.

    Args:
        name: Name of the argument in error messages.
        data: The pair.
        like: Tensor whose device is used, and whose dtype numpy arrays get.

    Raises:
        InputError: The data is not a pair of numeric arrays ``(*models, rows, n)`` and ``(*models, rows)``, is empty,
            or contains values that are not finite.
    """
    if not _is_pair(data):
        raise InputError(
            f"fit: {name} must be a pair (features, targets) of tensors or arrays, or a DataLoader of such pairs, got "
            f"{type(data).__name__}"
        )
    X, y = (_as_tensor(name, part, values, like) for part, values in zip("Xy", data, strict=True))
    if X.dim() < 2 or y.shape != X.shape[:-1]:
        hint = "; use y.squeeze(-1)" if y.shape == (*X.shape[:-1], 1) else ""
        raise InputError(
            f"fit: {name} must be features (rows, n) and targets (rows,), got {tuple(X.shape)} and {tuple(y.shape)}"
            + hint
        )
    if X.numel() == 0:
        raise InputError(f"fit: {name} has no rows, X has shape {tuple(X.shape)}")
    for part, values in (("X", X), ("y", y)):
        if not values.is_floating_point():
            raise InputError(f"fit: {name}: {part} must have a float dtype, got {values.dtype}; use {part}.float()")
        if not torch.isfinite(values).all():
            place = tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())
            raise InputError(f"fit: {name}: {part} must be finite, got {values[place].item()} at index {place}")
    return X, y


def _as_tensor(name: str, part: str, values: Any, like: Tensor) -> Tensor:
    """Return a tensor on the device of ``like``; arrays also get its dtype."""
    if isinstance(values, Tensor):
        return values.to(like.device)
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise InputError(f"fit: {name}: {part} must hold numbers, got {array.dtype} from {type(values).__name__}")
    array = array if array.flags.writeable else array.copy()  # columns of data frames are not; torch warns of them
    return torch.as_tensor(array, dtype=like.dtype, device=like.device)
