"""Conversion of the arguments of an estimator to JSON and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpgelu.likelihoods import Likelihood, likelihoods
from mpgelu.moments import moment_types


def plain(value: object) -> object:
    """Return an argument in a form that JSON can represent.

    Moment types and likelihoods are represented by their registered names. Functions and random states cannot be
    represented and become ``None``.
    """
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
    """Return arguments from the form that :func:`plain` gave them.

    Args:
        params: Arguments by name.

    Raises:
        DataError: A moment type or likelihood is not registered.
    """
    found = dict(params)
    if isinstance(kept := found.get("moments"), dict):
        found["moments"] = moment_types.type_of(kept["moments"])
    if isinstance(kept := found.get("likelihood"), dict):
        found["likelihood"] = likelihoods.build(kept["likelihood"])
    return found
