"""The standard normal functions in the tails, at zero variance, and in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import norm

from mpgelu.rules import keep_probability
from mpgelu.rules.normal import _cdf_by_polynomial, cdf, pdf, standardise

TINY = {torch.float32: 2e-37, torch.float64: 3e-307}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-12)])
def test_cdf_and_pdf_keep_both_tails(dtype: torch.dtype, tolerance: float) -> None:
    a = torch.linspace(-40, 40, 4001, dtype=dtype)
    for ours, reference in ((cdf(a), ndtr), (pdf(a), norm.pdf)):
        wanted = reference(a.double().numpy())
        np.testing.assert_allclose(ours.double().numpy(), wanted, rtol=tolerance, atol=TINY[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_denormal_numbers(dtype: torch.dtype) -> None:
    a = torch.linspace(-60, 60, 100_001, dtype=dtype)
    for values in (cdf(a), pdf(a)):
        assert ((values == 0) | (values >= torch.finfo(dtype).tiny)).all()
    assert (cdf(a).diff() >= 0).all()


def test_standardise_divides_by_the_standard_deviation() -> None:
    mean, variance = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([4.0, 0.25], dtype=torch.float64)
    ratio, stddev = standardise(mean, variance)
    assert ratio.tolist() == [1.5, -2.0]
    assert stddev.tolist() == [2.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_probability_at_zero_variance_is_a_step(dtype: torch.dtype) -> None:
    mean = torch.tensor([-1e4, -1e-3, 0.0, 1e-3, 1e4], dtype=dtype, requires_grad=True)
    variance = torch.zeros(5, dtype=dtype, requires_grad=True)
    keep = keep_probability(mean, variance)
    assert keep.tolist() == [0, 0, 0.5, 1, 1]
    for gradient in torch.autograd.grad(keep.sum(), (mean, variance)):
        assert gradient.isfinite().all()


def test_the_polynomial_for_compilers_is_the_distribution_function() -> None:
    a = torch.linspace(-12.8, 13, 5001, dtype=torch.float64)
    wanted = torch.from_numpy(norm.cdf(a.numpy()))
    torch.testing.assert_close(_cdf_by_polynomial(a), wanted, atol=0, rtol=1e-8)
    torch.testing.assert_close(_cdf_by_polynomial(a.float()).double(), wanted, atol=1e-36, rtol=2e-5)
    compiled = torch.compile(cdf, backend="aot_eager", fullgraph=True)(a.float())
    torch.testing.assert_close(compiled, _cdf_by_polynomial(a.float()), atol=0, rtol=0)
    torch.testing.assert_close(compiled, cdf(a.float()), atol=2e-37, rtol=5e-5)
