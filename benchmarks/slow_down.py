"""Slowing a process down from outside, as `cpulimit` does: it is stopped for a part of every few milliseconds.

python -m benchmarks.slow_down PID FACTOR     until it is ended or the process is gone
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SECONDS_RUNNING = 2e-3
"""Between two stops: short, so that even small messages of a step are delayed by milliseconds only."""


@contextmanager
def slowed(factor: float) -> Iterator[None]:
    """In here this process has one `factor`-th of its speed."""
    command = [sys.executable, "-m", "benchmarks.slow_down", str(os.getpid()), str(factor)]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert helper.stdin is not None
        helper.terminate()
        helper.wait()


def duty_cycle(pid: int, factor: float) -> None:
    """Stop and continue a process for ever; whatever ends this, the process goes on."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    with suppress(ProcessLookupError):
        while not ending:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SECONDS_RUNNING * (factor - 1))
            os.kill(pid, signal.SIGCONT)
            time.sleep(SECONDS_RUNNING)


if __name__ == "__main__":
    duty_cycle(int(sys.argv[1]), float(sys.argv[2]))
