"""Runs the cells of an experiment over processes or machines, with progress, and so that they can be resumed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import joblib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mpgelu.errors import InputError
from mpgelu.research.datasets import load_uci
from mpgelu.research.paper.uci import GIVEN, IDENTITY, Cell, Effort, models_left, run_cell, time_predictions
from mpgelu.research.store import Store

BACKENDS = ("loky", "dask", "ray")
_POLL_SECONDS = 1.0


def run(
    cells: Sequence[Cell],
    effort: Effort,
    path: Path,
    *,
    data: str | None = None,
    jobs: int = 1,
    backend: str = "loky",
    scheduler: str | None = None,
    progress: bool = True,
) -> Store:
    """Run every cell to the end, in parallel, skipping what the store at ``path`` already holds.

    Args:
        cells: what to run, in order of start.
        effort: how much of the protocol.
        path: the results store; workers on other machines must see it under the same path.
        data: folder of the data sets; ``None`` downloads them.
        jobs: processes, or tasks in flight at a time.
        backend: joblib's: ``"loky"`` on this machine, ``"dask"`` or ``"ray"`` on a cluster.
        scheduler: address of the Dask scheduler; ``None`` starts a local cluster.
        progress: show a bar with the time left.

    Raises:
        InputError: The backend is unknown or not installed, or the store holds models of another number of epochs or
            way to choose the rate.
        DataError: A data set or the store cannot be read or written.
    """
    _check_backend(backend, scheduler)
    store = Store(path.resolve(), IDENTITY)  # workers may have another working folder
    data = None if data is None else str(Path(data).expanduser().resolve())
    _check_epochs(store, effort.epochs)
    _check_rates(store, effort.rate)
    available = {name: len(load_uci(name, data).splits) for name in {cell.dataset for cell in cells}}  # also downloads
    done = store.keys()
    left = sum(models_left(cell, effort, done, available[cell.dataset]) for cell in cells)
    with _backend(backend, scheduler, jobs), _progress(left, store, len(done), progress):
        parallel = joblib.Parallel(n_jobs=jobs, batch_size=1, pre_dispatch="n_jobs")
        # A cell that borrows its rate waits for the diagonal cell that finds it.
        for wave in ([c for c in cells if not effort.borrows(c)], [c for c in cells if effort.borrows(c)]):
            parallel(joblib.delayed(_finish)(cell, effort, store, data) for cell in wave)
    return store


def measure_runtimes(cells: Sequence[Cell], store: Store, data: str | None = None) -> None:
    """Time the predictions of every data set and setting that the store has no runtime of; alone, for quiet timings."""
    known = {key[1:6] for key in store.keys() if key[0] == "runtime"}  # noqa: SIM118 (a Store is not a dict)
    settings = {
        (cell.dataset, cell.outputs, cell.covariance, cell.seed): None
        for cell in cells
        if (cell.dataset, cell.nonlinearity, cell.outputs, cell.covariance, cell.seed) not in known
    }
    for dataset, outputs, covariance, seed in settings:
        for record in time_predictions(load_uci(dataset, data), outputs, covariance, seed):
            store.append(record)


def _check_backend(name: str, scheduler: str | None) -> None:
    if name not in BACKENDS:
        raise InputError(f"reproduce: backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if scheduler and name != "dask":
        raise InputError(f"reproduce: a scheduler goes with backend 'dask', not {name!r}")


def _check_epochs(store: Store, epochs: int) -> None:
    """Refuse to mix models of different training lengths in one store, where they could not be told apart."""
    others = {record["epochs"] for record in store if "epochs" in record} - {epochs}
    if others:
        raise InputError(
            f"reproduce: {store.path} holds models of {', '.join(map(str, sorted(others)))} epochs, not {epochs}; "
            "give the same number of epochs, or another output folder"
        )


def _finish(cell: Cell, effort: Effort, store: Store, data: str | None) -> None:
    """Run a cell in a worker; what it finished is in the store."""
    for _ in run_cell(cell, effort, store, data):
        pass


def _check_rates(store: Store, rate: float | None) -> None:
    """Refuse to mix models of a given rate with those of another one, or of the search, in one store."""
    found = {record["rate"] if record["rate_from"] == GIVEN else None for record in store if record["kind"] == "test"}
    others = sorted("searched rates" if other is None else f"rate {other:g}" for other in found - {rate})
    if others:
        raise InputError(
            f"reproduce: {store.path} holds models of {', '.join(others)}, not of "
            f"{'searched rates' if rate is None else f'rate {rate:g}'}; give another output folder"
        )


@contextlib.contextmanager
def _backend(name: str, scheduler: str | None, jobs: int) -> Iterator[None]:
    if name == "dask":
        try:
            from distributed import Client, LocalCluster
        except ImportError:
            raise InputError(
                "reproduce: backend 'dask' needs dask; install it with pip install 'mpgelu[dask]'"
            ) from None
        with contextlib.ExitStack() as stack:
            address = scheduler or stack.enter_context(
                LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=":0")  # type: ignore[no-untyped-call]
            )
            try:
                stack.enter_context(Client(address))  # type: ignore[no-untyped-call]
            except (OSError, ValueError) as error:
                raise InputError(f"reproduce: cannot reach the Dask scheduler {scheduler}: {error}") from None
            stack.enter_context(joblib.parallel_config(backend="dask"))
            yield
        return
    if name == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise InputError("reproduce: backend 'ray' needs ray; install it with pip install ray") from None
        register_ray()
    with joblib.parallel_config(backend=name):
        yield


@contextlib.contextmanager
def _progress(total: int, store: Store, before: int, show: bool) -> Iterator[None]:
    """A bar that counts the models in the store, which is where workers anywhere report."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield
        return
    columns = (
        TextColumn("models trained"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    stop = threading.Event()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)

        def watch() -> None:
            while not stop.wait(_POLL_SECONDS):
                bar.update(task, completed=len(store.keys()) - before)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
            bar.update(task, completed=len(store.keys()) - before)
