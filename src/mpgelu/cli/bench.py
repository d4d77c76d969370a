"""``mpgelu bench``: measurements of speed, memory and accuracy (:mod:`mpgelu.research.bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpgelu.cli.shared import check_pages, chosen, make_folder, print_rows
from mpgelu.errors import InputError


def bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the numbers, tables and figures.")] = Path(
        "results/bench"
    ),
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file too.")] = None,
    sections: Annotated[
        str,
        typer.Option(
            help="inference, training, models, latency, growth, counts, conversion, accuracy, feature-errors, onnx, "
            "workers, prediction, threads, imports, kernels, memory, compile, rows."
        ),
    ] = "all",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every method; the best counts.")] = 9,
    compiled: Annotated[bool, typer.Option(help="Measure torch.compile too, which takes minutes to compile.")] = True,
    keep: Annotated[bool, typer.Option(help="Keep sections of an earlier run that are not measured now.")] = False,
    quick: Annotated[bool, typer.Option(help="A smoke run on tiny sizes; the numbers mean nothing.")] = False,
    readme: Annotated[Path | None, typer.Option(help="Write the table of inference times into this file.")] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Write the tables whose marks this page has, such as those of onnx, into it.")
    ] = None,
) -> None:
    """Measure speed: all methods run in turns in one process, and are reported as times and as ratios.

    Example: mpgelu bench --sections inference --no-compiled --json bench.json
    """
    from mpgelu.research.bench import report
    from mpgelu.research.bench.in_docs import IN_DOCS, update_docs
    from mpgelu.research.bench.run import SECTIONS, run

    names = chosen("sections", sections, tuple(SECTIONS))
    check_pages(readme=readme, docs=docs)
    if readme is not None and "inference" not in names:
        raise InputError("--readme: its table is that of the section inference, which is not among --sections")
    if docs is not None and not set(IN_DOCS) & set(names):
        raise InputError(f"--docs: its tables are those of {', '.join(IN_DOCS)}; none is among --sections")
    make_folder(output)
    results = run(names, rounds=rounds, threads=threads, compiled=compiled, quick=quick)
    results = report.merged(results, output) if keep else results
    report.write(results, output)
    if json is not None:
        report.write_json(results, json)
    if readme is not None:
        report.update_readme(results, readme)
    if docs is not None:
        update_docs(results, docs)
    print_rows("targets", report.targets(results))
    typer.echo(f"numbers, tables and figures: {output}")
