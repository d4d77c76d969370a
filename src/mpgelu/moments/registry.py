"""The types of moments that files and settings name."""

from __future__ import annotations

from mpgelu.moments.base import Moments
from mpgelu.registry import Registry

moment_types: Registry[Moments] = Registry("type of moments")
