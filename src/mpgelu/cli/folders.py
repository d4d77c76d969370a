"""``mpgelu predict MODEL folder/ -o folder/``: predictions for every table of a folder, on all cores, resumable.

Each table is predicted by one process into a file of its own, which is written atomically. A record in the output
folder names each finished file with a hash of what it was made from; a file whose hash has changed is made again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mpgelu.cli.scoring import about, check_level, load_model, predicted
from mpgelu.cli.shared import Notes, make_folder, open_table, rows_progress, warn
from mpgelu.errors import DataError, InputError

if TYPE_CHECKING:  # torch takes seconds to import, which --help need not wait for
    from mpgelu.tables.model import TableModel

_ENDINGS = {".parquet": ".parquet", ".csv": ".csv", ".csv.gz": ".csv", ".txt": ".txt"}  # of a table: of its predictions
_DONE = ".mpgelu-predict.jsonl"  # the record of finished files, in the folder of predictions


@dataclass(frozen=True)
class Asked:
    """The options of ``mpgelu predict`` that determine the content of the predictions.

    Attributes:
        level: Probability of the intervals.
        keep: Names of input columns that are copied to the output.
        prefix: Prefix of the names of the new columns.
        fast: Whether correlations inside the networks are dropped.
        delimiter: Delimiter of CSV files.
    """

    level: float
    keep: tuple[str, ...]
    prefix: str
    fast: bool
    delimiter: str


class Part(NamedTuple):
    """One unit of work: a table and its predictions.

    Attributes:
        table: File of the table.
        output: File of the predictions.
        of: Hash of the model file, the options, and the name, size and modification time of the table.
    """

    table: Path
    output: Path
    of: str


class _Done(NamedTuple):
    """A finished unit of work.

    Attributes:
        part: The table and its predictions.
        rows: Number of its rows.
        notes: Unusual cells of the table.
    """

    part: Part
    rows: int
    notes: Notes


def is_folder(output: str) -> bool:
    """Return whether a name on the command line denotes a folder: an existing one, or a name without an extension."""
    return Path(output).is_dir() or output.endswith(("/", "\\")) or (output != "-" and not Path(output).suffix)


def predict_folder(model: Path, tables: Path, output: Path, asked: Asked, jobs: int) -> None:
    """Predict every table of a folder into a file of the same name and format in another folder.

    Tables whose predictions exist and are up to date are skipped, so that a run that was killed can be repeated.

    Args:
        model: File of the model.
        tables: Folder with CSV and Parquet files; names that begin with ``.`` or ``_`` are ignored.
        output: Folder of the predictions; it is created if it does not exist.
        asked: Options of the predictions.
        jobs: Number of processes; -1 for all cores.

    Raises:
        DataError: The folder has no tables, or one of them cannot be predicted, which the message names. Finished
            predictions are kept.
        InputError: The level is out of range, or a process was killed.
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
    notes.print(str(tables))
    if changed:
        warn(f"{output}: {changed:,} were of other tables, another model or other options, and were made anew")
    before = f", {len(parts) - len(left):,} were done before" if len(left) < len(parts) else ""
    typer.echo(f"{rows:,} rows in {len(left):,} table{'s' * (len(left) != 1)}{before}: {output}")


_AS_THEY_COME: dict[str, Any] = {"return_as": "generator_unordered", "batch_size": 1, "pre_dispatch": "2*n_jobs"}


def _parts(model: Path, tables: Path, output: Path, asked: Asked) -> list[Part]:
    """Return the tables of a folder, sorted by name, with the files of their predictions.

    Warns about files that are not tables.

    Raises:
        DataError: There is no table, or the predictions of two tables would have the same name.
    """
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
    """Return the parts that are not up to date, and how many of them have predictions with a different hash.

    Args:
        parts: All parts.
        record: The record of finished files, one JSON object per line; need not exist.
    """
    done: dict[str, str] = {}
    if record.exists():
        for line in record.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                done[entry["file"]] = entry["of"]
            except (
                ValueError,
                KeyError,
                TypeError,
            ):  # truncated by a kill or damaged: predicted again
                continue
    left = [part for part in parts if not (part.output.exists() and done.get(part.output.name) == part.of)]
    return left, sum(part.output.exists() and part.output.name in done for part in left)


def _predict(here: Path, model: Path, part: Part, asked: Asked) -> _Done:
    """Predict one table in a worker process; error messages contain the path of the table as the user gave it.

    Args:
        here: Working directory of the main process, to which paths are relative.
        model: File of the model.
        part: The table and its predictions.
        asked: Options of the predictions.
    """
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
    """Return the model, which is read once in each process."""
    return load_model(Path(path), fast)


def _guarded(results: Iterable[_Done]) -> Iterable[_Done]:
    """Yield the results, and replace joblib's error about a killed process by an :class:`InputError`."""
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    try:
        yield from results
    except TerminatedWorkerError as error:
        raise InputError(
            "--jobs: a process was killed, perhaps for lack of memory; what is done is kept, and the same command with "
            "fewer --jobs goes on"
        ) from error


def _shown(results: Iterable[_Done], count: int) -> Iterable[_Done]:
    """Yield the results, with a progress bar if standard error is a terminal.

    Args:
        results: The finished parts.
        count: Their number.
    """
    rows = 0
    with rows_progress(counts_parts=True) as progress:
        task = progress.add_task("", total=count, rows=0)
        for done in results:
            yield done
            rows += done.rows
            progress.update(task, advance=1, rows=rows)
