"""Handling of Ctrl-C during training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self


class Interrupts:
    """A context in which Ctrl-C sets a flag, which training reads between steps.

    An exception in the middle of a step would leave parameters and optimiser in an inconsistent state. A second Ctrl-C
    raises ``KeyboardInterrupt`` at once. The previous handler of the signal is called too, and is restored at the end
    of the context. If the process ignores the signal, as jobs in the background do, or the context is entered outside
    the main thread, which alone receives signals in Python, nothing is changed.

    Attributes:
        seen: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.seen = False
        self._at_once = False

    def __enter__(self) -> Self:
        """Install the handler."""
        self._before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._listens = is_main and self._before not in (signal.SIG_IGN, None)  # None: not set from Python
        if self._listens:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handler."""
        if self._listens:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Return a context in which the first Ctrl-C raises, too: for waiting, which leaves nothing inconsistent."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal; the arguments are those of a handler of :mod:`signal`."""
        if self.seen or self._at_once:
            self.seen = True
            raise KeyboardInterrupt
        self.seen = True
        if callable(self._before):
            with suppress(KeyboardInterrupt):
                self._before(number, frame)
