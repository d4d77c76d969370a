"""``mpgelu reproduce``: the experiments of the paper (:mod:`mpgelu.research.paper`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mpgelu.cli.shared import Command, Data, Seed, check_pages, make_folder, numbers, print_table, resumable, uci_names

app = typer.Typer(
    help="""Repeat the experiments of the paper, and compare the results with the published ones.

    Example: mpgelu reproduce toy -o demo
    """,
    no_args_is_help=True,
)


@app.command("toy", cls=Command)
def reproduce_toy(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the figure and the numbers.")] = Path(
        "results/toy"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training; the paper's 1000.")] = 1000,
    seed: Seed = 0,
    docs: Annotated[
        Path | None, typer.Option(help="Write a table of the numbers between the marks of this page.")
    ] = None,
) -> None:
    """Train both networks on the toy problem of the paper, and draw its figure.

    Example: mpgelu reproduce toy -o results/toy
    """
    import torch

    from mpgelu.research.paper.toy import TITLES, draw, run_toy, update_docs, write_summary

    check_pages(docs=docs)
    make_folder(output)
    torch.set_num_threads(1)  # networks this small lose time to a second thread
    results = [run_toy(nonlinearity, epochs=epochs, seed=seed) for nonlinearity in TITLES]
    draw(results, output / "toy.png")
    write_summary(results, output / "toy.json")
    if docs is not None:
        update_docs({result.nonlinearity: result.summary() for result in results}, docs)
    table = Table("network", "inside [-0.5, 0.5]", "outside", "epistemic inside", "outside", "share inside", "outside")
    table.title = "Mean predictive standard deviation, and the epistemic share of the variance"
    for result in results:
        table.add_row(TITLES[result.nonlinearity], *(f"{value:.3f}" for value in result.summary().values()))
    print_table(table)
    typer.echo(f"figure:  {output / 'toy.png'}\nnumbers: {output / 'toy.json'}")


@app.command("uci", cls=Command)
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
    variant: Annotated[
        str | None,
        typer.Option(
            help="Run this variant instead of the paper's networks: relu_input (ReLU with dropout on the input alone), "
            "gelu_input or gelu_hidden (GELU in the first layer). Its records are a separate file in the same folder."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0, max=0.99, help="Train with this dropout rate instead of searching for one.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas. The tables show seed 0.")] = "0",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training; the paper's 500.")] = 500,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    backend: Annotated[str, typer.Option(help="joblib backend: loky, dask or ray.")] = "loky",
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    data: Data = None,
    tables_only: Annotated[bool, typer.Option(help="Train nothing; rewrite the tables from the records.")] = False,
) -> None:
    """Repeat the tables of the paper: grid search, training, and test on the published splits.

    Each result is recorded when it is finished; after an interruption the same command continues.

    Example: mpgelu reproduce uci --datasets boston,yacht --tables 2,4 --jobs 2
    """
    from mpgelu.research.paper.paper_page import write_tables
    from mpgelu.research.paper.runner import measure_runtimes, run
    from mpgelu.research.paper.uci import PAPER_NETWORKS, Effort, cells
    from mpgelu.research.paper.variants import VARIANTS, WITHOUT_DROPOUT, check_variant

    records = output / "records.jsonl"
    if variant is not None:
        check_variant(variant, rate, records)
    path = output / f"{variant}.jsonl" if variant else records
    wanted = numbers("tables", tables, 1, 4), numbers("seeds", seeds, 0, 2**31)
    networks = [name for name in VARIANTS if name == variant] or PAPER_NETWORKS
    chosen = list(cells(uci_names(datasets), *wanted, networks=networks))
    make_folder(output)
    if not tables_only:
        rate = 0.0 if variant in WITHOUT_DROPOUT else rate
        effort = Effort(splits, grid_splits, full_relu_splits, borrow_rate, epochs, rate)
        folder = None if data is None else str(data)
        with resumable(path):
            store = run(chosen, effort, path, data=folder, jobs=jobs, backend=backend, scheduler=scheduler)
            if variant is None:
                measure_runtimes([cell for cell in chosen if cell.seed == 0], store, folder)
    write_tables(records, output)
    typer.echo((output / "summary.md").read_text(encoding="utf-8"))
    typer.echo(f"tables: {output}")
