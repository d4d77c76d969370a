"""Whole optimiser steps of stacked networks for deterministic inputs by the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mpgelu.native import Integers, number_of, run, size_of
from mpgelu.native.threads import share

ObjectiveName = Literal["beta_gaussian", "student"]  # train.c defines them


@dataclass(frozen=True)
class Adam:
    """Objective and settings of the optimiser, in the order of ``struct optimiser`` in ``kernels.h``.

    Args:
        shape: Exponent beta of the objective ``"beta_gaussian"``, or degrees of freedom of ``"student"``.
        clip: Largest norm of the gradient of a network.
        weight_decay: Decoupled weight decay, as of ``torch.optim.AdamW``.
        beta_1: Decay of the mean of gradients.
        beta_2: Decay of the mean of squared gradients.
        epsilon: Term that is added to the denominator.
    """

    shape: float
    clip: float
    weight_decay: float
    beta_1: float
    beta_2: float
    epsilon: float


@dataclass(frozen=True)
class TrainedShape:
    """Sizes of networks whose parameters are trained: optional scale, optional embedding, linear maps.

    Args:
        features: Number of inputs.
        cosines: Number of cosines of each feature; zero without an embedding.
        is_scaled: Whether there is a scale before the first linear map.
        widths: Number of features before the first linear map and after each linear map.
        nonlinearity: Nonlinearity between the linear maps.
    """

    features: int
    cosines: int
    is_scaled: bool
    widths: Integers
    nonlinearity: Literal["silu", "relu"]


def take_steps(
    shape: TrainedShape,
    objective: ObjectiveName,
    adam: Adam,
    data: Sequence[Tensor],
    at: Tensor,
    rates: Tensor,
    taken: int,
    state: Sequence[Tensor],
) -> Tensor:
    """Take steps of Adam with each network on batches of its own, and return the losses before each step.

    Networks are independent, so that idle threads of a fit help with them; results do not depend on the threads.

    Args:
        shape: The networks.
        objective: The loss.
        adam: Settings of the loss and of the optimiser.
        data: Features ``(rows, n)``, targets ``(rows,)`` and weights of the rows, ``(rows,)``; float32.
        at: Row numbers of the batches, ``(networks, steps, batch)``.
        rates: Learning rates of scale, embedding and linear maps, ``(steps, 3)``, float64.
        taken: Number of earlier steps.
        state: Parameters of each network and their means of gradients and of squared gradients, each
            ``(networks, parameters)``, in the order scale, embedding, linear maps; they are changed in place.

    Returns:
        Losses, ``(networks, steps)``; NaN for steps that a network left out because loss or gradient were not finite.
    """
    models, steps, batch = at.shape
    places = (shape.features, shape.cosines, int(shape.is_scaled))
    room = size_of("plain_train_workspace", batch, shape.widths, *places)
    losses = torch.empty(models, steps, dtype=torch.float32, device="cpu")
    layers, which = len(shape.widths) - 1, number_of(objective)
    sizes = (batch, layers, shape.widths, number_of(shape.nonlinearity), *places, which, steps, taken)
    settings = torch.tensor(astuple(adam), dtype=torch.float64, device="cpu")
    given, at = [part.contiguous() for part in data], at.contiguous()

    def train(model: int) -> None:
        workspace = torch.empty(room, dtype=torch.float32, device="cpu")
        of_model = [part[model] for part in state]
        arrays = (at[model], rates, settings, *given, *of_model, losses[model], workspace)
        run("plain_train", sizes, arrays, doubles=2, longs=1)

    share([partial(train, model) for model in range(models)])
    return losses
