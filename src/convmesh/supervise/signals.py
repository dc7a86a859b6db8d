"""Ctrl-C and SIGTERM while ranks run and between their runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def hearing(hear: Callable[[int], None]) -> Iterator[None]:
    """Call `hear` with each signal, instead of the previous handler."""

    def handle(number: int, frame: Any) -> None:
        del frame
        hear(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
