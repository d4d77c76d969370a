"""Handling of Ctrl-C during training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self


class Interrupts:
    """Ctrl-C as a flag that is read between steps, because a step interrupted half-way leaves an inconsistent state.

    Whoever listened before hears of it too. Where Ctrl-C is ignored, as by jobs in the background, it stays so. Threads
    other than the main one get none.
    """

    def __init__(self) -> None:
        self.seen = False
        self._at_once = False

    def __enter__(self) -> Self:
        """Listen from now on."""
        self._before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._listens = is_main and self._before not in (signal.SIG_IGN, None)  # None: not set from Python
        if self._listens:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signal back to whoever listened before."""
        if self._listens:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Where nothing can be left half done, such as waiting for others: Ctrl-C is noted and raised."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen or self._at_once:  # the second time, do not wait for the step
            self.seen = True
            raise KeyboardInterrupt
        self.seen = True
        if callable(self._before):
            with suppress(KeyboardInterrupt):
                self._before(number, frame)
