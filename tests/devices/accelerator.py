"""The estimator's training on a device that this machine does not have: a script, for it registers a torch backend.

Tensors of ``FakeTensorMode`` know shape, type and device, and every operation checks that its tensors are on one
device. Questions about values are answered with yes.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from mpgelu import HeteroscedasticGaussian, MPGELURegressor
from mpgelu.estimators.recipe import Rows, settings_of
from mpgelu.estimators.recipe.loop import Group
from mpgelu.estimators.recipe.training import task_of
from mpgelu.training import Interrupts, training_progress

ROWS, FEATURES, STEPS = 60, 4, 2


def moved(module: nn.Module, device: torch.device) -> None:
    """``module.to(device)``, which fake tensors do not know."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(fake(parameter), parameter.requires_grad)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = fake(buffer)


def main(rows_on: str) -> None:
    _setup_privateuseone_for_python_backend("elsewhere")
    device = torch.device("elsewhere", 0)
    settings = settings_of(MPGELURegressor(steps=STEPS, random_state=0), ROWS, FEATURES)
    for position in range(len(settings.kinds)):
        task = task_of(position, FEATURES, HeteroscedasticGaussian(), settings)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(Tensor, "__bool__", return_value=True),
            mock.patch.object(Tensor, "__float__", return_value=0.0),
            mock.patch.object(Group, "on_device", nullcontext),
            Interrupts() as interrupts,
            training_progress(False) as bar,
        ):
            moved(task.stack, device)
            rows = Rows(torch.randn(ROWS, FEATURES), torch.randn(ROWS), torch.ones(ROWS))
            trainer = task.trainer(ROWS)
            trainer.left_out = trainer.left_out.to(device)
            Group(replace(task, device=torch.device(rows_on)), trainer).train(rows, float("inf"), interrupts, bar)
            assert trainer.taken == task.steps
            assert {tensor.device for tensor in trainer.state().values()} == {device}


if __name__ == "__main__":
    main(sys.argv[1])
