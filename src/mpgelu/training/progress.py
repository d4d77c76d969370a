"""The progress bar of training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def training_progress(show: bool) -> Progress:
    """Return a progress bar with the training loss on standard error.

    Args:
        show: Whether to show it; it is never shown if standard error is not a terminal.
    """
    from rich.console import Console  # a slow import that prediction does not need
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
