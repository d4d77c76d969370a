"""The best state of each model during training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpgelu.training.gradients import aligned


class Best:
    """The parameters of each model at its smallest validation loss.

    Args:
        network: The network or stack that is trained.
        models: Shape of the model dimensions; empty for a single network.
        likelihood: A likelihood whose parameters are trained too; ``None`` if there are none.

    Attributes:
        loss: Smallest validation loss of each model, ``(*models,)``.
        epoch: Epoch of that loss, ``(*models,)``.
        seen: Validation losses of all epochs.
    """

    def __init__(self, network: nn.Module, models: torch.Size, likelihood: nn.Module | None) -> None:
        self.network = network
        self.parameters = [*network.parameters(), *(likelihood.parameters() if likelihood is not None else ())]
        self.models = models
        device = self.parameters[0].device
        self.loss = torch.full(models, torch.inf, device=device)
        self.epoch = torch.zeros(models, dtype=torch.long, device=device)
        self.seen: list[Tensor] = []
        self.state: list[Tensor] = []

    def see(self, losses: Tensor) -> None:
        """Record the validation losses ``(*models,)`` after an epoch, and the state of the models that improved."""
        better = losses < self.loss  # false for a non-finite loss
        self.loss = torch.where(better, losses, self.loss)
        self.epoch = torch.where(better, len(self.seen), self.epoch)
        self.seen.append(losses)
        kept = self.state or [p.detach().clone() for p in self.parameters]
        self.state = [
            torch.where(aligned(better, p), p.detach(), old) for p, old in zip(self.parameters, kept, strict=True)
        ]

    @property
    def epochs_without_improvement(self) -> int:
        """Number of epochs since the last improvement of any model, zero before the first epoch."""
        return len(self.seen) - 1 - int(self.epoch.max()) if self.seen else 0

    def arrays(self) -> dict[str, Tensor]:
        """Return the record and the best state as tensors by name, for a checkpoint; empty before the first epoch."""
        if not self.seen:
            return {}
        kept = {f"best_{position}": tensor for position, tensor in enumerate(self.state)}
        return kept | {"best_loss": self.loss, "best_epoch": self.epoch, "best_seen": torch.stack(self.seen)}

    def load(self, arrays: dict[str, Tensor]) -> None:
        """Restore tensors that :meth:`arrays` returned."""
        if "best_seen" in arrays:
            self.seen = list(arrays["best_seen"])
            self.loss, self.epoch = arrays["best_loss"], arrays["best_epoch"]
            self.state = [arrays[f"best_{position}"] for position in range(len(self.parameters))]

    def restore(self) -> None:
        """Copy the best state back into the parameters; does nothing without validation losses."""
        with torch.no_grad():
            for p, state in zip(self.parameters, self.state, strict=bool(self.state)):
                p.copy_(state)
