"""Random values with more than one event dimension: every elementwise rule treats them as the flat vector they hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpgelu
from mpgelu.errors import InputError
from mpgelu.layers import GELU, BatchNorm1d, LayerNorm, LeakyReLU, Operation, RobustScale, Tanh
from mpgelu.moments import DiagonalMoments, FactoredMoments, FullMoments
from mpgelu.rules import add, concatenate, dropout, flatten, fork, linear, scale

IMAGE = (2, 3, 4)
images = partial(DiagonalMoments.certain, event_dims=3)


@pytest.fixture
def value() -> DiagonalMoments:
    generator = torch.Generator().manual_seed(0)
    mean, variance = (torch.rand(5, *IMAGE, generator=generator, dtype=torch.float64) for _ in range(2))
    return DiagonalMoments.of(mean - 0.5, variance, event_dims=3)


def flat(value: DiagonalMoments) -> DiagonalMoments:
    return DiagonalMoments(value.mean.flatten(1), value.variance.flatten(1))


ELEMENTWISE: list[Callable[[Any], Any]] = [
    mpgelu.MPGELU(),
    mpgelu.ReLU(),
    LeakyReLU(0.1),
    Tanh(),
    GELU(),
    partial(dropout, rate=0.2),
    partial(scale, gain=-3.0),
    partial(add, other=2.0),
    lambda h: add(h, h, -0.5),
    lambda h: 1 - h / 2,
    fork,
]


@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_elementwise_rules_keep_the_shape_and_agree_with_the_flat_vector(
    rule: Callable[[Any], Any], value: DiagonalMoments
) -> None:
    after, expected = rule(value), rule(flat(value))
    assert after.event_shape == IMAGE
    assert after.batch_shape == (5,)
    torch.testing.assert_close(after.mean.flatten(1), expected.mean)
    torch.testing.assert_close(after.variance.flatten(1), expected.variance)


def test_layers_over_the_last_dimension_leave_the_others_alone(value: DiagonalMoments) -> None:
    weight = torch.randn(6, 4, dtype=torch.float64)
    norm = LayerNorm(4, dtype=torch.float64)
    batch = BatchNorm1d(4, dtype=torch.float64)
    robust = RobustScale(torch.ones(4), torch.ones(4)).double()
    rules: list[Callable[[Any], Any]] = [lambda h: linear(h, weight), norm, batch, robust]
    for rule in rules:
        after = rule(value)
        of_rows = rule(DiagonalMoments(value.mean, value.variance))  # vectors of four in a batch (5, 2, 3)
        assert after.event_dims == 3
        assert of_rows.event_dims == 1
        torch.testing.assert_close(after.variance, of_rows.variance)


def test_layer_norm_over_several_dimensions_is_refused(value: DiagonalMoments) -> None:
    with pytest.raises(InputError, match=r"LayerNorm: normalises over the last dimension.*normalized_shape=\(3, 4\)"):
        LayerNorm((3, 4), elementwise_affine=False)(value)


def test_flatten_joins_event_dimensions_and_never_rows(value: DiagonalMoments) -> None:
    after = flatten(value)
    assert (after.event_shape, after.batch_shape) == ((24,), (5,))
    torch.testing.assert_close(after.covariance, torch.diag_embed(value.variance.flatten(1)))
    assert flatten(value, -2).event_shape == (2, 12)
    assert flatten(value, 1, 2).event_shape == (6, 4)
    assert flatten(value, 3).event_shape == IMAGE
    with pytest.raises(InputError, match=r"event shape \(2, 3, 4\), and dimensions 0 to -1"):
        flatten(value, 0)


def test_concatenate_along_channels(value: DiagonalMoments) -> None:
    both = concatenate(value, 2 * value, dim=1)
    assert both.event_shape == (4, 3, 4)
    torch.testing.assert_close(both.variance[:, 2:], 4 * value.variance)
    with pytest.raises(InputError, match=r"along their events, the last 3 of 4 dimensions, got dim=0"):
        concatenate(value, value, dim=0)


def test_moments_of_images_behave_like_tensors(value: DiagonalMoments) -> None:
    assert value[1:3].shape == (2, *IMAGE)
    assert value[0].batch_shape == ()
    assert value[0].event_shape == IMAGE
    torch.testing.assert_close(value[-1].stddev, value.variance[-1].sqrt())
    assert value.to(torch.float32).event_dims == value.detach().event_dims == 3
    assert repr(value) == "DiagonalMoments(mean (5, 2, 3, 4), events (2, 3, 4), float64)"
    with pytest.raises(IndexError, match=r"batch dimensions \(5,\).*together"):
        value[0, 0]


def test_transforms_keep_the_number_of_event_dimensions(value: DiagonalMoments) -> None:
    mapped = torch.func.vmap(mpgelu.MPGELU())(value)
    assert mapped.event_dims == 3
    torch.testing.assert_close(mapped.variance, mpgelu.MPGELU()(value).variance)


@pytest.mark.parametrize("make", [FullMoments.from_moments, FactoredMoments.from_moments])
def test_correlations_need_vectors(make: Callable[[Any], Any], value: DiagonalMoments) -> None:
    with pytest.raises(InputError, match=r"needs moments of vectors .*\(2, 3, 4\); use mpgelu.rules.flatten"):
        make(value)
    assert make(flatten(value)).features == 24


def test_likelihoods_want_a_vector_of_outputs() -> None:
    outputs = DiagonalMoments.certain(torch.zeros(5, 3, 2), event_dims=2)
    with pytest.raises(InputError, match=r"2 outputs for each row, got mean \(5, 3, 2\) of event shape"):
        mpgelu.HeteroscedasticGaussian().predictive(outputs)


@pytest.mark.parametrize("dims", [0, 5])
def test_event_dims_are_checked(dims: int) -> None:
    with pytest.raises(InputError, match=rf"DiagonalMoments.certain: event_dims must be from 1 to 4.*got {dims}"):
        DiagonalMoments.certain(torch.zeros(5, *IMAGE), event_dims=dims)


def test_a_spread_of_images_is_a_variance() -> None:
    with pytest.raises(InputError, match="a variance must broadcast"):
        DiagonalMoments.of(torch.zeros(5, 3, 4), torch.ones(5, 3, 4, 4), event_dims=2)


class Pooled(nn.Module):
    """A network of images: noise, a nonlinearity, flattened for a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            mpgelu.Dropout(0.3), mpgelu.MPGELU(), Operation(flatten), mpgelu.Dropout(0.2), mpgelu.Linear(24, 2)
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


