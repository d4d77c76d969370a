"""What is made of tensors once and used until they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from torch import Tensor

Made = TypeVar("Made")


class Prepared(Generic[Made]):
    """Something made of tensors, kept until one of them is changed or replaced; copies and files begin without it.

    A change through ``tensor.data`` goes unseen, as it does by autograd. So do the steps of torch's fused optimisers,
    which do not count as changes: nothing is kept of tensors that require a gradient, for they may be in training.
    """

    def __init__(self) -> None:
        self._kept: tuple[object, list[Tensor], Made] | None = None

    def of(self, tensors: Iterable[Tensor], make: Callable[[], Made]) -> Made:
        """What ``make`` gives for these tensors, made anew only if they are not those of the last call."""
        held = list(tensors)
        try:
            seen = [(tensor.data_ptr(), tensor._version, tensor.requires_grad) for tensor in held]
        except RuntimeError:  # made in inference mode, where changes are not counted
            return make()
        kept = self._kept  # read once: other threads may replace it
        if kept is not None and kept[0] == seen:
            return kept[2]
        if any(tensor.requires_grad for tensor in held):
            return make()
        made = make()
        # The tensors are held so that no other one gets the memory of one that was replaced.
        self._kept = seen, [tensor.detach() for tensor in held], made
        return made

    def __reduce__(self) -> tuple[type[Prepared[Made]], tuple[()]]:
        """A copy or a file has its own tensors."""
        return Prepared, ()
