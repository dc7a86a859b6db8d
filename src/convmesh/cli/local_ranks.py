"""The ranks of `--ranks N`: processes of this machine, ended together, and told of signals."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import IO, Any

LAUNCHER = "CONVMESH_LAUNCHER"
"""In the ranks' environment: the process that started them."""

SECONDS_GRACE = 10.0
"""How long ranks may take to end by themselves after one has failed."""

_PR_SET_PDEATHSIG = 1


def run_local_ranks(ranks: int, command: Sequence[str]) -> int:
    """Run a command on `ranks` ranks of one job; the exit status of the first that failed, or 0."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="convmesh-train-") as folder:
        logs = [None if rank == 0 else open(os.path.join(folder, str(rank)), "w+") for rank in range(ranks)]  # noqa: SIM115
        processes = [_started(rank, ranks, port, command, logs[rank]) for rank in range(ranks)]
        try:
            with _forwarding(processes):
                status = _watched(processes, logs)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return status


def follow_launcher() -> None:
    """In a rank: stop, saved, if the process that started it dies."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it died before we asked
        sys.exit(128 + signal.SIGTERM)


def _started(rank: int, ranks: int, port: int, command: Sequence[str], log: IO[str] | None) -> subprocess.Popen[bytes]:
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
    return subprocess.Popen(
        command, env=_environment(rank, ranks, port), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip


def _environment(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LAUNCHER: os.getpid(),
    }  # fmt: skip
    defaults = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    return {**defaults, **os.environ, **{name: str(value) for name, value in place.items()}}


def _watched(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[str] | None]) -> int:
    """Wait for all; once one has failed, end those that do not end by themselves."""
    handles = {os.pidfd_open(process.pid): process for process in processes}
    status, failed, deadline = 0, 0, None
    while handles:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready: list[Any] = wait(list(handles), left)
        if not ready:
            for process in handles.values():
                process.kill()
            deadline = None
        for handle in ready:
            process = handles.pop(handle)
            os.close(handle)
            if process.wait() and not status:
                status, deadline = _status(process.returncode), time.monotonic() + SECONDS_GRACE
                failed = processes.index(process)
    if processes[0].returncode <= 0:  # else the first rank has told why
        _show_failure(failed, logs)
    return status


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _show_failure(rank: int, logs: Sequence[IO[str] | None]) -> None:
    """Show what another rank than the first wrote before it failed; the first one writes to the terminal itself."""
    log = logs[rank]
    if log is not None:
        log.seek(0)
        sys.stderr.write("".join(log.readlines()[-20:]))


@contextmanager
def _forwarding(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals on: ranks save and end, and then so do we."""

    def forward(number: int, frame: Any) -> None:
        del frame
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
