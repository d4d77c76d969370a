"""Files and places that do not suit, in the newer commands: one line on standard error, code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Command
from houses import QUICK, houses
from mpgelu.storage.arrays import read_arrays, write_arrays
from mpgelu.tables.model import TableModel


@pytest.fixture(scope="module")
def model() -> TableModel:
    return TableModel.fit(houses(80), "price", **QUICK | {"steps": 2, "diverse": False})


@pytest.fixture
def folder(tmp_path: Path, model: TableModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a damaged one, a table, another one without a column, and folders of tables, where we are."""
    monkeypatch.chdir(tmp_path)
    model.save("model")
    content = Path("model").read_bytes()
    Path("cut").write_bytes(content[:-9])
    Path("flipped").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    arrays, about = read_arrays(Path("model"), "model")
    write_arrays(Path("forged"), "model", arrays, about | {"moments": "bogus"})
    houses(30).to_csv("new.csv", index=False)
    houses(30).drop(columns="area").to_csv("less.csv", index=False)
    for name in ("in", "parquet", "text"):
        Path(name).mkdir()
    houses(1200).to_parquet("parquet/a.parquet")
    houses(5).to_csv("in/a.csv", index=False)
    Path("text/a.parquet").write_text("area,price\n1,2\n")
    return tmp_path


STREAM = ("--stream", "--steps", 2, "--folds", 2, "--hidden", 4)
MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "distill a cut model": (("distill", "cut", "new.csv"), "cut was altered or truncated"),
    "distill a flipped model": (("distill", "flipped", "new.csv"), "flipped was altered or truncated"),
    "distill a forged model": (("distill", "forged", "new.csv"), "there is no type of moments called 'bogus'"),
    "distill a table": (("distill", "new.csv", "new.csv", "-o", "s"), "new.csv is text or a table, not a saved model"),
    "distill into a folder": (("distill", "model", "new.csv", "-o", "in"), "it is a folder"),
    "distill over the model": (("distill", "model", "new.csv", "-o", "model"), "it is read by the same command"),
    "distill below a file": (("distill", "model", "new.csv", "-o", "model/s"), "cannot write model/s"),
    "distill to standard output": (("distill", "model", "new.csv", "-o", "-"), "cannot write this to standard output"),
    "distill less": (("distill", "model", "less.csv"), "'area'"),
    "distill nothing": (("distill", "model", "nowhere.csv"), "nowhere.csv"),
    "predict by a cut model": (("predict", "cut", "in", "-o", "out"), "cut was altered or truncated"),
    "predict below a file": (("predict", "model", "in", "-o", "model/out/"), "model/out"),
    "predict no folder": (("predict", "model", "nowhere/", "-o", "out/"), "nowhere"),
    "stream text": (("fit", "text", "-t", "price", *STREAM), "text/a.parquet"),
    "stream to a folder": (("fit", "parquet", "-t", "price", "-o", "in", *STREAM), "it is a folder"),
    "stream without the target": (("fit", "parquet", "-t", "prize", *STREAM), "prize"),
    "stream with a file as checkpoint": (
        ("fit", "parquet", "-t", "price", "-o", "m", "--checkpoint", "model", *STREAM), "model",
    ),
    "stream too wide": (("fit", "parquet", "-t", "price", *STREAM[:-1], "1000000000"), "GB of memory"),
    "stream and hold out all": (("fit", "parquet", "-t", "price", "--hold-out", "1.5", *STREAM), "--hold-out"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(case: str, mpgelu: Command, folder: Path) -> None:
    arguments, message = MISTAKES[case]
    before = sorted(folder.rglob("*"))
    result = mpgelu(*arguments)
    assert result.code == 2, result.err
    lines = result.err.splitlines()
    assert lines[-1].startswith("error: "), result.err
    assert message in lines[-1]
    assert "Traceback" not in result.err
    assert sorted(folder.rglob("*")) == before


def test_a_damaged_checkpoint_of_a_stream_is_named_with_its_remedy(mpgelu: Command, folder: Path) -> None:
    fit = ("fit", "parquet", "-t", "price", "-o", "m", "--checkpoint", "kept", *STREAM)
    assert mpgelu(*fit).code == 0
    kept = [path for path in Path("kept").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:-7])
    result = mpgelu(*fit)
    assert result.code == 2
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert any(f"{path} was altered or truncated" in line for path in kept)
    assert line.endswith("delete it, and the same fit starts anew")
