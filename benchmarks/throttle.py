"""Making a process slower than it is, whatever it does: another one stops it for part of every few milliseconds.

Unlike work that is added to its own, this slows every thread of the process alike and leaves its core free, as a slower
processor would; waiting takes no longer. It needs no rights beyond those over one's own processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PERIOD = 3e-3
"""Seconds of a stop and a go: short against the layers of a step, long against the signals."""


@contextlib.contextmanager
def throttled(pid: int, factor: float) -> Iterator[None]:
    """`pid` has a share of 1 / `factor` of the time while this lasts."""
    command = [sys.executable, "-S", __file__, str(pid), str(factor)]
    with subprocess.Popen(command) as stopper:
        try:
            yield
        finally:
            stopper.send_signal(signal.SIGTERM)
            stopper.wait()


def _stop_and_go(pid: int, factor: float) -> None:
    """Until told to end; the process goes on whatever happens. Late wake-ups are made up for in the next turn."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(OSError):
        os.nice(-10)
    turn = time.perf_counter()
    try:
        while True:
            os.kill(pid, signal.SIGCONT)
            turn = _until(turn + PERIOD / factor)
            os.kill(pid, signal.SIGSTOP)
            turn = _until(turn + PERIOD * (1 - 1 / factor))
    except ProcessLookupError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _until(moment: float) -> float:
    time.sleep(max(0.0, moment - time.perf_counter()))
    return moment


if __name__ == "__main__":
    _stop_and_go(int(sys.argv[1]), float(sys.argv[2]))
