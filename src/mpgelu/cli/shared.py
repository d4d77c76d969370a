"""Functions shared by the commands: options, warnings, folders, printed tables."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from mpgelu.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from mpgelu.tables import Encoded, Source

Data = Annotated[
    Path | None,
    typer.Option(
        envvar="MPGELU_DATA",
        help="Folder with the UCI data sets (the one that holds UCI_Datasets). Without it they are downloaded once.",
    ),
]
Compact = Annotated[
    bool, typer.Option("--compact", help="Distill the ensemble into one network: smaller, predicts many times faster.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The same seed gives the same model.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="File written by mpgelu fit.")]
Delimiter = Annotated[str, typer.Option(help="Between the cells of a CSV file; 'tab' for a tab.")]


class Command(TyperCommand):
    """A command with two checks that click lacks: for options that are given twice, and for values that are not finite.

    Click would silently use the last value of a repeated option, and accept ``nan`` as a number.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            typer.BadParameter: An option is repeated, or not a finite number.
        """
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        option: Any  # a class of click, or of the copy of click inside typer
        for option, times in Counter(given).items():
            if times > 1 and not getattr(option, "multiple", True) and not getattr(option, "is_flag", True):
                raise typer.BadParameter(f"it is given {times} times; give it once", ctx=ctx, param=option)
        rest: list[str] = super().parse_args(ctx, args)
        for option in self.params:
            value = ctx.params.get(option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=option)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A closed pipe raises :class:`ClosedPipeError`, because click would hide the original."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ClosedPipeError from error


class ClosedPipeError(Exception):
    """The reader of standard output has closed the pipe, as ``head`` does."""


def as_options(message: str) -> str:
    """Return a message of the library with the names of arguments, in backquotes, replaced by command-line options.

    >>> as_options("leave it out with `drop`, or set `hold_out`")
    'leave it out with --drop, or set --hold-out'
    """
    return _ARGUMENTS.sub(lambda found: f"--{found[1].replace('_', '-')}", message)


_ARGUMENTS = re.compile("`(calibrate|categorical|delimiter|drop|hold_out|missing)`")


def open_table(path: str, delimiter: str) -> Source:
    """Return a table to be read.

    Args:
        path: A CSV or Parquet file, a folder of Parquet files, or ``-`` for standard input.
        delimiter: Delimiter of a CSV file; ``tab`` means a tab.

    Raises:
        InputError: The delimiter is not a single ASCII character.
    """
    from mpgelu.tables import Source
    from mpgelu.tables.dataset import Dataset

    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
    if len(delimiter) != 1 or not delimiter.isascii():
        raise InputError(f"--delimiter: wants one ASCII character, or 'tab', got {delimiter!r}")
    return Dataset(path) if Path(path).is_dir() else Source(path, delimiter)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Return a context in which warnings are printed as one line, without file name and source code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
        yield


def warn(message: str) -> None:
    """Print a warning on standard error."""
    typer.echo(f"warning: {as_options(message)}", err=True)


def left_out(rows: int, target: str) -> str:
    """Return the sentence about rows that have no target."""
    return f"{rows:,} row{'s' * (rows != 1)} without {target!r} {'is' if rows == 1 else 'are'} left out"


class Notes:
    """Counts of unusual cells over all parts of a table, printed once at the end.

    Attributes:
        unseen: Number of cells in each column with a category that did not occur in training.
        filled: Number of missing cells in each column that had almost none in training.
        far: Number of cells in each column far outside the range of the training data.
    """

    def __init__(self) -> None:
        self.unseen: Counter[str] = Counter()
        self.filled: Counter[str] = Counter()
        self.far: Counter[str] = Counter()

    def add(self, other: Encoded | Notes) -> None:
        """Add the counts of a part of the table, or of other notes."""
        self.unseen += other.unseen
        self.filled += other.filled
        self.far += other.far

    def print(self, name: str) -> None:
        """Print one warning for each kind of unusual cells.

        Args:
            name: Name of the table.
        """
        for counts, what in (
            (self.unseen, "hold a category that training did not have, and count as none of the known"),
            (self.filled, "are missing in columns that were almost complete in training, and were filled"),
            (self.far, "are far outside the range that training had; predictions of these rows are guesses"),
        ):
            if counts:
                listed = ", ".join(f"{column} {count:,}" for column, count in counts.most_common(5))
                warn(f"{name}: {counts.total():,} cells {what} ({listed})")


def chosen(
    option: str, text: str, known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return the names that an option selects.

    Args:
        option: Name of the option, for error messages.
        text: Names separated by commas, or the name of a group; ``all`` is a group.
        known: All valid names.
        groups: Further groups of names.

    Raises:
        InputError: A name is unknown.
    """
    groups = {"all": known, **(groups or {})}
    names = groups.get(text) or list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in known]:
        options = ", ".join([*known, *groups])
        raise InputError(f"--{option}: unknown {', '.join(map(repr, unknown))}; choose from {options}")
    return list(names)