@pytest.mark.parametrize("start", [images, lambda x: DiagonalMoments.of(x, 0.1 + x.square() / 9, event_dims=3)])
def test_verify_audits_networks_of_images(start: Callable[[Tensor], DiagonalMoments]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, *IMAGE)
    audit = mpgelu.verify(Pooled(), x, moments=start, draws=4000)
    assert [layer.kind for layer in audit.layers] == ["Dropout", "MPGELU", "Operation", "Dropout", "Linear"]
    assert [layer.verdict for layer in audit.layers] == ["pass"] * 4 + ["FAIL"]  # which correlates its outputs


def test_verify_finds_what_is_wrong_with_an_image() -> None:
    class Wrong(mpgelu.Dropout):
        def forward(self, input: Any) -> Any:
            after = super().forward(input)
            if hasattr(after, "values"):
                after.moments.variance[:, 1, 2, 3] *= 2
            return after

    audit = mpgelu.verify(Wrong(0.3), torch.randn(4, *IMAGE), moments=images, draws=4000)
    assert not audit.passed


def test_verify_says_how_to_start_with_images() -> None:
    with pytest.raises(InputError, match=r"shape \(rows, features\), got \(4, 2, 3, 4\); .*event_dims"):
        mpgelu.verify(mpgelu.Dropout(0.1), torch.randn(4, *IMAGE))
