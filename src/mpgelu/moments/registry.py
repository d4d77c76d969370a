"""The registry of moment types, by whose names files and settings refer to them."""

from __future__ import annotations

from mpgelu.moments.base import Moments
from mpgelu.registry import Registry

moment_types: Registry[Moments] = Registry("type of moments")
