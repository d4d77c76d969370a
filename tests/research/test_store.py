"""The results store: round trips, torn lines, SIGKILL, several writers at once."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpgelu
from mpgelu.errors import DataError, InputError
from mpgelu.research.store import Store

FIRST = {"kind": "test", "split": 0, "nll": 1.5}
SECOND = {"kind": "test", "split": 1, "nll": 2.5}
THIRD = {"kind": "test", "split": 2, "nll": 3.5}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "records.jsonl"


# The package itself imports torch, seconds for each process; the store does not need it.
PRELUDE = f"""
import sys, types
sys.modules["mpgelu"] = types.ModuleType("mpgelu")
sys.modules["mpgelu"].__path__ = {list(mpgelu.__path__)}
from mpgelu.research.store import Store
store, arguments = Store(sys.argv[1]), sys.argv[2:]
"""


def python(code: str, path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Run code that finds a store in `store` and further arguments in `arguments`."""
    command = [sys.executable, "-c", PRELUDE + code, str(path), *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def test_records_come_back_in_order(path: Path) -> None:
    store = Store(path)
    assert list(store) == []
    assert store.frame().empty
    for record in (FIRST, SECOND):
        store.append(record)
    assert list(store) == store.records() == Store(path).records() == [FIRST, SECOND]
    assert store.frame()["nll"].tolist() == [1.5, 2.5]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [FIRST, SECOND]


def test_membership_is_by_identity(path: Path) -> None:
    store = Store(path, identity=("kind", "split"))
    store.append(FIRST)
    assert store.keys() == {("test", 0)}
    assert store.has(FIRST | {"nll": 9.0})
    assert store.has({"kind": "test", "split": np.int64(0)})
    assert not store.has(SECOND)


def test_a_record_without_its_identity_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"lacks \['split'\]"):
        Store(path, identity=("kind", "split")).append({"kind": "test"})
    assert not path.exists()


def test_numbers_that_are_not_finite_become_null(path: Path) -> None:
    store = Store(path)
    store.append({"nll": math.nan, "rmse": math.inf, "nested": {"values": [-math.inf, 1.0]}})
    store.append({"nll": 1.0, "rmse": 2.0})
    first = store.records()[0]
    assert first == {"nll": None, "rmse": None, "nested": {"values": [None, 1.0]}}
    assert "NaN" not in path.read_text()
    assert store.frame()["nll"].isna().tolist() == [True, False]
    assert store.frame()["nll"].dtype == float


def test_numpy_scalars_become_python_numbers(path: Path) -> None:
    Store(path).append({"split": np.int64(3), "nll": np.float32(0.5), "ok": np.bool_(True), "bad": np.float32("nan")})
    assert Store(path).records() == [{"split": 3, "nll": 0.5, "ok": True, "bad": None}]


def test_what_json_cannot_hold_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match="not JSON serializable"):
        Store(path).append({"nll": np.zeros(2)})
    assert not path.exists()


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_torn_last_line_is_ignored_and_then_dropped(path: Path, end: str) -> None:
    store = Store(path)
    store.append(FIRST)
    whole, torn = path.read_text(), json.dumps(SECOND)
    for length in range(1, len(torn)):
        path.write_text(whole + torn[:length] + end)
        assert store.records() == [FIRST]
        store.append(THIRD)
        assert store.records() == [FIRST, THIRD]
        assert torn[:length] + end not in path.read_text().splitlines()


def test_a_torn_only_line_longer_than_a_block(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"pad": "' + "x" * 200_000)
    assert Store(path).records() == []
    Store(path).append(FIRST)
    assert path.read_text() == json.dumps(FIRST) + "\n"


def test_a_whole_last_line_without_newline_is_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps(FIRST))
    Store(path).append(SECOND)
    assert Store(path).records() == [FIRST, SECOND]


@pytest.mark.parametrize("bad", ['{"kind": "te', "", "[1, 2]", "3"])
def test_a_bad_line_before_the_last_is_an_error(path: Path, bad: str) -> None:
    path.parent.mkdir()
    path.write_text(f"{json.dumps(FIRST)}\n{bad}\n{json.dumps(SECOND)}\n")
    with pytest.raises(DataError, match=r"records\.jsonl, line 2: "):
        Store(path).records()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No space left"):
        Store("/dev/full").append(FIRST)


def test_part_of_a_line_written_is_told_and_repaired(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(path)
    store.append(FIRST)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:5]))
        with pytest.raises(DataError, match="No space left"):
            store.append(SECOND)
    assert store.records() == [FIRST]
    store.append(THIRD)
    assert store.records() == [FIRST, THIRD]


def test_a_store_can_be_sent_to_workers(path: Path) -> None:
    store = pickle.loads(pickle.dumps(Store(path, identity=("split",))))
    store.append(FIRST)
    assert Store(path, identity=("split",)).has(FIRST)


def test_killed_in_the_middle_of_a_loop(path: Path) -> None:
    code = "start = len(store.records())\n"
    code += "for i in range(start, 10**9): store.append({'i': i, 'pad': 'x' * 50_000}); print(i, flush=True)"
    for acknowledged in (20, 33):
        process = python(code, path)
        last = int(read_lines(process, acknowledged)[-1])
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        kept = [record["i"] for record in Store(path)]
        assert kept == list(range(len(kept)))
        assert len(kept) > last


def test_killed_in_the_middle_of_a_line(path: Path) -> None:
    Store(path).append(FIRST)
    code = "import os, signal; write = os.write\n"
    code += "def half(descriptor, line): write(descriptor, line[:9]); os.kill(os.getpid(), signal.SIGKILL)\n"
    code += "os.write = half; store.append({'kind': 'test', 'split': 1})"
    process = python(code, path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not path.read_bytes().endswith(b"\n")
    assert Store(path).records() == [FIRST]
    Store(path).append(SECOND)
    assert Store(path).records() == [FIRST, SECOND]


def test_four_processes_append_at_once(path: Path) -> None:
    code = "print('ready', flush=True); input()\n"
    code += "for i in range(25): store.append({'who': arguments[0], 'i': i, 'pad': 'x' * 100_000})"
    writers = [python(code, path, who) for who in range(4)]
    assert [read_lines(writer, 1) for writer in writers] == [["ready"]] * 4
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen = [0]
    while any(writer.poll() is None for writer in writers):
        seen.append(len(Store(path).records()))
    assert seen == sorted(seen)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert order_by_writer(Store(path).records()) == {str(who): list(range(25)) for who in range(4)}


def order_by_writer(records: list[dict[str, Any]]) -> dict[str, list[int]]:
    """What each writer wrote, in the order of the file."""
    found: dict[str, list[int]] = {}
    for record in records:
        found.setdefault(record["who"], []).append(record["i"])
    return dict(sorted(found.items()))
