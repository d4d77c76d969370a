"""Arguments of an estimator as a file holds them, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpgelu.likelihoods import Likelihood, likelihoods
from mpgelu.moments import moment_types


def plain(value: object) -> object:
    """An argument as JSON holds it; what cannot be read back, such as a function, is not kept."""
    if isinstance(value, type) and value in moment_types:
        return {"moments": moment_types.name(value)}
    if isinstance(value, Likelihood):
        return {"likelihood": value.described()}
    if isinstance(value, np.random.RandomState) or callable(value):
        return None
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    return [plain(item) for item in value] if isinstance(value, (tuple, list, np.ndarray)) else value


def arguments(params: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`plain` made of the arguments, read back."""
    found = dict(params)
    if isinstance(kept := found.get("moments"), dict):
        found["moments"] = moment_types.type_of(kept["moments"])
    if isinstance(kept := found.get("likelihood"), dict):
        found["likelihood"] = likelihoods.build(kept["likelihood"])
    return found
