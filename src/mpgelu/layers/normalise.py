"""Normalisation layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers.registry import layers
from mpgelu.rules import batch_norm, layer_norm


@layers.register("num_features", "eps", "affine")
class BatchNorm1d(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` in evaluation mode, which also accepts moments; see :func:`mpgelu.rules.batch_norm`.

    It always normalises with the running statistics, in training mode too, and never updates them. This is exact for
    every type of moments. The arguments are those of torch.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments.

        Raises:
            InputError: The layer was built without running statistics.
        """
        if self.running_mean is None or self.running_var is None:
            raise InputError("BatchNorm1d: there are no running statistics; use track_running_stats=True")
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.eps)


@layers.register("normalized_shape", "eps", "elementwise_affine")
class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, which also accepts moments; see :func:`mpgelu.rules.layer_norm`.

    Moments are approximated to first order. The arguments are those of torch.
    """

    def forward(self, input: Any) -> Any:
        """Apply the layer to a tensor or to moments.

        Raises:
            InputError: ``normalized_shape`` has more than one dimension.
        """
        if len(self.normalized_shape) != 1:
            raise InputError(
                "LayerNorm: normalises over the last dimension, the features of a vector, got normalized_shape="
                f"{tuple(self.normalized_shape)}; flatten the value first"
            )
        return layer_norm(input, self.weight, self.bias, self.eps)
