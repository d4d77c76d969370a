"""Checkpoints of fit: the same bits as a run without a break, and clear words about every other file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mpgelu as mp
from mpgelu import DataError, FactoredMoments, InputError
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.training import RecoveryWarning

RECOVERS = pytest.mark.filterwarnings("ignore::mpgelu.training.RecoveryWarning")
X = torch.rand(40, 2, generator=torch.Generator().manual_seed(1))
Y = torch.sin(3 * X[:, 0]) + X[:, 1]


class StopError(Exception):
    """A run ends here."""


def run(checkpoint: Path | None = None, stop: int | None = None, start: int = 0, **settings: Any) -> list[Tensor]:
    """Parameters and history after training, or after as many steps as are said."""
    torch.manual_seed(start)
    outputs = 1 if "likelihood" in settings else 2
    network = settings.pop("network", None) or mp.network(2, (8,), outputs)
    likelihood = settings.pop("likelihood", mp.HeteroscedasticGaussian)()
    scheduler = settings.pop("scheduler", lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9))
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == stop:
            raise StopError

    def stopping(optimizer: torch.optim.Optimizer) -> Any:
        optimizer.register_step_post_hook(count)
        return scheduler(optimizer)

    chosen = {"epochs": 12, "batch_size": 16, "validation": (X[:9], Y[:9]), "progress": False, **settings}
    given = chosen.pop("data", (X, Y))
    history = mp.fit(network, likelihood, given, scheduler=stopping, checkpoint=checkpoint, **chosen)
    parameters = [p.detach() for module in (network, likelihood) for p in module.parameters()]
    return [*parameters, history.loss, history.validation, history.best_epoch, torch.tensor(len(history.recoveries))]


def broken(path: Path, stop: int = 20, **settings: Any) -> None:
    with pytest.raises(StopError):
        run(path, stop, **settings)
    assert path.exists()


def noisy(x: Tensor) -> FactoredMoments:
    return FactoredMoments.certain(x + 0.1 * torch.randn_like(x))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), 16, shuffle=True, generator=torch.Generator().manual_seed(3))


class Failing(mp.HeteroscedasticGaussian):
    """NaN whenever the first target of the batch is the first of all."""

    def expected_log_prob(self, moments: Any, y: Tensor) -> Tensor:
        value = super().expected_log_prob(moments, y)
        return value * torch.nan if len(y) > 9 and y[0] == Y[0] else value


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.05, max_iter=3)


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "learned noise": lambda: {"likelihood": lambda: mp.Gaussian(0.3, learn_noise=True)},
    "patience": lambda: {"patience": 2, "optimizer": lambda p: torch.optim.SGD(p, lr=0.3), "clip": 1.0},
    "one cycle": lambda: {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=36)},
    "LBFGS": lambda: {"optimizer": lbfgs},
    "moments that draw": lambda: {"moments": noisy},
    "a shuffling loader": lambda: {"data": loader()},
    "stack": lambda: {
        "network": mp.Stack([mp.network(2, (8,)) for _ in range(2)]),
        "data": (X.expand(2, -1, -1), Y.expand(2, -1)),
        "validation": (X[:9].expand(2, -1, -1), Y[:9].expand(2, -1)),
    },
    "recoveries": lambda: {"network": mp.network(2, (8,)), "likelihood": Failing},
}


@RECOVERS
@pytest.mark.parametrize("name", SETTINGS)
def test_a_broken_run_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = run(**SETTINGS[name]())
    torch.manual_seed(5)
    broken(tmp_path / "run.checkpoint", **SETTINGS[name]())
    torch.manual_seed(7)
    found = run(tmp_path / "run.checkpoint", start=1, **SETTINGS[name]())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_recoveries_are_counted_through() -> None:
    with pytest.warns(RecoveryWarning):
        assert run(**SETTINGS["recoveries"]())[-1] > 0


def test_a_finished_run_is_not_trained_again_and_can_be_made_longer(tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    wanted, longer = run(epochs=5), run(epochs=8)
    for _ in range(2):
        for one, other in zip(run(path, epochs=5), wanted, strict=True):
            assert torch.equal(one, other)
    for one, other in zip(run(path, epochs=8), longer, strict=True):
        assert torch.equal(one, other)


def test_nothing_changes_by_keeping_a_checkpoint(tmp_path: Path) -> None:
    for one, other in zip(run(tmp_path / "new" / "run.checkpoint"), run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 8}, "its batch_size is 16, that of this fit 8"),
        ({"seed": 3}, "its seed is 0, that of this fit 3"),
        ({"data": (X + 1, Y)}, r"its data is \(40, 2\) of hash [0-9a-f]+, that of this fit \(40, 2\) of hash"),
        ({"network": mp.network(2, (9,))}, r"its network.1.weight is float32 \(8, 2\), that of this fit .* \(9, 2\)"),
        ({"network": mp.network(2, (8,)).double()}, "its network.0.rate is float32 .*, that of this fit float64"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "its optimizer is Adam, that of this fit SGD"),
        ({"likelihood": mp.Gaussian}, "its likelihood is HeteroscedasticGaussian, that of this fit Gaussian"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    broken(path)
    before = path.read_bytes()
    with pytest.raises(
        DataError, match=f"run.checkpoint is not a checkpoint of this fit: {text}.*; delete it to start"
    ):
        run(path, **settings)
    assert path.read_bytes() == before


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    broken(path)
    content = path.read_bytes()
    for other, text in [
        (content[:-5], "was altered or truncated"),
        (content[:-5] + b"12345", "was altered or truncated"),
        (b"epoch,loss\n1,2\n", "is text or a table, not a saved training checkpoint"),
    ]:
        path.write_bytes(other)
        with pytest.raises(DataError, match=f"run.checkpoint {text}"):
            run(path)
        assert path.read_bytes() == other
    write_arrays(path, "model", {"a": torch.ones(1)}, {})
    with pytest.raises(DataError, match="is a saved model, not a training checkpoint"):
        run(path)


def test_a_state_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    broken(path)
    arrays, about = read_arrays(path, "training checkpoint")
    about["state"]["items"] = [item for item in about["state"]["items"] if item[0] != "trainer"]
    write_arrays(path, "training checkpoint", arrays, about)
    with pytest.raises(DataError, match="not a checkpoint of this fit: its state lacks 'trainer'; delete it"):
        run(path)


@pytest.mark.parametrize("part", ["network", "trainer", "best", "order", "random", "history"])
@pytest.mark.parametrize("value", ["bogus", 3, [None], {"items": []}])
def test_a_state_with_another_part_is_refused_in_words(part: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.checkpoint"
    broken(path)
    arrays, about = read_arrays(path, "training checkpoint")
    about["state"]["items"] = [[key, value if key == part else held] for key, held in about["state"]["items"]]
    write_arrays(path, "training checkpoint", arrays, about)
    if (part, value) == ("best", {"items": []}):
        return  # nothing was best yet
    with pytest.raises(
        DataError, match=r"run.checkpoint (holds a state that cannot be taken up|is not a) .* delete it"
    ):
        run(path)


def test_a_folder_and_a_state_that_no_file_can_keep(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is a folder; give the name of a file in it"):
        run(tmp_path)

    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            return {"layer": nn.Linear(1, 1)}

    with pytest.raises(
        InputError, match=r"fit: the state of the run\['trainer'\]\['scheduler'\]\['layer'\] holds a Lin"
    ):
        run(tmp_path / "a", scheduler=lambda optimizer: Odd(optimizer, 10))
