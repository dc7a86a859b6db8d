"""One rank as its supervisor sees it: a process, its pulse, what it writes, and where its threads are."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from convmesh.supervise.following import LAUNCHER, PARTING, STACKS, TYPED, WANTED
from convmesh.supervise.pulse import PULSE, PulseReader, Sign
from convmesh.supervise.world import World

_SECONDS_STACKS, _SECONDS_PAUSE = 10.0, 0.1
"""How long a rank may take to show its stacks, and how long it may pause while writing them on a busy machine."""

_LINES, _BYTES_TAIL, _BYTES_LOG = 20, 1 << 16, 1 << 20
"""The last lines that are shown, where to look for them, and how long what a rank wrote may become."""


class RankProcess:
    """Started by its constructor; `close` ends it."""

    def __init__(self, world: World, index: int, command: Sequence[str]) -> None:
        self.rank, self.slot = world.first + index, world.slots[index]
        self._pulse = PulseReader()
        self._stacks: IO[str] = _file()
        self._log = _appended() if self.rank else None
        files = {PULSE: self._pulse.file, STACKS: self._stacks.fileno()}
        typed = json.dumps(sys.argv)
        shared = {LAUNCHER: os.getpid(), WANTED: world.wanted, PARTING: _parting(world), TYPED: typed, **files}
        # A new session: a terminal's Ctrl-C reaches only the supervisor, which passes it on once.
        self._process = subprocess.Popen(
            command, env={**world.environment(index), **{name: str(value) for name, value in shared.items()}},
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
            pass_fds=tuple(files.values()),
        )  # fmt: skip
        self.handle = os.pidfd_open(self._process.pid)
        """Readable once the process has ended."""
        self._beats, self._since = 0, time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended: a status, or minus a signal; None while it runs."""
        return self._process.poll()

    @property
    def sign(self) -> Sign:
        return self._pulse.read()

    def seconds_overdue(self, timeout: float) -> float:
        """How much longer than allowed the rank has been silent; negative if it may be silent still."""
        sign, now = self.sign, time.monotonic()
        if sign.beats != self._beats:
            self._beats, self._since = sign.beats, now
        return now - self._since - max(timeout, sign.seconds)

    def ask_for_room(self) -> None:
        self._pulse.ask_for_room()

    def send(self, number: int) -> None:
        """Send a signal, if the process runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds the process."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return stat.rpartition(")")[2].split()[0] in "Tt"
        return False

    def stacks(self) -> str:
        """Where its threads are, as faulthandler writes it; empty if it does not answer."""
        if not self.sign.beats or self.is_stopped():  # SIGUSR1 would kill one that has not registered for it
            return ""
        self.send(signal.SIGUSR1)
        size, end = 0, time.monotonic() + _SECONDS_STACKS
        while time.monotonic() < end:
            time.sleep(_SECONDS_PAUSE)
            before, size = size, os.fstat(self._stacks.fileno()).st_size
            if size and size == before:
                break
        self._stacks.seek(0)
        return self._stacks.read()

    def last_words(self) -> str:
        """The end of what a rank wrote, unless it is rank 0, which writes to the terminal itself."""
        if self._log is None:
            return ""
        return "".join(_tail(self._log).decode(errors="replace").splitlines(keepends=True)[-_LINES:])

    def shorten_log(self) -> None:
        """Keep the end of what the rank wrote: one that tells of every step must not fill the disk."""
        if self._log is not None and os.fstat(self._log.fileno()).st_size > _BYTES_LOG:
            end = _tail(self._log)
            os.ftruncate(self._log.fileno(), 0)
            os.write(self._log.fileno(), end)

    def close(self) -> None:
        """End it, if it runs, and free what it used."""
        self._process.kill()
        self._process.wait()
        os.close(self.handle)
        self._pulse.close()
        for file in (self._stacks, self._log):
            if file is not None:
                file.close()


def _parting(world: World) -> int:
    """How ranks end with their supervisor: after saving, unless that would stop the ranks of other hosts too."""
    return int(signal.SIGKILL if world.has_other_hosts else signal.SIGTERM)


def _appended() -> IO[str]:
    """A file to whose end every process writes, wherever that is now."""
    file = _file()
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def _tail(file: IO[str]) -> bytes:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _BYTES_TAIL, max(0, size - _BYTES_TAIL))


def _file() -> IO[str]:
    """A file without a name: nothing is left of it, however this process ends."""
    return tempfile.TemporaryFile("w+")
