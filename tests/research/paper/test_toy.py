"""The toy problem: its data, and a short run from training to files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mpgelu.research.paper import toy
from mpgelu.research.paper.toy import TITLES, ToyResult, draw, run_toy, toy_data, truth, update_docs, write_summary
from mpgelu.training import History


@pytest.fixture(scope="module")
def results() -> list[ToyResult]:
    return [run_toy(nonlinearity, epochs=3) for nonlinearity in TITLES]


def test_the_function_behind_the_data() -> None:
    x = torch.tensor([0.0, 0.3, -0.3])
    value = math.sin(0.6) * math.cos(2.1)
    assert truth(x).tolist() == pytest.approx([0, value, -value])


def test_the_data() -> None:
    x, y = map(torch.cat, zip(*(toy_data(seed) for seed in range(50)), strict=True))
    assert x.shape == y.shape == (5000,)
    assert -0.5 <= x.min() < -0.49
    assert 0.49 < x.max() <= 0.5
    assert x.var().item() == pytest.approx(1 / 12, rel=0.05)
    noise = (y - truth(x)) / torch.sin(x).abs()  # standard normal
    standard_error = 1 / math.sqrt(5000)
    assert abs(noise.mean().item()) < 4 * standard_error
    assert abs(noise.var().item() - 1) < 4 * math.sqrt(2) * standard_error


def test_the_data_depends_on_the_seed_alone() -> None:
    assert torch.equal(toy_data(1)[1], toy_data(1)[1])
    assert not torch.equal(toy_data(1)[1], toy_data(2)[1])


def test_both_networks_see_the_same_data(results: list[ToyResult]) -> None:
    relu, mpgelu = results
    assert (relu.nonlinearity, mpgelu.nonlinearity) == ("relu", "mpgelu")
    assert torch.equal(relu.x, mpgelu.x)
    assert torch.equal(relu.y, mpgelu.y)
    assert relu.grid[[0, -1]].tolist() == [-1, 1]
    assert not torch.equal(relu.predictive.mean, mpgelu.predictive.mean)


def test_the_summary_averages_inside_and_outside(results: list[ToyResult]) -> None:
    result = results[0]
    summary, grid = result.summary(), result.grid.tolist()
    for name, values in (
        ("stddev", result.predictive.stddev),
        ("epistemic_std", result.predictive.epistemic_variance.sqrt()),
    ):
        inside = [value for x, value in zip(grid, values.tolist(), strict=True) if abs(x) <= 0.5]
        outside = [value for x, value in zip(grid, values.tolist(), strict=True) if abs(x) > 0.5]
        assert summary[f"{name}_inside"] == pytest.approx(sum(inside) / len(inside), rel=1e-4)
        assert summary[f"{name}_outside"] == pytest.approx(sum(outside) / len(outside), rel=1e-4)


def test_the_epistemic_share_is_of_variances(results: list[ToyResult]) -> None:
    result = results[1]
    outside = result.grid.abs() > 0.5
    parts = [
        getattr(result.predictive, f"{part}_variance")[outside].sum().item() for part in ("epistemic", "aleatoric")
    ]
    assert result.summary()["epistemic_share_outside"] == pytest.approx(parts[0] / sum(parts), rel=1e-4)
    assert 0 < result.summary()["epistemic_share_inside"] < 1


def test_the_files(results: list[ToyResult], tmp_path: Path) -> None:
    draw(results, tmp_path / "toy.png")
    write_summary(results, tmp_path / "toy.json")
    image = (tmp_path / "toy.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 10_000
    numbers = json.loads((tmp_path / "toy.json").read_text())
    assert set(numbers) == {"relu", "mpgelu"}
    for result in results:
        assert numbers[result.nonlinearity] == result.summary()
        assert all(math.isfinite(value) and value > 0 for value in numbers[result.nonlinearity].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json", "toy.png"]


def test_a_run_that_was_stopped_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> History:
        return History(torch.zeros(0), torch.zeros(0), torch.zeros(0), interrupted=True)

    monkeypatch.setattr(toy, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_toy("mpgelu", epochs=3)


def test_the_table_of_a_page_has_the_numbers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- toy:start -->\nold\n<!-- toy:end -->\nafter\n")
    found = {"stddev_inside": 0.312, "stddev_outside": 1.06, "epistemic_share_inside": 0.0097}
    found |= {"epistemic_share_outside": 0.0049}
    update_docs({"relu": found, "mpgelu": found | {"stddev_outside": 1.25}}, page)
    text = page.read_text()
    assert "old" not in text
    assert (
        "\n| ReLU | 0.31 | 1.06 | 1.0% | 0.5% |\n| MP-GELU | 0.31 | 1.25 | 1.0% | 0.5% |\n<!-- toy:end -->\nafter"
        in text
    )
