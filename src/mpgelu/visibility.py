"""Whether code may depend on the values of tensors, decided here for the whole package."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


def values_are_visible(*tensors: Tensor) -> bool:
    """Whether code may depend on values: nothing is traced, nor transformed by torch.func or forward mode."""
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return not (torch.compiler.is_compiling() or transformed) and all(type(x) in (Tensor, Parameter) for x in tensors)
