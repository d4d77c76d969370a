"""Native kernels as differentiable torch functions that also run under ``vmap``, and the small products of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpgelu.native import available, run

_LANES = 8  # rows that kernels.c turns into one vector
# Many tiny matrix products are slower than sums multiplied out: by a kernel, a compiler, or in torch if they are small.
_FEW = 4  # columns of a product
_SMALL = 512  # entries of a factor


def use_native(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors: plain float32 on the CPU, neither traced nor in forward mode."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return available() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        for tensor in tensors
    )


Dimensions = tuple[tuple[int, int], ...]  # (input, dimension counted from its end) of each


@dataclass(frozen=True)
class Kernel:
    """One kernel and its backward, which acts on every row, that is on every index of the leading dimensions, alone.

    Args:
        name: the function in ``kernels.c``; ``<name>_backward`` takes the inputs and the gradients of the outputs and
            gives the gradients of the inputs.
        events: how many trailing dimensions of each input belong to one row; 0 for an elementwise kernel.
        outputs: the trailing dimensions of each output, as dimensions of the inputs.
        sizes: what the kernel is told after the number of rows.
        workspace: whether it needs room for pairs of units, several rows at a time.
    """

    name: str
    events: tuple[int, ...]
    outputs: tuple[Dimensions, ...]
    sizes: Dimensions = ()
    workspace: bool = False

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the kernel; inputs broadcast against each other in the leading dimensions."""
        batches = [x.shape[: x.dim() - event] for x, event in zip(inputs, self.events, strict=True)]
        if any(batch != batches[0] for batch in batches):
            batch = torch.broadcast_shapes(*batches)  # type: ignore[no-untyped-call]
            inputs = tuple(x.expand(*batch, *x.shape[x.dim() - e :]) for x, e in zip(inputs, self.events, strict=True))
        if torch._C._are_functorch_transforms_active():
            outputs: tuple[Tensor, ...] = _Forward.apply(self, *inputs)  # type: ignore[no-untyped-call]
        elif torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            outputs = _Eager.apply(self, *inputs)  # type: ignore[no-untyped-call]
        else:
            outputs = self.forward(*inputs)
        return outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The kernel itself, without gradients."""
        batch = inputs[0].shape[: inputs[0].dim() - self.events[0]]
        return self._run(self.name, inputs, [(*batch, *_picked(inputs, picks)) for picks in self.outputs])

    def backward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the inputs, from the inputs and the gradients of the outputs."""
        return self._run(f"{self.name}_backward", tensors, [x.shape for x in tensors[: len(self.events)]])

    def _run(self, name: str, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        first = inputs[0]
        rows = math.prod(first.shape[: first.dim() - self.events[0]])
        results = tuple(first.new_empty(shape) for shape in shapes)
        n = first.shape[-1]
        workspace = [first.new_empty(2 * n * (n + 5) * _LANES)] if self.workspace else []
        run(name, (rows, *_picked(inputs, self.sizes)), inputs, (*results, *workspace))
        return results


def _picked(inputs: Sequence[Tensor], dimensions: Dimensions) -> list[int]:
    return [inputs[index].shape[dimension] for index, dimension in dimensions]


class _Eager(torch.autograd.Function):
    """Outside torch.func: the older style, whose call costs a tenth, which is what a small batch feels."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.kernel = kernel
        ctx.save_for_backward(*inputs)
        return kernel.forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # second derivatives are wanted, and refused
            return None, *_Backward.apply(ctx.kernel, *ctx.saved_tensors, *grads)  # type: ignore[no-untyped-call]
        return None, *ctx.kernel.backward(*ctx.saved_tensors, *grads)


class _Forward(torch.autograd.Function):
    """Under torch.func, which asks for this style."""

    @staticmethod
    def forward(kernel: Kernel, *inputs: Tensor) -> tuple[Tensor, ...]:
        return kernel.forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kernel = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward.apply(ctx.kernel, *ctx.saved_tensors, *grads)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, *inputs: Tensor) -> tuple[Any, Any]:
        outputs = _Forward.apply(kernel, *_in_front(info.batch_size, in_dims[1:], inputs))  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


class _Backward(torch.autograd.Function):
    """Separate from :class:`_Forward` so that gradients may be taken inside ``vmap`` too."""

    @staticmethod
    def forward(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
        return kernel.backward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("the native kernels have no second derivatives; MPGELU_NATIVE=0 turns them off")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], kernel: Kernel, *tensors: Tensor) -> tuple[Any, Any]:
        outputs = _Backward.apply(kernel, *_in_front(info.batch_size, in_dims[1:], tensors))  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


def _in_front(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mapped dimension first, as one more leading dimension; what is not mapped is repeated."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


_CONTRACT = Kernel("contract", events=(1, 2), outputs=(((1, -1),),), sizes=((1, -2), (1, -1)))
_GRAM = Kernel("gram", events=(1, 2), outputs=(((1, -1), (1, -1)),), sizes=((1, -2), (1, -1)))
_PRODUCTS = Kernel("products", events=(2, 2), outputs=(((0, -2), (1, -2)),), sizes=((0, -2), (1, -2), (0, -1)))


def contract(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Marginal variances of a block, :math:`\sum_r d_r F_{ri}^2`.

    Args:
        variance: of the sources, ``(*batch, rank)``.
        factor: ``(*batch, rank, n)``.
    """
    if use_native(variance, factor):
        return _CONTRACT(variance, factor)[0]
    if torch.compiler.is_compiling() or factor.shape[-1] * factor.shape[-2] <= _SMALL:
        return (variance.unsqueeze(-1) * factor.square()).sum(-2)
    return (variance.unsqueeze(-2) @ factor.square()).squeeze(-2)


def gram(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Covariance of a block, :math:`\sum_r d_r F_{ri} F_{rj}`.

    Args:
        variance: of the sources, ``(*batch, rank)``.
        factor: ``(*batch, rank, n)``.
    """
    few = factor.shape[-1] <= _FEW
    if few and use_native(variance, factor):
        return _GRAM(variance, factor)[0]
    weighted = variance.unsqueeze(-1) * factor
    if few and torch.compiler.is_compiling():
        return (weighted.unsqueeze(-1) * factor.unsqueeze(-2)).sum(-3)
    return weighted.mT @ factor


def products(left: Tensor, right: Tensor) -> Tensor:
    r"""Matrix products of each row, :math:`L R^\top`.

    Args:
        left: ``(*batch, a, n)``.
        right: ``(*batch, b, n)``.
    """
    few = right.shape[-2] <= _FEW
    if few and use_native(left, right):
        return _PRODUCTS(left, right)[0]
    if few and torch.compiler.is_compiling():
        return (left.unsqueeze(-2) * right.unsqueeze(-3)).sum(-1)
    return left @ right.mT
