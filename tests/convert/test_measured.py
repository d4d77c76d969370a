"""Layer normalisation is approximated: the report measures by how much, and how much it may be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpgelu import FactoredMoments
from mpgelu.convert import from_torch


def normalised(width: int, rate: float = 0.2) -> nn.Module:
    torch.manual_seed(1)
    inner = [nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Dropout(rate)]
    first = [nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(rate)]
    return nn.Sequential(*first, *inner, nn.Linear(width, 2))


def sampled(module: nn.Module, x: Tensor, draws: int) -> Tensor:
    """Outputs with random masks, batch normalisation as in evaluation."""
    module.train()
    module[1].eval()  # type: ignore[index]
    with torch.no_grad():
        return torch.stack([module(x) for _ in range(draws)])


@pytest.mark.parametrize(("width", "allowed"), [(8, 0.3), (32, 0.1), (256, 0.05)])
def test_the_report_measures_the_error_of_layer_normalisation(width: int, allowed: float) -> None:
    module, x = normalised(width), torch.randn(6, 5)
    network, report = from_torch(module, example=x)
    samples = sampled(module, x, 3000)
    with torch.no_grad():
        out = network(FactoredMoments.certain(x))
    error = out.stddev / samples.std(0) - 1
    shift = (out.mean - samples.mean(0)) / samples.std(0)
    assert report.measured is not None
    assert (report.measured.rows, report.measured.draws) == (6, 2000)
    assert report.measured.stddev == pytest.approx(error.square().mean().sqrt().item(), abs=0.02)
    assert report.measured.worst_stddev == pytest.approx(error.abs().max().item(), abs=0.06)
    assert report.measured.mean == pytest.approx(shift.square().mean().sqrt().item(), abs=0.04)
    assert report.measured.stddev < allowed
    assert f"standard deviations by {report.measured.stddev:.1%} (root mean square" in str(report)


def test_measuring_leaves_the_module_and_the_random_numbers_alone() -> None:
    module, x = normalised(8).eval(), torch.randn(40, 5)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    _, report = from_torch(module, example=x)
    assert report.measured is not None
    assert report.measured.rows == 32
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_nothing_is_measured_where_there_is_nothing_to_measure() -> None:
    x = torch.randn(4, 5)
    _, report = from_torch(normalised(8))
    assert report.measured is None
    assert "LayerNorm is linearised" in str(report)
    certain = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    assert from_torch(certain, example=x)[1].measured is None
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    _, report = from_torch(plain, example=x)
    assert report.measured is None
    assert "LayerNorm" not in str(report)


def test_an_example_of_images_is_flattened() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Dropout(0.2), nn.LayerNorm(8))
    assert from_torch(module, example=torch.randn(3, 2, 3))[1].measured is not None
