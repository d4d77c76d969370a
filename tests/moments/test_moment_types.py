"""The three kinds of moments: how they are built, converted and shown."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.moments import Moments
from reference import MOMENTS, TYPES, random_covariance

EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)
SHAPES = pytest.mark.parametrize("batch", [(), (5,), (2, 3), (1, 1, 2)])


@EVERY_TYPE
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_certain_has_no_spread(kind: Any, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(*batch, 4).to(dtype)
    moments = kind.certain(x)
    assert moments.mean is x
    assert moments.features == 4
    assert moments.batch_shape == batch
    assert torch.equal(moments.variance, torch.zeros(*batch, 4, dtype=dtype))
    assert torch.equal(moments.covariance, torch.zeros(*batch, 4, 4, dtype=dtype))


@EVERY_TYPE
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_of_variance(kind: Any, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    mean, variance = torch.randn(*batch, 4).to(dtype), torch.rand(*batch, 4).to(dtype)
    moments = kind.of(mean, variance)
    assert torch.equal(moments.mean, mean)
    assert torch.equal(moments.variance, variance)
    assert torch.equal(moments.covariance, torch.diag_embed(variance))


@EVERY_TYPE
@SHAPES
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.float32, 1e-5), (torch.float64, 1e-13)],
)
def test_of_covariance(kind: Any, batch: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    mean, covariance = torch.randn(*batch, 4).to(dtype), random_covariance(*batch, 4).to(dtype)
    moments = kind.of(mean, covariance)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    wanted = torch.diag_embed(diagonal) if kind is DiagonalMoments else covariance
    assert moments.covariance.dtype == moments.variance.dtype == dtype
    torch.testing.assert_close(moments.variance, diagonal, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(moments.covariance, wanted, rtol=tolerance, atol=tolerance)


@EVERY_TYPE
def test_one_spread_for_all_rows(kind: Any) -> None:
    mean, variance, covariance = torch.randn(5, 3), torch.tensor([1.0, 2.0, 3.0]), random_covariance(3).float()
    assert torch.equal(kind.of(mean, variance).variance, variance.expand(5, 3))
    assert torch.equal(kind.of(mean, torch.tensor(0.5)).variance, torch.full((5, 3), 0.5))
    shared = kind.of(mean, covariance[None])
    assert shared.covariance.shape == (5, 3, 3)
    torch.testing.assert_close(shared.variance, covariance.diagonal().expand(5, 3))


@EVERY_TYPE
def test_singular_covariances_are_welcome(kind: Any) -> None:
    root = torch.randn(6, 5, 2)
    covariance = root @ root.mT
    moments = kind.of(torch.randn(6, 5), covariance)
    torch.testing.assert_close(moments.variance, covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-4, atol=1e-5)
    assert (moments.variance >= 0).all()


@EVERY_TYPE
@pytest.mark.parametrize("source", MOMENTS)
def test_conversions_keep_what_the_target_can_hold(kind: Any, source: str) -> None:
    moments = MOMENTS[source](2, 3, 4)
    converted = kind.from_moments(moments)
    assert type(converted) is kind
    assert converted.mean is moments.mean
    torch.testing.assert_close(converted.variance, moments.variance, rtol=1e-12, atol=1e-13)
    if kind is not DiagonalMoments:
        torch.testing.assert_close(converted.covariance, moments.covariance, rtol=1e-12, atol=1e-13)
    assert FactoredMoments.from_moments(factored := FactoredMoments.certain(moments.mean)) is factored


@pytest.mark.parametrize("source", MOMENTS)
def test_variance_is_the_diagonal_of_the_covariance(source: str) -> None:
    moments = MOMENTS[source](2, 3, 4)
    assert moments.variance.shape == (2, 3, 4)
    torch.testing.assert_close(moments.variance, moments.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-12, atol=0)


@EVERY_TYPE
def test_gradients_reach_what_moments_were_built_from(kind: Any) -> None:
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for spread in (torch.rand(2, 3, dtype=torch.float64), random_covariance(2, 3)):
        spread.requires_grad_()
        moments = kind.of(mean, spread)
        gradients = torch.autograd.grad((moments.mean.sum() + moments.variance.sum()), (mean, spread))
        assert torch.equal(gradients[0], torch.ones_like(mean))
        wanted = torch.ones_like(spread) if spread.dim() == 2 else torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
        torch.testing.assert_close(gradients[1], wanted)


@pytest.mark.parametrize(
    ("moments", "text"),
    [
        (DiagonalMoments.certain(torch.zeros(2, 3)), "DiagonalMoments(mean (2, 3), float32)"),
        (FullMoments.certain(torch.zeros(3).double()), "FullMoments(mean (3,), float64)"),
        (
            FactoredMoments.of(torch.zeros(2, 3), torch.ones(2, 3)),
            "FactoredMoments(mean (2, 3), 0 blocks of 0 sources (0 per row) + residual, float32)",
        ),
        (
            FactoredMoments.of(torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)),
            "FactoredMoments(mean (2, 3), 1 blocks of 3 sources (3 per row), float32)",
        ),
        (DiagonalMoments(torch.zeros(2, device="meta"), torch.zeros(2, device="meta")), "meta)"),
    ],
)
def test_repr_shows_shapes_and_structure(moments: Moments, text: str) -> None:
    assert repr(moments).endswith(text)


@pytest.mark.parametrize("source", MOMENTS)
def test_moments_can_be_copied_and_pickled_but_not_changed(source: str) -> None:
    moments = MOMENTS[source](2, 3)
    for twin in (copy.deepcopy(moments), pickle.loads(pickle.dumps(moments))):
        assert torch.equal(twin.mean, moments.mean)
        assert torch.equal(twin.covariance, moments.covariance)
    with pytest.raises(AttributeError):
        moments.mean = torch.zeros(2, 3)


@EVERY_TYPE
def test_building_inside_vmap(kind: Any) -> None:
    x = torch.randn(4, 3)

    def spread(x: Tensor) -> tuple[Tensor, Tensor]:
        return kind.certain(x).variance, kind.of(x, x.square()).variance

    zero, square = torch.func.vmap(spread)(x)
    assert torch.equal(zero, torch.zeros(4, 3))
    assert torch.equal(square, x.square())
