"""The command line: ``mpgelu --help``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from mpgelu.cli import deploy, reproduce, tables
from mpgelu.cli.bench import bench
from mpgelu.cli.compare import compare
from mpgelu.errors import MPGELUError

app = typer.Typer(
    help="Neural networks that say how sure they are, in one deterministic forward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long option names off
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(tables.fit, tables.predict, tables.evaluate, tables.report, tables.info, tables.example),
    *(deploy.export, deploy.explain, deploy.verify, compare, bench),
)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(reproduce.app, name="reproduce")


def main() -> None:
    """Entry point: an expected error is one line and exit code 2, never a traceback."""
    try:
        app()
    except MPGELUError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