def uci_names(text: str) -> list[str]:
    """Return the names of UCI data sets, from names separated by commas, ``small`` or ``all``."""
    from mpgelu.research.datasets import UCI_NAMES
    from mpgelu.research.paper.uci import LARGE

    return chosen("datasets", text, UCI_NAMES, {"small": [name for name in UCI_NAMES if name not in LARGE]})


def numbers(option: str, text: str, lowest: int, highest: int) -> list[int]:
    """Return integers from a text in which commas separate them.

    Args:
        option: Name of the option, for error messages.
        text: The text.
        lowest: Smallest valid number.
        highest: Largest valid number.

    Raises:
        InputError: A part of the text is not an integer, or out of range.
    """
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--{option}: wants whole numbers separated by commas, got {text!r}") from None
    if wrong := [number for number in found if not lowest <= number <= highest]:
        raise InputError(f"--{option}: {wrong[0]} is not between {lowest} and {highest}")
    return found


def make_folder(folder: Path) -> None:
    """Create the output folder; called before long computations, so that errors are reported at once.

    Raises:
        InputError: The folder cannot be created, or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: cannot create the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output: the folder {folder} cannot be written to; choose another")


def check_pages(**pages: Path | None) -> None:
    """Raise an :class:`InputError` if a file that is to receive a table does not exist.

    Args:
        **pages: The files by the names of their options; ``None`` for an option that is not given.
    """
    for option, path in pages.items():
        if path is not None and not path.is_file():
            raise InputError(f"--{option}: there is no file {path}; the table is written between marks that it holds")


@contextmanager
def resumable(records: Path) -> Iterator[None]:
    """Return a context in which Ctrl-C ends the command with a message that the finished results are recorded."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; what was finished is in {records}, the same command goes on from there", err=True)
        raise typer.Exit(130) from None


def rows_progress(*, counts_parts: bool = False, hidden: bool = False) -> Progress:
    """Return a progress bar on standard error that shows the number of rows, the field ``rows`` of its task.

    Args:
        counts_parts: Whether it shows the number of finished parts, too.
        hidden: Whether to show nothing; nothing is shown either if standard error is not a terminal.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = [MofNCompleteColumn()] if counts_parts else []
    columns = (
        TextColumn("{task.fields[rows]:,} rows"),
        BarColumn(),
        *parts,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    disable = hidden or not sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=disable)


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table with a title; the keys of the first row are the header."""
    if rows:
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*map(str, row.values()))
        print_table(table)


def print_table(table: Table) -> None:
    """Print a table in the width of the terminal, or in 100 columns if standard output is not a terminal."""
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def print_installation() -> None:
    """Print versions, whether the kernels are compiled and for which processor, and the number of threads."""
    import torch

    from mpgelu import __version__, native
    from mpgelu.native.threads import job_count

    typer.echo(f"mpgelu {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    typer.echo(f"kernels: {native.status()}")
    typer.echo(f"threads: {job_count(None)}")
