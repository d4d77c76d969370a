"""``mpgelu compare``: our estimator beside other methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mpgelu.cli.shared import Data, chosen, make_folder, uci_names
from mpgelu.errors import InputError

_MOST_SPLITS = 20


def compare(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the records and tables.")] = Path(
        "results/compare"
    ),
    datasets: Annotated[str, typer.Option(help="Data sets, separated by commas; 'small' or 'all'.")] = "all",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas; 'all'.")] = "all",
    splits: Annotated[str, typer.Option(help="Splits: a range such as 0-19, or how many.")] = "0-19",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes, one thread each.")] = 1,
    data: Data = None,
    tables_only: Annotated[bool, typer.Option(help="Run nothing; rewrite the tables from the records.")] = False,
    readme: Annotated[Path | None, typer.Option(help="Write the log-likelihoods into this file too.")] = None,
) -> None:
    """Set our estimator beside other methods on the published splits of the UCI data sets.

    Methods whose package is missing are skipped: pip install 'mpgelu[compare]' brings them. Finished work is recorded
    as it is done; the same command goes on where it stopped.

    Example: mpgelu compare --datasets boston,yacht --methods mpgelu,deep-ensemble --splits 5
    """
    from mpgelu.research.compare.methods import METHODS
    from mpgelu.research.compare.report import update_readme, write_report
    from mpgelu.research.compare.run import run, tasks

    names, known = uci_names(datasets), chosen("methods", methods, tuple(METHODS))
    numbers = _splits(splits)
    path = output / "records.jsonl"
    if not tables_only:
        make_folder(output)
        folder = None if data is None else str(data)
        try:
            run(tasks(_installed(known), names, numbers, folder), path, data=folder, jobs=jobs)
        except KeyboardInterrupt:
            typer.echo(f"stopped; what was finished is in {path}, the same command goes on from there", err=True)
            raise typer.Exit(130) from None
    write_report(path, output)
    if readme is not None:
        update_readme(path, readme)
    typer.echo(f"tables: {output / 'compare.md'}")


def _splits(text: str) -> range:
    first, dash, last = text.partition("-")
    try:
        numbers = range(int(first), int(last) + 1) if dash else range(int(text))
    except ValueError:
        raise InputError(f"--splits: wants a range such as 0-19 or a number of splits, got {text!r}") from None
    if not numbers or numbers[-1] >= _MOST_SPLITS:
        raise InputError(f"--splits: {text!r} is not within the {_MOST_SPLITS} published splits, 0-{_MOST_SPLITS - 1}")
    return numbers


def _installed(methods: Sequence[str]) -> list[str]:
    """The methods that can run here; says in one line each why another cannot."""
    from mpgelu.research.compare.methods import METHODS

    reasons = {method: METHODS[method].missing for method in methods}
    for reason in filter(None, reasons.values()):
        typer.echo(reason, err=True)
    if not (installed := [method for method, reason in reasons.items() if not reason]):
        raise InputError("--methods: none of the chosen methods is installed; pip install 'mpgelu[compare]'")
    return installed
