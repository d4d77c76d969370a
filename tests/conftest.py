"""What all tests share: the references beside this file, and the same random numbers whatever ran before."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mpgelu import cli, native

sys.path.insert(0, str(Path(__file__).parent))  # for `import reference`: test folders are not packages
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "hooks"))  # programs of the site, not part of the package

from command_line import Command, Result
from houses import QUICK, houses
from mpgelu.tables.model import TableModel

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "torch"])
def formulas(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test twice: with the compiled float32 kernels and with the formulas in torch."""
    if request.param == "torch":
        with native.disabled():
            yield
    elif native.available():
        yield
    else:
        pytest.skip("no native kernels on this machine")


@pytest.fixture(scope="session")
def dask_client() -> Iterator[Any]:
    """A Dask cluster of two worker processes on this machine."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray with two processors on this machine."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_worker_niceness", "0")  # or a busy machine leaves its workers no time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that Ray uses
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def mpgelu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process, with something on its standard input."""

    def run(*arguments: object, given: str | bytes = b"") -> Result:
        content = given.encode() if isinstance(given, str) else given
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
        monkeypatch.setattr(sys, "argv", ["mpgelu", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Result(stop.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def fitted() -> TableModel:
    """A small model of a table that the tests of commands share; none of them changes it."""
    return TableModel.fit(houses(), "price", **QUICK)
