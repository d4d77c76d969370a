"""The command line: ``mpgelu --help``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mpgelu import __version__
from mpgelu.cli import deploy, reproduce, tables
from mpgelu.cli.bench import bench
from mpgelu.cli.compare import compare
from mpgelu.errors import MPGELUError

app = typer.Typer(
    help="""Neural networks that say how sure they are, in one deterministic forward pass.

    Example: mpgelu fit houses.csv --target price -o houses.mpgelu, then mpgelu predict houses.mpgelu new.csv
    -o predictions.csv; mpgelu example writes a table to try them on.
    """,
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


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mpgelu {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of all wrong calls; typer does not export it


def main() -> None:
    """Entry point: an expected error is one or two lines and exit code 2, never a traceback."""
    try:
        code = app(prog_name="mpgelu", standalone_mode=False)
    except MPGELUError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except _UsageError as error:
        typer.echo(_explained(error), err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    sys.exit(code or 0)


def _explained(error: Any) -> str:
    """What is wrong with a call and where to read on, or the help itself if nothing was asked for."""
    message: str = error.format_message()
    if error.ctx is None or message.startswith("Usage:"):
        return message
    return f"error: {message.rstrip('.')}\nsee: {error.ctx.command_path} --help"
