"""Normalising layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers.registry import layers
from mpgelu.rules import batch_norm, layer_norm


@layers.register("num_features", "eps", "affine")
class BatchNorm1d(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` in evaluation, for moments too; see :func:`mpgelu.rules.batch_norm`.

    It always normalises with the running statistics, in training mode as well, and leaves them as they are. The
    arguments are those of torch.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        if self.running_mean is None or self.running_var is None:
            raise InputError("BatchNorm1d: there are no running statistics; use track_running_stats=True")
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.eps)


@layers.register("normalized_shape", "eps", "elementwise_affine")
class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the features, for moments too; see :func:`mpgelu.rules.layer_norm`.

    The arguments are those of torch.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments."""
        if len(self.normalized_shape) != 1:
            raise InputError(
                "LayerNorm: normalises over the last dimension, the features of a vector, got normalized_shape="
                f"{tuple(self.normalized_shape)}; flatten the value first"
            )
        return layer_norm(input, self.weight, self.bias, self.eps)
