"""Clean shutdown on Ctrl-C or a batch system's SIGTERM, including all forked ranks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SECONDS_BETWEEN_REPEATS = 1.0
"""Time between repeats of the exception: Python drops one that a signal handler raises in a callback, as in a fork."""


@contextmanager
def shuts_down_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM unwind this process, which ends its ranks; a rank that receives one exits at once."""
    owner = os.getpid()
    received: list[int] = []

    def stop(number: int, frame: object) -> NoReturn:
        del frame
        if os.getpid() != owner:  # a rank would catch the exception and carry on
            os._exit(128 + number)
        if not received:
            received.append(number)
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN_REPEATS, SECONDS_BETWEEN_REPEATS)
        if received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + received[0])

    def hook(dropped: Any) -> None:
        """Stay silent about the dropped exception: it is raised again."""
        if not (received and dropped.exc_type in (KeyboardInterrupt, SystemExit)):
            show(dropped)

    show, sys.unraisablehook = sys.unraisablehook, hook
    before: dict[int, Any] = {}
    try:
        before |= {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
    finally:
        if received:
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = show
        for number, handler in before.items():
            signal.signal(number, handler)
