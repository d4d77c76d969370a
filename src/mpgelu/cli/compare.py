"""``mpgelu compare``: comparison of the estimator with other methods (:mod:`mpgelu.research.compare`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from mpgelu.cli.shared import Data, check_pages, chosen, make_folder, resumable
from mpgelu.errors import InputError

_MOST_SPLITS = 20
_FEW_ROWS = 2_000


def compare(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the records and tables.")] = Path(
        "results/compare"
    ),
    datasets: Annotated[
        str, typer.Option(help="Data sets, separated by commas; 'first', 'second' (suite), 'small' or 'all'.")
    ] = "all",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; 'ours', 'peers', 'ablations' or 'all'.")
    ] = "all",
    splits: Annotated[
        str, typer.Option(help="Splits: 'report', 'development', a range such as 0-19, or how many.")
    ] = "report",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes, one thread each.")] = 1,
    data: Data = None,
    tables_only: Annotated[bool, typer.Option(help="Run nothing; rewrite the tables from the records.")] = False,
    readme: Annotated[Path | None, typer.Option(help="Write a summary of our settings into this file too.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write our scores on every set into this page too.")] = None,
) -> None:
    """Compare the estimator with other methods on the published splits of two suites of UCI data sets.

    Data sets are run in order of size, smallest first. Methods whose package is missing are skipped: pip install
    'mpgelu[compare]' installs them. Each result is recorded when it is finished; after an interruption the same
    command continues.

    Example: mpgelu compare --datasets boston,yacht --methods mpgelu,deep-ensemble --splits 5
    """
    from mpgelu.research.compare.comparison_page import update_docs, update_readme, write_report
    from mpgelu.research.compare.methods import GROUPS, METHODS
    from mpgelu.research.compare.run import run, tasks

    names, known = _by_size(datasets), chosen("methods", methods, tuple(METHODS), GROUPS)
    numbers = _splits(splits)
    path = output / "records.jsonl"
    check_pages(readme=readme, docs=docs)
    if not tables_only:
        make_folder(output)
        folder = None if data is None else str(data)
        with resumable(path):
            run(tasks(_installed(known), names, numbers, folder), path, data=folder, jobs=jobs)
    write_report(path, output)
    if readme is not None:
        update_readme(path, readme)
    if docs is not None:
        update_docs(path, docs)
    typer.echo(f"tables: {output / 'compare.md'}")


def _by_size(text: str) -> list[str]:
    """Return the names of data sets in the order of their number of rows.

    Args:
        text: Names separated by commas, or the name of a group: ``first``, ``second``, ``small`` or ``all``.
    """
    from mpgelu.research.datasets import SECOND_NAMES, SETS, UCI_NAMES

    groups = {"first": UCI_NAMES, "second": SECOND_NAMES, "small": [n for n, s in SETS.items() if s.rows < _FEW_ROWS]}
    return sorted(chosen("datasets", text, tuple(SETS), groups), key=lambda name: SETS[name].rows)


def _splits(text: str) -> Sequence[int] | Literal["report", "development"]:
    """Return the numbers of the splits, or the name of one of the two standard choices.

    Args:
        text: ``report``, ``development``, a range such as ``0-19``, or the number of splits.

    Raises:
        InputError: The text is none of these, or there are fewer published splits.
    """
    if text in ("report", "development"):
        return cast(Literal["report", "development"], text)
    first, dash, last = text.partition("-")
    try:
        numbers = range(int(first), int(last) + 1) if dash else range(int(text))
    except ValueError:
        wanted = "'report', 'development', a range such as 0-19 or a number of splits"
        raise InputError(f"--splits: wants {wanted}, got {text!r}") from None
    if not numbers or numbers[-1] >= _MOST_SPLITS:
        raise InputError(f"--splits: {text!r} is not within the {_MOST_SPLITS} published splits, 0-{_MOST_SPLITS - 1}")
    return numbers


def _installed(methods: Sequence[str]) -> list[str]:
    """Return the methods whose packages are installed, and print the reason for each that is missing.

    Raises:
        InputError: No method is installed.
    """
    from mpgelu.research.compare.methods import METHODS

    reasons = {method: METHODS[method].missing for method in methods}
    for reason in filter(None, reasons.values()):
        typer.echo(reason, err=True)
    if not (installed := [method for method, reason in reasons.items() if not reason]):
        raise InputError("--methods: none of the chosen methods is installed; pip install 'mpgelu[compare]'")
    return installed
