"""The progress bar of training."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def training_progress(show: bool) -> Progress:
    """A progress bar with the loss; it is shown only if ``show`` is true and the standard error is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        console=Console(stderr=True),
        transient=True,
        disable=not (show and sys.stderr.isatty()),
    )
