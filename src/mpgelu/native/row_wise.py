"""Native kernels as differentiable torch functions that also run under ``vmap``."""

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


def use_native(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors: plain float32 on the CPU, neither traced nor in forward mode."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return available() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        for tensor in tensors
    )


@dataclass(frozen=True)
class Kernel:
    """One kernel and its backward, which acts on every row, that is on every index of the leading dimensions, alone.

    Args:
        name: the function in ``kernels.c``; ``<name>_backward`` takes the inputs and the gradients of the outputs and
            gives the gradients of the inputs.
        events: how many trailing dimensions of each input belong to one row; 0 for an elementwise kernel.
        outputs: which input's shape each output has; a negative number leaves out the dimension before the last.
        square: whether the last input is a matrix (n, n) per row; the kernel then takes n once, and a workspace.
    """

    name: str
    events: tuple[int, ...]
    outputs: tuple[int, ...]
    square: bool = False

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
        shapes = [inputs[abs(k)].shape for k in self.outputs]
        shapes = [s if k >= 0 else torch.Size([*s[:-2], s[-1]]) for s, k in zip(shapes, self.outputs, strict=True)]
        return self._run(self.name, inputs, shapes)

    def backward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the inputs, from the inputs and the gradients of the outputs."""
        return self._run(f"{self.name}_backward", tensors, [x.shape for x in tensors[: len(self.events)]])

    def _run(self, name: str, inputs: Sequence[Tensor], shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        last = inputs[len(self.events) - 1]
        split = last.dim() - self.events[-1]
        sizes = (math.prod(last.shape[:split]), *last.shape[split:])
        results = tuple(last.new_empty(shape) for shape in shapes)
        if self.square:
            n = last.shape[-1]
            run(name, sizes[:2], inputs, (*results, last.new_empty(2 * n * (n + 5) * _LANES)))
        else:
            run(name, sizes, inputs, results)
        return results


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


_CONTRACT = Kernel("contract", events=(1, 2), outputs=(-1,))


def contract(variance: Tensor, factor: Tensor) -> Tensor:
    r"""Marginal variances of a block, :math:`\sum_r d_r F_{ri}^2`, in one pass.

    Args:
        variance: of the sources, ``(*batch, rank)``.
        factor: ``(*batch, rank, n)``.
    """
    return _CONTRACT(variance, factor)[0]
