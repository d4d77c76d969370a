"""What the commands have in common: reading options, making folders, printing tables."""

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
Delimiter = Annotated[str, typer.Option(help="Between the cells of a CSV file; 'tab' for a tab.")]


class Command(TyperCommand):
    """A command that refuses what click lets pass: an option given twice, of which it keeps the last, and NaN."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, and refuse options that are given twice or are not finite."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        option: Any  # of click, or of the copy of it that typer holds
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
        """Run the command; a reader that closed the pipe is an error of its own, which click would hide."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ClosedPipeError from error


class ClosedPipeError(Exception):
    """Whoever read the standard output wants no more of it, as ``head`` does."""


def as_options(message: str) -> str:
    """A message of the library with its arguments, in backquotes there, as options of the command line.

    >>> as_options("leave it out with `drop`, or set `hold_out`")
    'leave it out with --drop, or set --hold-out'
    """
    return _ARGUMENTS.sub(lambda found: f"--{found[1].replace('_', '-')}", message)


_ARGUMENTS = re.compile("`(calibrate|categorical|delimiter|drop|hold_out|missing)`")


def open_table(path: str, delimiter: str) -> Source:
    """A table to read, of which a folder holds Parquet files; ``-`` is standard input."""
    from mpgelu.tables import Source
    from mpgelu.tables.dataset import Dataset

    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter, delimiter)
    if len(delimiter) != 1 or not delimiter.isascii():
        raise InputError(f"--delimiter: wants one ASCII character, or 'tab', got {delimiter!r}")
    return Dataset(path) if Path(path).is_dir() else Source(path, delimiter)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Warnings of the library as a person wants to read them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
        yield


def warn(message: str) -> None:
    """Tell on standard error."""
    typer.echo(f"warning: {as_options(message)}", err=True)


class Notes:
    """What was unusual about the cells of all parts of a table, told once."""

    def __init__(self) -> None:
        self.unseen: Counter[str] = Counter()
        self.filled: Counter[str] = Counter()
        self.far: Counter[str] = Counter()

    def add(self, other: Encoded | Notes) -> None:
        """Take note of a part, or take over the notes of other parts."""
        self.unseen += other.unseen
        self.filled += other.filled
        self.far += other.far

    def tell(self, name: str) -> None:
        """Say it of the table of this name, a line for each kind."""
        for counts, what in (
            (self.unseen, "hold a category that training did not have, and count as none of the known"),
            (self.filled, "are missing in columns that were almost complete in training, and were filled"),
            (self.far, "are far outside the range that training had; predictions of these rows are guesses"),
        ):
            if counts:
                listed = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(5))
                warn(f"{name}: {sum(counts.values()):,} cells {what} ({listed})")


def chosen(
    option: str, text: str, known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Names separated by commas, or the name of a group of them; ``all`` is one."""
    groups = {"all": known, **(groups or {})}
    names = groups.get(text) or list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in known]:
        options = ", ".join([*known, *groups])
        raise InputError(f"--{option}: unknown {', '.join(map(repr, unknown))}; choose from {options}")
    return list(names)


def uci_names(text: str) -> list[str]:
    """Names of UCI data sets."""
    from mpgelu.research.datasets import UCI_NAMES
    from mpgelu.research.paper.uci import LARGE

    return chosen("datasets", text, UCI_NAMES, {"small": [name for name in UCI_NAMES if name not in LARGE]})


def numbers(option: str, text: str, lowest: int, highest: int) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--{option}: wants whole numbers separated by commas, got {text!r}") from None
    if wrong := [number for number in found if not lowest <= number <= highest]:
        raise InputError(f"--{option}: {wrong[0]} is not between {lowest} and {highest}")
    return found


def make_folder(folder: Path) -> None:
    """Make the folder now, rather than fail after the first hour of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: cannot create the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output: the folder {folder} cannot be written to; choose another")


def check_readme(readme: Path | None) -> None:
    """Find out now, rather than after hours of measuring, that there is no file to write a table into."""
    if readme is not None and not readme.is_file():
        raise InputError(f"--readme: there is no file {readme}; the table is written between marks that it holds")


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Rows of a table, under a title."""
    if rows:
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*map(str, row.values()))
        print_table(table)


def print_table(table: Table) -> None:
    """A table as wide as the terminal, or 100 columns in a file."""
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def print_installation() -> None:
    """Print versions, whether the kernels are compiled and for which processor, and the number of threads."""
    import torch

    from mpgelu import __version__, native
    from mpgelu.native.threads import job_count

    typer.echo(f"mpgelu {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    typer.echo(f"kernels: {native.status()}")
    typer.echo(f"threads: {job_count(None)}")
