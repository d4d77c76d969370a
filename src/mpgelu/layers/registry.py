"""The registry of layers that a saved network may contain; register your own with ``@layers.register(...)``."""

from __future__ import annotations

from torch import nn

from mpgelu.registry import Registry

layers: Registry[nn.Module] = Registry("layer")
layers.register()(nn.Sequential)
