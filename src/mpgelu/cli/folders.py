"""``mpgelu predict MODEL folder/ -o folder/``: a table of predictions for each table, on all cores, resumable."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mpgelu.cli.scoring import about, check_level, load_model, predicted
from mpgelu.cli.shared import Notes, make_folder, open_table, warn
from mpgelu.errors import DataError, InputError

if TYPE_CHECKING:  # torch takes seconds to import, which --help need not wait for
    from mpgelu.tables.model import TableModel

_ENDINGS = {".parquet": ".parquet", ".csv": ".csv", ".csv.gz": ".csv", ".txt": ".txt"}  # of tables and of predictions
_DONE = ".mpgelu-predict.jsonl"  # in the folder of predictions: which are done, and of what


@dataclass(frozen=True)
class Asked:
    """The options of ``mpgelu predict``."""

    level: float
    keep: tuple[str, ...]
    prefix: str
    fast: bool
    delimiter: str


class Part(NamedTuple):
    """A table and its predictions; ``of`` tells tables, models and options apart."""

    table: Path
    output: Path
    of: str


class _Done(NamedTuple):
    part: Part
    rows: int
    notes: Notes


def is_folder(output: str) -> bool:
    """Whether a name on the command line means a folder: one that is there, or a name without an ending."""
    return Path(output).is_dir() or output.endswith(("/", "\\")) or (output != "-" and not Path(output).suffix)


def predict_folder(model: Path, tables: Path, output: Path, asked: Asked, jobs: int) -> None:
    """Predict every table of a folder into a file of the same name and format in another.

    Args:
        model: File of the model.
        tables: Folder of CSV and Parquet files; what begins with ``.`` or ``_`` is not a table.
        output: Folder of the predictions, made if need be.
        asked: Options.
        jobs: Processes; -1 for all cores.

    Raises:
        DataError: A table cannot be predicted; it is named. Predictions that are done stay.
    """
    import joblib

    if output.exists() and output.samefile(tables):
        raise DataError(f"cannot write predictions to {output}: it is the folder of the tables; choose another")
    check_level(load_model(model), asked.level)
    parts = _parts(model, tables, output, asked)
    make_folder(output)
    record = output / _DONE
    left, changed = _left(parts, record)
    calls = (joblib.delayed(_predict)(Path.cwd(), model, part, asked) for part in left)
    parallel = joblib.Parallel(min(joblib.effective_n_jobs(jobs), max(1, len(left))), **_AS_THEY_COME)
    notes, rows = Notes(), 0
    for done in _shown(_guarded(parallel(calls)), len(left)):
        rows += done.rows
        notes.add(done.notes)
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"file": done.part.output.name, "of": done.part.of}) + "\n")
    notes.tell(str(tables))
    if changed:
        warn(f"{output}: {changed:,} were of other tables, another model or other options, and were made anew")
    before = f", {len(parts) - len(left):,} were done before" if len(left) < len(parts) else ""
    typer.echo(f"{rows:,} rows in {len(left):,} table{'s' * (len(left) != 1)}{before}: {output}")


_AS_THEY_COME: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1, "pre_dispatch": "2*n_jobs"}


def _parts(model: Path, tables: Path, output: Path, asked: Asked) -> list[Part]:
    """The tables of a folder, in the order of their names, and where their predictions go."""
    of_all = sha256(model.read_bytes() + repr(asked).encode()).hexdigest()
    found: dict[Path, Part] = {}
    ignored: Counter[str] = Counter()
    for table in sorted(tables.iterdir()):
        if table.name.startswith((".", "_")):
            continue
        ending = next((ending for ending in _ENDINGS if table.name.lower().endswith(ending)), None)
        if ending is None or not table.is_file():
            ignored["folder" if table.is_dir() else table.suffix or "no ending"] += 1
            continue
        place = output / (table.name[: -len(ending)] + _ENDINGS[ending])
        if place in found:
            raise DataError(f"{table} and {found[place].table} would both be predicted into {place}; rename one")
        stat = table.stat()
        of = sha256(f"{of_all} {table.name} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
        found[place] = Part(table, place, of)
    if not found:
        raise DataError(f"{tables} has no file that ends in {', '.join(_ENDINGS)}; give a folder of tables")
    if ignored:
        listed = ", ".join(f"{what} {count:,}" for what, count in ignored.most_common(5))
        warn(f"{tables}: {ignored.total():,} entries are not tables and are left out ({listed})")
    return list(found.values())


def _left(parts: list[Part], record: Path) -> tuple[list[Part], int]:
    """Parts that are not done, and how many of them have old predictions of something else."""
    done: dict[str, str] = {}
    if record.exists():
        for line in record.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                done[entry["file"]] = entry["of"]
            except (ValueError, KeyError, TypeError):  # a line that a kill has cut short: that part is made again
                continue
    left = [part for part in parts if not (part.output.exists() and done.get(part.output.name) == part.of)]
    return left, sum(part.output.exists() and part.output.name in done for part in left)


def _predict(here: Path, model: Path, part: Part, asked: Asked) -> _Done:
    """Predict one table, in a process that may have another working folder; errors name the table as it was given."""
    from mpgelu.native.threads import one_thread_each
    from mpgelu.storage.files import check_writable
    from mpgelu.tables import Sink

    fitted, notes, rows = _model(str(here / model), asked.fast), Notes(), 0
    source, sink = open_table(str(here / part.table), asked.delimiter), Sink(here / part.output)
    source.name = str(part.table)
    check_writable(here / part.output, here / model, here / part.table)
    with about(source), sink.opened(), one_thread_each():
        for frame in source.frames():
            sink.write(predicted(fitted, frame, asked.level, asked.keep, asked.prefix, notes))
            rows += len(frame)
    return _Done(part, rows, notes)


@cache
def _model(path: str, fast: bool) -> TableModel:
    """The model, read once in each process."""
    return load_model(Path(path), fast)


def _guarded(results: Iterable[_Done]) -> Iterable[_Done]:
    """The results; a process that was killed is an error in words."""
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    try:
        yield from results
    except TerminatedWorkerError as error:
        raise InputError(
            "--jobs: a process was killed, perhaps for lack of memory; what is done is kept, and the same command with "
            "fewer --jobs goes on"
        ) from error


def _shown(results: Iterable[_Done], count: int) -> Iterable[_Done]:
    """The results, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        *(TextColumn("{task.fields[rows]:,} rows"), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    )
    hidden, rows = not sys.stderr.isatty(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=count, rows=0)
        for done in results:
            yield done
            rows += done.rows
            progress.update(task, advance=1, rows=rows)
