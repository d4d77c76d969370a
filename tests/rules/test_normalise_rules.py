"""Batch normalisation is exact; layer normalisation is first order, and how far that goes is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpgelu import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules import batch_norm, layer_norm
from reference import TYPES, random_covariance

N = 16
EVERY_TYPE = pytest.mark.parametrize("kind", TYPES)


@EVERY_TYPE
def test_without_randomness_both_are_those_of_torch(kind: Any) -> None:
    x, weight, bias, mean = (torch.randn(*shape) for shape in ((5, N), (N,), (N,), (N,)))
    variance = torch.rand(N)
    wanted = F.batch_norm(x, mean, variance, weight, bias, eps=1e-3)
    torch.testing.assert_close(batch_norm(x, mean, variance, weight, bias, 1e-3), wanted)
    torch.testing.assert_close(batch_norm(kind.certain(x), mean, variance, weight, bias, 1e-3).mean, wanted)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        out = layer_norm(kind.certain(x), w, b, 1e-3)
        torch.testing.assert_close(out.mean, F.layer_norm(x, (N,), w, b, 1e-3))
        assert torch.equal(out.covariance, torch.zeros(5, N, N))


def sampled(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    h = mean + torch.randn(100_000, N).double() @ torch.linalg.cholesky(covariance).mT
    out = F.layer_norm(h, (N,))
    return out.mean(0), torch.cov(out.mT)


@pytest.mark.parametrize(("noise", "mean_error", "covariance_error"), [(0.1, 0.02, 0.02), (0.5, 0.15, 0.12)])
def test_layer_norm_is_close_to_sampling(noise: float, mean_error: float, covariance_error: float) -> None:
    """Errors relative to the standard deviations, for noise of that size beside a mean of size one."""
    mean, covariance = torch.randn(N).double(), noise**2 * random_covariance(N)
    for value in (FullMoments.of(mean, covariance), FactoredMoments.of(mean, covariance)):
        out = layer_norm(value)
        found_mean, found = sampled(mean, covariance)
        scale = found.diagonal().sqrt()
        assert ((out.mean - found_mean).abs() / scale).max() < mean_error
        assert ((out.covariance - found).abs() / (scale.unsqueeze(-1) * scale)).max() < covariance_error


def test_noise_counts_in_the_normaliser() -> None:
    """Units without any mean come out with variance near one, not divided by eps."""
    out = layer_norm(FullMoments.of(torch.zeros(N).double(), torch.eye(N).double()))
    found = sampled(torch.zeros(N).double(), torch.eye(N).double())[1]
    torch.testing.assert_close(out.variance, found.diagonal(), rtol=0.03, atol=0)


def test_layer_norm_keeps_the_names_of_sources() -> None:
    value = FactoredMoments.of(torch.randn(3, N), torch.rand(3, N))
    out = layer_norm(value)
    assert out.blocks[0].variance is value.residual
    assert out.residual is None


def test_diagonal_layer_norm_is_the_dense_one_of_independent_units() -> None:
    mean, variance = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    diagonal, full = layer_norm(DiagonalMoments(mean, variance)), layer_norm(FullMoments.of(mean, variance))
    torch.testing.assert_close(diagonal.mean, full.mean)
    torch.testing.assert_close(diagonal.variance, full.variance)
