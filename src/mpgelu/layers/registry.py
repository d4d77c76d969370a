"""The layers that a saved network may consist of."""

from __future__ import annotations

from torch import nn

from mpgelu.registry import Registry

layers: Registry[nn.Module] = Registry("layer")
layers.register()(nn.Sequential)
