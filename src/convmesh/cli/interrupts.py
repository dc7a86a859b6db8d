"""Ending when told to: by Ctrl-C, or by a batch system's SIGTERM, with all ranks that were forked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SECONDS_BETWEEN = 1.0
"""Python drops an exception that a signal raises in a callback, as around a fork; so it is raised again."""


@contextmanager
def ends_when_told() -> Iterator[None]:
    """SIGINT and SIGTERM unwind this process, which ends its ranks; a rank that gets one ends at once."""
    owner = os.getpid()
    told: list[int] = []

    def stop(number: int, frame: object) -> NoReturn:
        del frame
        if os.getpid() != owner:  # a rank would answer an exception and go on
            os._exit(128 + number)
        if not told:
            told.append(number)
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN, SECONDS_BETWEEN)
        if told[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + told[0])

    def hook(dropped: Any) -> None:
        """Say nothing of the exception that was dropped: it comes again."""
        if not (told and dropped.exc_type in (KeyboardInterrupt, SystemExit)):
            show(dropped)

    show, sys.unraisablehook = sys.unraisablehook, hook
    before: dict[int, Any] = {}
    try:
        before |= {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
    finally:
        if told:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = show
        for number, handler in before.items():
            signal.signal(number, handler)
