"""Bad input is refused where moments are built, in words that name the argument, the shapes and the fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpgelu import FactoredMoments, InputError, MPGELUError
from reference import TYPES

EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
NAN, INF = float("nan"), float("inf")
MEAN = torch.zeros(2, 3)


def message(kind: Any, *arguments: Any) -> str:
    build = kind.certain if len(arguments) == 1 else kind.of
    with pytest.raises(InputError) as error:
        build(*arguments)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, MPGELUError)
    text = str(error.value)
    assert text.startswith(f"{kind.__name__}.{build.__name__}: ")
    return text


BAD_MEANS = {
    "integers": (torch.ones(2, 3, dtype=torch.int64), ["mean", "float", "torch.int64", "x.float()"]),
    "booleans": (torch.ones(2, 3, dtype=torch.bool), ["mean", "float", "torch.bool"]),
    "complex": (torch.ones(2, 3, dtype=torch.complex64), ["mean", "float", "torch.complex64"]),
    "array": (np.ones((2, 3)), ["mean", "torch.Tensor", "ndarray", "torch.as_tensor"]),
    "list": ([1.0, 2.0], ["mean", "torch.Tensor", "list"]),
    "scalar": (torch.tensor(1.0), ["mean", "(*batch, features)", "scalar"]),
    "no rows": (torch.ones(0, 3), ["mean", "empty", "(0, 3)", "at least one row"]),
    "no features": (torch.ones(3, 0), ["mean", "empty", "(3, 0)"]),
    "nan": (torch.tensor([[1.0, NAN]]), ["mean", "finite", "nan", "(0, 1)", "impute"]),
    "infinite": (torch.tensor([1.0, 2.0, -INF]), ["mean", "finite", "-inf", "(2,)"]),
}


@EVERY_TYPE
@pytest.mark.parametrize("case", BAD_MEANS)
def test_bad_mean(kind: Any, case: str) -> None:
    mean, parts = BAD_MEANS[case]
    spread = torch.ones(2, 3)
    for text in (message(kind, mean), message(kind, mean, spread)):
        assert all(part in text for part in parts), text


def scaled_eye(entry: float) -> Tensor:
    """Covariances (2, 3, 3) with one off-diagonal pair."""
    covariance = torch.eye(3).repeat(2, 1, 1)
    covariance[1, 0, 1] = covariance[1, 1, 0] = entry
    return covariance


def asymmetric() -> Tensor:
    covariance = scaled_eye(0.5)
    covariance[1, 0, 1] = 0.4
    return covariance


BAD_SPREADS: dict[str, tuple[Any, list[str]]] = {
    "array": (np.ones((2, 3)), ["variance or covariance", "torch.Tensor", "ndarray"]),
    "number": (0.5, ["variance or covariance", "torch.Tensor", "float"]),
    "dtype": (torch.ones(2, 3).double(), ["torch.float32", "torch.float64", ".to(mean.dtype)"]),
    "integers": (torch.ones(2, 3, dtype=torch.int64), ["torch.float32", "torch.int64"]),
    "features": (torch.ones(2, 4), ["(2, 3)", "(2, 3, 3)", "got (2, 4)"]),
    "covariance for all rows": (torch.eye(3), ["(2, 3)", "got (3, 3)", "covariance[None]"]),
    "rows": (torch.ones(5, 3, 3), ["(2, 3, 3)", "got (5, 3, 3)"]),
    "negative variance": (torch.tensor([1.0, -0.25, 1.0]), ["variance", "negative", "-0.25"]),
    "nan variance": (torch.tensor([1.0, NAN, 1.0]), ["variance", "finite", "nan", "(1,)"]),
    "infinite covariance": (scaled_eye(INF), ["covariance", "finite", "inf", "(1, 0, 1)"]),
    "asymmetric": (asymmetric(), ["covariance", "symmetric", "0.1", "(C + C.mT) / 2"]),
    "not semidefinite": (scaled_eye(2.0), ["covariance", "positive semidefinite", "eigenvalue", "-1"]),
    "negative on the diagonal": (-torch.eye(3).repeat(2, 1, 1), ["covariance", "positive semidefinite", "-1"]),
}


@EVERY_TYPE
@pytest.mark.parametrize("case", BAD_SPREADS)
def test_bad_spread(kind: Any, case: str) -> None:
    spread, parts = BAD_SPREADS[case]
    text = message(kind, MEAN, spread)
    assert all(part in text for part in parts), text


@EVERY_TYPE
def test_a_large_row_does_not_hide_a_bad_small_one(kind: Any) -> None:
    """The tolerance for rounding is each matrix's own."""
    for bad, word in ((scaled_eye(2.0), "semidefinite"), (asymmetric(), "symmetric")):
        bad[0] *= 1e8
        assert word in message(kind, MEAN, bad)


@EVERY_TYPE
def test_rounding_is_forgiven(kind: Any) -> None:
    root = torch.randn(50, 20, 3)
    covariance = root @ root.mT  # rank 3: seventeen eigenvalues that are zero but for rounding
    covariance[:, 0, 1] *= 1 + 1e-6
    assert kind.of(torch.zeros(50, 20), covariance).features == 20  # no error


@pytest.mark.parametrize("max_rank", [-1, NAN])
def test_bad_max_rank(max_rank: float) -> None:
    with pytest.raises(InputError, match="max_rank"):
        FactoredMoments.certain(MEAN, max_rank)
    with pytest.raises(InputError, match="max_rank"):
        FactoredMoments.of(MEAN, MEAN, max_rank)
