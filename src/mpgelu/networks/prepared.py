"""A cache of one value that is computed from tensors, valid until one of them changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Generic, TypeVar

from torch import Tensor

Made = TypeVar("Made")

_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")


class Prepared(Generic[Made]):
    """A value computed from tensors, cached until one of them is modified or replaced.

    Modifications are detected by the version counters of autograd. These do not count changes through ``tensor.data``,
    nor the steps of the fused optimisers of torch. Nothing is therefore cached for tensors that require a gradient,
    because they may be in training. Copies and pickles start with an empty cache.
    """

    def __init__(self) -> None:
        self._kept: tuple[object, list[Tensor], Made] | None = None

    def of(self, tensors: Iterable[Tensor], make: Callable[[], Made], *settings: object) -> Made:
        """Return the cached value, or compute it if the tensors or settings are not those of the last call.

        Args:
            tensors: The tensors on which the value depends.
            make: Function that computes the value.
            settings: Other objects on which the value depends, compared by ``==``.
        """
        held = list(tensors)
        try:
            seen = [*settings, *map(Tensor.data_ptr, held), *map(_version, held), *map(_requires_grad, held)]
        except RuntimeError:  # tensors of inference mode have no version counter
            return make()
        kept = self._kept  # read once, because other threads may replace it
        if kept is not None and kept[0] == seen:
            return kept[2]
        if any(tensor.requires_grad for tensor in held):
            return make()
        made = make()
        # References to the tensors ensure that no new tensor has the address of one that was replaced.
        self._kept = seen, [tensor.detach() for tensor in held], made
        return made

    def __reduce__(self) -> tuple[type[Prepared[Made]], tuple[()]]:
        """Return the constructor of an empty cache, because a copy has its own tensors."""
        return Prepared, ()
