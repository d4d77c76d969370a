"""Gradients of the models of a stack, each of which is clipped and checked independently of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def limit_gradients(
    gradients: Sequence[Tensor], losses: Tensor, clip: float | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Scale the gradient of each model in place to a norm of at most ``clip``, or to zero if it is not finite.

    Args:
        gradients: Gradients of all parameters, ``(*models, ...)`` each.
        losses: Loss of each model, ``(*models,)``.
        clip: Largest norm of the gradient of a model; ``None`` for no limit.
        dtype: Data type in which norms are computed; the default is that of the gradients.

    Returns:
        Whether loss and gradient of each model are finite, ``(*models,)``; gradients of the others are zero afterwards.
    """
    each = [torch.linalg.vector_norm(g.reshape(*losses.shape, -1), dim=-1, dtype=dtype) for g in gradients]
    norms = torch.linalg.vector_norm(torch.stack(each), dim=0)
    finite = torch.isfinite(losses) & torch.isfinite(norms)
    scale = torch.ones_like(norms) if clip is None else (clip / (norms + 1e-12)).clamp_max(1)
    if (~finite | (scale < 1)).any():
        torch._foreach_mul_(list(gradients), [aligned(scale, g).to(g) for g in gradients])
        if not finite.all():
            for gradient in gradients:
                gradient.copy_(torch.where(aligned(finite, gradient), gradient, 0))
    return finite


def aligned(per_model: Tensor, p: Tensor) -> Tensor:
    """Return a value for each model, ``(*models,)``, in a shape that broadcasts against a parameter of a stack."""
    return per_model.reshape((*per_model.shape, *[1] * (p.dim() - per_model.dim())))
