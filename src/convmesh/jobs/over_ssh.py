"""Starts a run's supervisor over ssh on every host in a file, and shows what they say."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from convmesh.errors import RunError
from convmesh.jobs.cluster_job import ClusterJob
from convmesh.supervise.signals import hearing

PORT, PLACES = 29400, 3
"""Where supervisors meet: on the first host, and on the next of so many when that is lost."""

_SSH_FAILED = 255
"""How ssh ends when it cannot reach a host, or loses it: the others may go on without."""


def hosts_in(file: Path) -> list[str]:
    """One host per line, as ssh knows it; a # begins a comment."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"`--ssh` (={str(file)!r}) cannot be read: {error}.") from error
    hosts = [host for line in lines if (host := line.partition("#")[0].strip())]
    for host in hosts:
        if len(host.split()) > 1 or host.startswith("-"):
            raise RunError(f"`--ssh` (={str(file)!r}) has a line {host!r}; write one host a line, such as user@node1.")
    if not hosts or len({*hosts}) < len(hosts):
        raise RunError(f"`--ssh` (={str(file)!r}) must name at least one host, and each host once.")
    return hosts


def start_over_ssh(job: ClusterJob, hosts: Sequence[str], folder: str, ssh: Sequence[str] = ("ssh",)) -> int:
    """Run the supervisors to their end; the status is the first that is not 0, if that is a supervisor's.

    Ctrl-C and SIGTERM reach all of them.
    """
    line = _remote_line(job, hosts, folder)
    started: list[subprocess.Popen[str]] = []
    heard, typed = 0, Counter[int]()

    def pass_on() -> None:
        for process in started:
            while typed[process.pid] < heard:
                typed[process.pid] += 1
                _type_control_c(process)

    def interrupt(number: int) -> None:
        nonlocal heard
        del number
        heard += 1
        pass_on()

    with hearing(interrupt):  # from before the first is started: none may be left running alone
        for host in hosts:
            if heard:
                break
            started.append(_connected([*ssh, "-tt", host, line]))
            pass_on()  # what was heard while this one was being started
        readers = [_shown(process, host) for process, host in zip(started, hosts, strict=False)]
        codes = [process.wait() for process in started]
    for reader in readers:
        reader.join()
    told = [code for code in codes if code != _SSH_FAILED] or codes
    return next((code for code in told if code), 0)


def _connected(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start ssh in a new session: Ctrl-C here would end ssh, and with it the supervisor, before the run is saved."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _type_control_c(process: subprocess.Popen[str]) -> None:
    """The terminal at the other end turns it into a SIGINT for the supervisor."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\x03")
        process.stdin.flush()


def _remote_line(job: ClusterJob, hosts: Sequence[str], folder: str) -> str:
    places = ",".join(f"{host.rpartition('@')[2]}:{PORT}" for host in hosts[:PLACES])
    command = [
        "convmesh", *job.command, "--ranks", str(job.ranks), "--hosts", str(len(hosts)),
        "--rendezvous", places,
    ]  # fmt: skip
    return f"cd {shlex.quote(folder)} && exec {shlex.join(command)}"


def _shown(process: subprocess.Popen[str], host: str) -> threading.Thread:
    assert process.stdout is not None
    reader = threading.Thread(target=_copy, args=(process.stdout, host))
    reader.start()
    return reader


def _copy(lines: IO[str], host: str) -> None:
    for line in lines:
        sys.stdout.write(f"{host}: {line.rstrip()}\n")
        sys.stdout.flush()
