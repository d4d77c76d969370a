"""The native kernels against the plain torch rules in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap

from mpgelu import native
from mpgelu.moments import Block, DiagonalMoments, FullMoments
from mpgelu.native.row_wise import _CONTRACT, contract, gram, products
from mpgelu.rules import fused, keep_probability, mpgelu, relu

Function = Callable[..., tuple[Tensor, ...]]

needs_native = pytest.mark.skipif(not native.available(), reason="there is no C compiler, or MPGELU_NATIVE=0")


def _plain_mask(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    keep = keep_probability(mean, variance)
    return keep, keep * mean, keep * keep_probability(-mean, variance) * (variance + mean.square())


def _plain_mpgelu(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    after = mpgelu(DiagonalMoments(mean, variance))
    return after.mean, after.variance


def _plain_relu(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    after = relu(DiagonalMoments(mean, variance))
    return after.mean, after.variance


def _plain_dvi(mean: Tensor, covariance: Tensor) -> tuple[Tensor, ...]:
    after = relu(FullMoments(mean, covariance), "dvi")
    return after.mean, after.covariance


def _plain_exact(mean: Tensor, covariance: Tensor) -> tuple[Tensor, ...]:
    after = relu(FullMoments(mean, covariance), "exact")
    return after.mean, after.covariance


def _plain_contract(variance: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    return (Block(factor, variance).marginal_variance,)


def _fused_contract(variance: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    return (contract(variance, factor),)


def _diagonal(*batch: int, n: int = 7) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(*batch, n), torch.rand(*batch, n) * 4 + 0.01


def _full(*batch: int, n: int = 7) -> tuple[Tensor, Tensor]:
    root = torch.randn(*batch, n, n)
    scale = torch.rand(*batch, n) * 2 + 0.1
    covariance = root @ root.mT / n + 0.1 * torch.eye(n)
    return 2 * torch.randn(*batch, n), covariance * scale.unsqueeze(-1) * scale.unsqueeze(-2)


def _block(*batch: int, n: int = 7) -> tuple[Tensor, Tensor]:
    return torch.rand(*batch, 5), torch.randn(*batch, 5, n)


MASK = pytest.param(fused.mpgelu_mask, _plain_mask, _diagonal, id="mpgelu_mask")
MPGELU = pytest.param(fused.mpgelu_diagonal, _plain_mpgelu, _diagonal, id="mpgelu_diagonal")
RELU = pytest.param(fused.relu_diagonal, _plain_relu, _diagonal, id="relu_diagonal")
DVI = pytest.param(fused.relu_full_dvi, _plain_dvi, _full, id="relu_full_dvi")
EXACT = pytest.param(fused.relu_full_exact, _plain_exact, _full, id="relu_full_exact")
CONTRACT = pytest.param(_fused_contract, _plain_contract, _block, id="contract")

every = pytest.mark.parametrize(("function", "plain", "make"), [MASK, MPGELU, RELU, DVI, EXACT, CONTRACT])
diagonal = pytest.mark.parametrize(("function", "plain", "make"), [MASK, MPGELU, RELU])
full = pytest.mark.parametrize(("function", "plain", "make"), [DVI, EXACT])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _gradients(function: Function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a random but fixed sum of the outputs; of a symmetric matrix, the symmetric part."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    found = torch.autograd.grad(outputs, leaves, weights)
    return tuple(
        (g + g.mT) / 2 if g.dim() > 1 and g.shape[-1] == g.shape[-2] and torch.equal(x, x.mT) else g
        for g, x in zip(found, inputs, strict=True)
    )


def _double(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in inputs)


def _check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        scale = float(two.abs().max()) if two.numel() else 1.0
        torch.testing.assert_close(one.double(), two, rtol=tolerance, atol=tolerance * max(scale, 1e-30))


def _check_both(function: Function, plain: Function, inputs: tuple[Tensor, ...]) -> None:
    _check(function(*inputs), plain(*_double(inputs)), 1e-5)
    _check(_gradients(function, inputs), _gradients(plain, _double(inputs)), 1e-4)


@needs_native
@every
@pytest.mark.parametrize("batch", [(), (1,), (16,), (37,), (3, 5)])
def test_values_and_gradients(function: Function, plain: Function, make: Any, batch: tuple[int, ...]) -> None:
    _check_both(function, plain, make(*batch))


@needs_native
@every
@pytest.mark.parametrize("n", [1, 2, 20, 33])
def test_widths(function: Function, plain: Function, make: Any, n: int) -> None:
    _check_both(function, plain, make(18, n=n))


@needs_native
@every
@pytest.mark.parametrize("batch", [(0,), (3, 0, 2)])
def test_empty_batch(function: Function, plain: Function, make: Any, batch: tuple[int, ...]) -> None:
    inputs = make(*batch)
    assert [x.shape for x in function(*inputs)] == [x.shape for x in plain(*_double(inputs))]
    assert [x.shape for x in _gradients(function, inputs)] == [x.shape for x in inputs]


@needs_native
@every
def test_non_contiguous(function: Function, plain: Function, make: Any) -> None:
    first, second = make(4, 6)
    inputs = first.transpose(0, 1), second.flip(0).transpose(0, 1)
    assert not inputs[0].is_contiguous()
    if function in (fused.relu_full_dvi, fused.relu_full_exact):
        inputs = inputs[0], inputs[1].mT
    _check_both(function, plain, inputs)


@needs_native
@every
def test_batches_broadcast(function: Function, plain: Function, make: Any) -> None:
    first, second = make(5)[0], make(3, 5)[1]
    expected = function(first.expand(3, *first.shape), second)
    for one, two in zip(function(first, second), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert _gradients(function, (first, second))[0].shape == first.shape


@needs_native
@every
@pytest.mark.parametrize("in_dims", [(0, 0), (1, 1), (0, None), (None, 1)])
def test_vmap_is_a_loop(function: Function, plain: Function, make: Any, in_dims: tuple[int | None, ...]) -> None:
    inputs = make(3, 4)
    inputs = tuple(x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(inputs, in_dims, strict=True))

    def loop(*stacked: Tensor) -> tuple[Tensor, ...]:
        slices = [
            [x if dim is None else x.select(dim, k) for x, dim in zip(stacked, in_dims, strict=True)] for k in range(3)
        ]
        return tuple(torch.stack(parts) for parts in zip(*(function(*part) for part in slices), strict=True))

    mapped = vmap(function, in_dims)
    for one, two in zip(mapped(*inputs), loop(*inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    for one, two in zip(_gradients(mapped, inputs), _gradients(loop, inputs), strict=True):
        torch.testing.assert_close(one, two)


@needs_native
@every
def test_gradient_inside_vmap(function: Function, plain: Function, make: Any) -> None:
    inputs = make(3, 4)
    mapped = vmap(grad(lambda *x: sum((y * y).sum() for y in function(*x)), (0, 1)))(*inputs)
    whole = grad(lambda *x: sum((y * y).sum() for y in plain(*x)), (0, 1))(*_double(inputs))
    if inputs[1].shape[-1] == inputs[1].shape[-2]:
        whole = whole[0], (whole[1] + whole[1].mT) / 2
    _check(mapped, whole, 1e-4)


def _ladder() -> tuple[Tensor, Tensor]:
    """Ratios from -14 to 14, at variances over 60 powers of ten."""
    variance = torch.logspace(-28, 30, 59).unsqueeze(-1)
    return torch.linspace(-14, 14, 1001) * variance.sqrt(), variance.expand(59, 1001)


def _by_scale(function: Function) -> Function:
    """Everything in units of the standard deviation."""

    def scaled(ratio: Tensor, factor: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        after = function(ratio * scale, factor * scale.square())
        return *after[:-2], after[-2] / scale, after[-1] / scale.square()

    return scaled


@needs_native
@diagonal
def test_every_scale(function: Function, plain: Function, make: Any) -> None:
    scale = torch.logspace(-14, 15, 30).unsqueeze(-1)
    inputs = torch.linspace(-14, 14, 1001).expand(30, 1001), torch.ones(30, 1001), scale
    _check(_by_scale(function)(*inputs), _by_scale(plain)(*_double(inputs)), 1e-5)
    found, expected = _gradients(_by_scale(function), inputs), _gradients(_by_scale(plain), _double(inputs))
    _check(found[:2], expected[:2], 1e-4)


@needs_native
@diagonal
def test_tails(function: Function, plain: Function, make: Any) -> None:
    mean = torch.linspace(-12.5, 12.5, 1001)
    for one, two in zip(function(mean, torch.ones(1001)), plain(mean.double(), torch.ones(1001).double()), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=5e-5, atol=1e-36)


@needs_native
@diagonal
def test_nothing_is_negative(function: Function, plain: Function, make: Any) -> None:
    assert (function(*_ladder())[-1] >= 0).all()


@needs_native
@diagonal
def test_zero_variance_is_relu(function: Function, plain: Function, make: Any) -> None:
    mean = torch.tensor([-1e4, -1.0, -1e-3, 0.0, 1e-3, 1.0, 1e4])
    *_, mean_after, variance_after = function(mean, torch.zeros(7))
    assert torch.equal(mean_after, torch.relu(mean))
    assert torch.equal(variance_after, torch.zeros(7))


@needs_native
@diagonal
def test_no_slope_by_a_variance_that_counts_as_zero(function: Function, plain: Function, make: Any) -> None:
    variance = torch.zeros(3, requires_grad=True)
    *_, mean_after, _ = function(torch.tensor([-1e-14, 0.0, 1e-14]), variance)
    assert torch.equal(torch.autograd.grad(mean_after.sum(), variance)[0], torch.zeros(3))


@needs_native
@diagonal
def test_certain_and_extreme_units(function: Function, plain: Function, make: Any) -> None:
    mean = torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4]).repeat(4)
    variance = torch.tensor([0.0, 1e-30, 1.0, 1e30]).repeat_interleave(5)
    for one, two in zip(function(mean, variance), plain(mean.double(), variance.double()), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-14)
    assert all(gradient.isfinite().all() for gradient in _gradients(function, (mean, variance)))


@needs_native
@full
def test_certain_and_extreme_vectors(function: Function, plain: Function, make: Any) -> None:
    variance = torch.tensor([0.0, 0.0, 1.0, 1.0, 1e30, 1e30, 1e-30, 1e-30])
    stddev = variance.sqrt()
    covariance = 0.5 * stddev.outer(stddev) + 0.5 * variance.diag()
    for mean in (torch.zeros(8), torch.full((8,), 1e4), torch.full((8,), -1e4), torch.tensor([1e4, -1e4] * 4)):
        found, expected = function(mean, covariance), plain(mean.double(), covariance.double())
        for one, two in zip(found, expected, strict=True):
            assert one.isfinite().all()
            kept = (slice(6),) * one.dim()  # float32 counts the last two variances as zero
            torch.testing.assert_close(one[kept].double(), two[kept], rtol=1e-4, atol=1e-14)
        assert all(gradient.isfinite().all() for gradient in _gradients(function, (mean, covariance)))


@needs_native
@full
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_perfect_correlation(function: Function, plain: Function, make: Any, sign: float) -> None:
    ratio = torch.linspace(-4, 4, 41)
    mean = torch.cartesian_prod(ratio, ratio) * torch.tensor([1.0, 2.0])
    covariance = torch.tensor([[1.0, sign * 2.0], [sign * 2.0, 4.0]]).expand(len(mean), 2, 2)
    _check(function(mean, covariance), plain(*_double((mean, covariance))), 1e-4)
    for gradient in _gradients(function, (mean, covariance)):
        assert gradient.abs().max() < 10  # the infinite slope of the DVI formula is cut off


@needs_native
@full
def test_impossible_correlation_is_clamped(function: Function, plain: Function, make: Any) -> None:
    mean, covariance = torch.tensor([0.5, -0.5]), torch.tensor([[1.0, 1.5], [1.5, 1.0]])
    possible = torch.ones(2, 2)
    torch.testing.assert_close(function(mean, covariance)[1], function(mean, possible)[1])
    assert _gradients(function, (mean, covariance))[1][0, 1] == 0


@needs_native
@full
def test_every_correlation(function: Function, plain: Function, make: Any) -> None:
    correlation = torch.cat([torch.linspace(-0.99, 0.99, 199), torch.tensor([-1e-3, -1e-8, 0.0, 1e-30, 1e-3])])
    ratio = torch.tensor([-3.0, -0.5, 0.0, 1.0, 6.0])
    first, second, rho = torch.meshgrid(ratio, ratio, correlation, indexing="ij")
    mean = torch.stack([first, second], dim=-1)
    one = torch.ones_like(rho)
    covariance = torch.stack([one, rho, rho, one], dim=-1).view(*rho.shape, 2, 2)
    _check_both(function, plain, (mean, covariance))


@needs_native
@every
def test_nan_stays_nan(function: Function, plain: Function, make: Any) -> None:
    first, second = make(3)
    assert all(y.isnan().any() for y in function(first * torch.nan, second))
    assert all(y.isnan().any() for y in function(first, second * torch.nan))


@needs_native
@every
def test_second_derivative_is_an_error(function: Function, plain: Function, make: Any) -> None:
    inputs = [x.requires_grad_() for x in make(3)]
    first = torch.autograd.grad([y.sum() for y in function(*inputs)], inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(first[0].sum(), inputs)


@needs_native
def test_when_native_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    assert fused.use_native(x, torch.nn.Parameter(x))
    assert not fused.use_native(x, x.double())
    assert not fused.use_native(x, x.to("meta"))
    with forward_ad.dual_level():
        assert not fused.use_native(x)
    seen = []
    vmap(lambda row: seen.append(fused.use_native(row)) or row)(torch.ones(2, 3))  # type: ignore[func-returns-value]
    assert seen == [True]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fused.use_native(x)


@needs_native
def test_wrong_kind_of_tensor() -> None:
    with pytest.raises(TypeError, match=r"contract takes contiguous float32 on the CPU, got torch\.DoubleTensor"):
        _CONTRACT(torch.ones(2).double(), torch.ones(2, 3).double())


def _start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


STATE = """
import logging, torch
logging.basicConfig(level="INFO", format="%(name)s %(levelname)s %(message)s")
from mpgelu import native
from mpgelu.rules.fused import use_native
print("native", native.available(), native.available(), use_native(torch.ones(1)))
"""


def test_turned_off() -> None:
    assert _start(STATE, MPGELU_NATIVE="0").communicate()[0] == "native False False False\n"


def test_without_a_compiler(tmp_path: Path) -> None:
    for compiler in ("no-such-compiler", "false"):
        output = _start(STATE, CC=compiler, XDG_CACHE_HOME=str(tmp_path), MPGELU_NATIVE="1").communicate()[0]
        log, state = output.splitlines()  # said once, although asked three times
        assert log.startswith("mpgelu INFO No native kernels")
        assert compiler in log
        assert state == "native False False False"


@needs_native
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    code = f"{STATE}\nfrom mpgelu.rules.fused import relu_diagonal\nprint(relu_diagonal(*torch.ones(2, 1)))"
    both = [_start(code, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("native True True True\n(tensor([1.08")
    assert len([*(tmp_path / "mpgelu").iterdir()]) == 1  # nothing half-made is left


def test_run_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda: None)
    with pytest.raises(RuntimeError, match="there are no native kernels"):
        native.run("contract", (), (), ())


@needs_native
@pytest.mark.parametrize(
    ("function", "shapes"), [(gram, [(5, 7), (5, 7, 2)]), (products, [(5, 7, 3), (5, 2, 3)])], ids=["gram", "products"]
)
def test_small_products(function: Any, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    plain = [x.detach().double().requires_grad_() for x in inputs]
    value, wanted = function(*inputs), function(*plain)
    weight = torch.randn(value.shape)
    torch.testing.assert_close(value.double(), wanted, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((value * weight).sum(), inputs)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), plain)
    for slope, wanted_slope in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(slope.double(), wanted_slope, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vmap(function)(*inputs), value)
