"""The command line ``mpgelu``: its commands, and the translation of errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mpgelu import __version__
from mpgelu.cli import deploy, reproduce, tables
from mpgelu.cli.bench import bench
from mpgelu.cli.compare import compare
from mpgelu.cli.shared import ClosedPipeError, Command, as_options
from mpgelu.errors import MPGELUError

app = typer.Typer(
    help="""Neural networks that say how sure they are, without sampling.

    Example: mpgelu fit houses.csv --target price -o houses.mpgelu, then mpgelu predict houses.mpgelu new.csv
    -o predictions.csv. To try it without a table of your own, begin with mpgelu example.
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long option names off
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[Callable[..., None], str] = {  # what the list of commands says: one line of a terminal each
    tables.example: "Write a small real table to try the other commands on.",
    tables.fit: "Train a model that predicts one column of a table.",
    tables.predict: "Predict every row of a table, with error bars.",
    tables.evaluate: "Score a model on rows whose target is known.",
    tables.report: "Write a page on how good a model is, and where it is not.",
    tables.info: "Show what a model predicts, or what is installed.",
    deploy.explain: "Split the variance of each prediction by its sources.",
    deploy.verify: "Check a model's moments by sampling its networks.",
    deploy.distill: "Turn a model into a single network, many times faster.",
    deploy.export: "Write a model as an ONNX graph that runs without torch.",
    compare: "Compare our estimator with other methods.",
    bench: "Measure speed.",
}
for _command, _summary in _COMMANDS.items():
    app.command(cls=Command, short_help=_summary)(_command)
app.add_typer(reproduce.app, name="reproduce", short_help="Rerun the paper's experiments.")


def _show_version(asked: bool) -> None:
    """Print the version and exit, if the option ``--version`` was given."""
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
    """Run the command line. Expected errors are printed in one or two lines, without a traceback.

    The exit codes are

    * 0 for success,
    * 1 if ``mpgelu verify`` found a disagreement,
    * 2 for an error of the input or of the call,
    * 74 (``EX_IOERR``) if standard output cannot be written,
    * 130 after Ctrl-C and 141 after a closed pipe, as for a process that a signal has ended.
    """
    if sys.stderr is None:  # closed by the caller
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the end
    if sys.stdout is None:
        _stop(74, "error: standard output is closed; send it to a file or to /dev/null")
    try:
        code = app(prog_name="mpgelu", standalone_mode=False)
        sys.stdout.flush()
    except MPGELUError as error:
        _stop(2, f"error: {as_options(str(error))}")
    except _UsageError as error:
        _stop(2, _explained(error))
    except typer.Abort:
        _stop(130)
    except (ClosedPipeError, BrokenPipeError):
        _discard_output()
        _stop(141)
    except OSError as error:
        _discard_output()
        _stop(74, f"error: {error.filename or 'standard output'}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        _stop(2, "error: this machine has too little memory for what was asked; ask for less")
    sys.exit(code or 0)


def _stop(code: int, message: str = "") -> NoReturn:
    """Print a message on standard error, if that is writable, and exit."""
    with contextlib.suppress(OSError):
        if message:
            typer.echo(message, err=True)
    sys.exit(code)


def _discard_output() -> None:
    """Redirect standard output to the null device; otherwise Python would try to flush the rest of it at exit."""
    with Path(os.devnull).open("w") as nowhere, contextlib.suppress(OSError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _explained(error: Any) -> str:
    """Return the message of a usage error and a reference to the help, or the help itself without a command."""
    message: str = error.format_message()
    if error.ctx is None or message.startswith("Usage:"):
        return message
    return f"error: {message.rstrip('.')}\nsee: {error.ctx.command_path} --help"
