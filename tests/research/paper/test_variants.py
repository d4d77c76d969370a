"""Variants of the paper's networks: what they are made of, and the moments of GELU as a random layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mpgelu.errors import InputError
from mpgelu.layers import MPGELU, Dropout, Linear, ReLU
from mpgelu.moments import DiagonalMoments, FactoredMoments
from mpgelu.research.paper.variants import GELUMask, Network, build, check_variant, gelu_moments, input_moments

BODY = [Linear, MPGELU, Linear, MPGELU, Linear]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mpgelu", [Dropout, *BODY]),
        ("relu", [Dropout, Linear, ReLU, Dropout, Linear, ReLU, Dropout, Linear]),
        ("relu_input", [Dropout, Linear, ReLU, Linear, ReLU, Linear]),
        ("gelu_input", BODY),
        ("gelu_hidden", [Linear, GELUMask, Linear, MPGELU, Linear]),
    ],
)
def test_layers(name: Network, layers: list[type[nn.Module]]) -> None:
    assert [type(layer) for layer in build(name, 7, 2, 0.1)] == layers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mask_has_the_moments_of_its_samples(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 0.7, 4.0], dtype=dtype)
    moments = gelu_moments(DiagonalMoments, x)
    torch.testing.assert_close(moments.mean, nn.functional.gelu(x))
    draws, generator = 200_000, torch.Generator().manual_seed(0)
    keep = 0.5 * torch.erfc(-x.double() / 2**0.5)
    samples = torch.bernoulli(keep.expand(draws, -1), generator=generator) * x
    spread = samples.var(0)
    assert (samples.mean(0) - moments.mean).abs().le(4 * (spread / draws).sqrt() + 1e-6).all()
    fourth = (samples - samples.mean(0)).pow(4).mean(0)
    assert (spread - moments.variance).abs().le(4 * ((fourth - spread.square()) / draws).sqrt() + 1e-6).all()


def test_the_layer_keeps_the_kind_of_moments() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    diagonal, factored = (GELUMask()(kind.certain(x)) for kind in (DiagonalMoments, FactoredMoments))
    assert isinstance(factored, FactoredMoments)
    torch.testing.assert_close(factored.mean, diagonal.mean)
    torch.testing.assert_close(torch.diag_embed(diagonal.variance), factored.covariance)


def test_gelu_on_the_input_makes_the_network_random_without_dropout() -> None:
    x, network = torch.randn(5, 3), build("gelu_input", 3, 2, 0.0)
    moments = network(input_moments("gelu_input", FactoredMoments)(x))
    assert (moments.variance > 0).all()
    assert (input_moments("mpgelu", DiagonalMoments)(x).variance == 0).all()


def test_variants_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    with pytest.raises(InputError, match=r"^reproduce: --variant must be one of relu_input, .*, got 'tanh'"):
        check_variant("tanh", None, records)
    with pytest.raises(InputError, match=r"gelu_input has no dropout, got --rate 0\.1; leave --rate out"):
        check_variant("gelu_input", 0.1, records)
    with pytest.raises(InputError, match=r"there is no .*records\.jsonl; run the command without --variant first"):
        check_variant("relu_input", 0.1, records)
    records.touch()
    check_variant("relu_input", 0.1, records)
