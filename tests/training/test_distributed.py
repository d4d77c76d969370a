"""One network over two processes: the same result as in one, agreement on what ends a run, lost processes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpgelu.errors import TrainingError
from mpgelu.training import RecoveryWarning
from mpgelu.training.distributed import cooperating

PROGRAM = Path(__file__).with_name("together.py")
SECONDS = 300  # after which a run counts as hanging


def load_program() -> Any:
    spec = spec_from_file_location("together", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


together = load_program()


def torchrun(what: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(PROGRAM), what, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env, check=False)


def results(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """What both processes found, in every run."""
    folder = tmp_path_factory.mktemp("together")
    job = torchrun("all", folder)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("RecoveryWarning") == 1  # by the first process alone
    return results(folder)


@pytest.mark.parametrize("name", [run.__name__ for run in together.RUNS])
def test_two_processes_train_as_one(name: str, found: list[dict[str, dict[str, Tensor]]]) -> None:
    first, second = (result[name] for result in found)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    if name == "recovering":
        with pytest.warns(RecoveryWarning):
            wanted = together.recovering()
    else:
        wanted = getattr(together, name)()
    rtol, atol = (1e-3, 1e-4) if first["state"].dtype == torch.float32 else (1e-7, 1e-9)
    torch.testing.assert_close(first, wanted, rtol=rtol, atol=atol, equal_nan=True)


def test_the_runs_are_what_they_say(found: list[dict[str, dict[str, Tensor]]]) -> None:
    first = found[0]
    assert first["recovering"]["recoveries"] == 1
    assert first["interrupted"]["interrupted"]
    assert len(first["interrupted"]["loss"]) == 2
    assert len(first["patient"]["loss"]) == first["patient"]["best_epoch"] + 3 < 60
    assert first["even"]["loss"][-1] < first["even"]["loss"][0]


def test_a_killed_process_ends_the_job_and_the_next_one_goes_on(tmp_path: Path) -> None:
    job = torchrun("checkpointed", tmp_path, DIE="17")
    assert job.returncode != 0
    assert "SIGKILL" in job.stderr
    assert not list(tmp_path.glob("*.pt"))
    again = torchrun("checkpointed", tmp_path)
    assert again.returncode == 0, again.stderr
    first, second = (result["checkpointed"] for result in results(tmp_path))
    assert torch.equal(first["state"], second["state"])
    (tmp_path / "alone").mkdir()
    wanted = together.checkpointed(tmp_path / "alone")
    assert first.pop("steps") < wanted.pop("steps") == 8 * 5
    torch.testing.assert_close(first, wanted, rtol=1e-7, atol=1e-9)


def test_a_lost_process_is_named_and_other_errors_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    text = "fit: process 1 of 2 lost contact with the others.*Connection closed by peer.*; run the same command again"
    with pytest.raises(TrainingError, match=text), cooperating(torch.device("cpu"), "run the same command again"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547]\n Connection closed by peer [127.0.0.1]:3045")
    with pytest.raises(RuntimeError, match="shapes"), cooperating(torch.device("cpu"), ""):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
