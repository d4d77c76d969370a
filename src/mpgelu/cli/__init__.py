"""The command line: ``mpgelu --help``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mpgelu.errors import InputError, MPGELUError

app = typer.Typer(
    help="Neural networks that say how sure they are, in one deterministic forward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long option names off
    context_settings={"help_option_names": ["-h", "--help"]},
)
reproduce = typer.Typer(
    help="Rerun the paper's experiments and set our numbers beside the paper's.",
    no_args_is_help=True,
)
app.add_typer(reproduce, name="reproduce")

Data = Annotated[
    Path | None,
    typer.Option(
        envvar="MPGELU_DATA",
        help="Folder with the UCI data sets (the one that holds UCI_Datasets). Without it they are downloaded once.",
    ),
]


@reproduce.command("toy")
def reproduce_toy(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the figure and the numbers.")] = Path(
        "results/toy"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training; the paper's 1000.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the data and the weights.")] = 0,
) -> None:
    """Train both networks on the paper's toy problem and draw its figure.

    Example: mpgelu reproduce toy -o results/toy
    """
    import torch

    from mpgelu.experiments.toy import TITLES, draw, run_toy, write_summary

    _make_folder(output)
    torch.set_num_threads(1)  # networks this small lose time to a second thread
    results = [run_toy(nonlinearity, epochs=epochs, seed=seed) for nonlinearity in TITLES]
    draw(results, output / "toy.png")
    write_summary(results, output / "toy.json")
    table = Table("network", "inside [-0.5, 0.5]", "outside", "epistemic inside", "outside")
    table.title = "Mean predictive standard deviation"
    for result in results:
        table.add_row(TITLES[result.nonlinearity], *(f"{value:.3f}" for value in result.summary().values()))
    _print(table)
    typer.echo(f"figure:  {output / 'toy.png'}\nnumbers: {output / 'toy.json'}")


@reproduce.command("uci")
def reproduce_uci(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the records and tables.")] = Path(
        "results/uci"
    ),
    tables: Annotated[
        str, typer.Option(help="Which tables: 1 (2 outputs, full), 2 (2, diagonal), 3 (1, full), 4 (1, diagonal).")
    ] = "1,2,3,4",
    datasets: Annotated[str, typer.Option(help="Data sets, separated by commas; 'small' or 'all'.")] = "all",
    splits: Annotated[int | None, typer.Option(min=1, help="Test splits of each data set. Default: all.")] = None,
    grid_splits: Annotated[
        int | None, typer.Option(min=1, help="Splits of the search for the dropout rate. Default: all.")
    ] = None,
    full_relu_splits: Annotated[
        int | None, typer.Option(min=1, help="Test splits of the slowest network, ReLU with full covariance.")
    ] = None,
    borrow_rate: Annotated[
        bool, typer.Option(help="Let ReLU with full covariance take the rate found with diagonal covariance.")
    ] = False,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas. The tables show seed 0.")] = "0",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training; the paper's 500.")] = 500,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    backend: Annotated[str, typer.Option(help="joblib backend: loky, dask or ray.")] = "loky",
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    data: Data = None,
    tables_only: Annotated[bool, typer.Option(help="Train nothing; rewrite the tables from the records.")] = False,
) -> None:
    """Rerun the paper's tables: grid search, training, testing on the published splits.

    Finished work is recorded as it is done; the same command goes on where it stopped.

    Example: mpgelu reproduce uci --datasets boston,yacht --tables 2,4 --jobs 2
    """
    from mpgelu.experiments.report import write_tables
    from mpgelu.experiments.runner import measure_runtimes, run
    from mpgelu.experiments.uci import Effort, cells

    path = output / "records.jsonl"
    chosen = list(cells(_datasets(datasets), _numbers("tables", tables, 1, 4), _numbers("seeds", seeds, 0, 2**31)))
    _make_folder(output)
    if not tables_only:
        effort = Effort(splits, grid_splits, full_relu_splits, borrow_rate, epochs)
        folder = None if data is None else str(data)
        try:
            store = run(chosen, effort, path, data=folder, jobs=jobs, backend=backend, scheduler=scheduler)
            measure_runtimes([cell for cell in chosen if cell.seed == 0], store, folder)
        except KeyboardInterrupt:
            typer.echo(f"stopped; what was finished is in {path}, the same command goes on from there", err=True)
            raise typer.Exit(130) from None
    write_tables(path, output)
    typer.echo((output / "summary.md").read_text(encoding="utf-8"))
    typer.echo(f"tables: {output}")


@app.command("bench")
def bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the numbers, tables and figures.")] = Path(
        "results/bench"
    ),
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file too.")] = None,
    sections: Annotated[str, typer.Option(help="Which: inference, training, models, latency, growth, counts.")] = "all",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every method; the best counts.")] = 9,
    compiled: Annotated[bool, typer.Option(help="Measure torch.compile too, which takes minutes to compile.")] = True,
    quick: Annotated[bool, typer.Option(help="A smoke run on tiny sizes; the numbers mean nothing.")] = False,
    readme: Annotated[Path | None, typer.Option(help="Write the table of inference times into this file.")] = None,
) -> None:
    """Measure speed: all methods in one process, in turns, ratios beside times.

    Example: mpgelu bench --sections inference --no-compiled --json bench.json
    """
    from mpgelu.bench import report
    from mpgelu.bench.run import run

    results = run(_sections(sections), rounds=rounds, threads=threads, compiled=compiled, quick=quick)
    report.write(results, output)
    if json is not None:
        report.write_json(results, json)
    if readme is not None:
        report.update_readme(results, readme)
    _print_rows("targets", report.targets(results))
    typer.echo(f"numbers, tables and figures: {output}")


def main() -> None:
    """Entry point: an expected error is one line and exit code 2, never a traceback."""
    try:
        app()
    except MPGELUError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def _datasets(names: str) -> list[str]:
    from mpgelu.datasets import UCI_NAMES
    from mpgelu.experiments.uci import LARGE

    groups = {"all": list(UCI_NAMES), "small": [name for name in UCI_NAMES if name not in LARGE]}
    chosen = groups.get(names) or list(dict.fromkeys(name.strip() for name in names.split(",")))
    if unknown := [name for name in chosen if name not in UCI_NAMES]:
        raise InputError(
            f"--datasets: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(UCI_NAMES)}, small, all"
        )
    return chosen


def _numbers(option: str, text: str, lowest: int, highest: int) -> list[int]:
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--{option}: wants whole numbers separated by commas, got {text!r}") from None
    if wrong := [number for number in numbers if not lowest <= number <= highest]:
        raise InputError(f"--{option}: {wrong[0]} is not between {lowest} and {highest}")
    return numbers


def _sections(text: str) -> list[str]:
    from mpgelu.bench.sections import SECTIONS

    chosen = list(SECTIONS) if text == "all" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise InputError(f"--sections: unknown {', '.join(unknown)}; choose from {', '.join(SECTIONS)}, all")
    return chosen


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: cannot create the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output: the folder {folder} cannot be written to; choose another")


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*map(str, row.values()))
        _print(table)


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 100).print(table)
