"""A host: a namespace of networks and host names, and the processes in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SECONDS_PAUSE = 0.005
_PR_SET_PDEATHSIG = 1


class Host:
    """Held by a process that ends with this one, so that nothing is left, however the tests end."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name, self.address = name, address
        hold = f"echo {name} > /proc/sys/kernel/hostname; echo ready; exec cat"
        command = ["unshare", "--net", "--uts", "sh", "-c", hold]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise OSError("no namespace of our own")

    @property
    def pid(self) -> int:
        """Of the process that holds the namespace."""
        return self._holder.pid

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command line that runs here."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--", *command]

    def run(self, *command: str) -> str:
        """What a command prints."""
        return subprocess.run(self.inside(command), check=True, capture_output=True, text=True).stdout

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.inside(command), text=True, preexec_fn=_end_with_parent, **options)  # noqa: PLW1509

    def processes(self) -> list[int]:
        """All that run here."""
        here, found = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for name in filter(str.isdecimal, os.listdir("/proc")):  # a glob ends at the first that it may not look into
            with contextlib.suppress(OSError):  # others end meanwhile
                if os.readlink(f"/proc/{name}/ns/net") == here:
                    found.append(int(name))
        return [pid for pid in found if pid != self.pid]

    def rank(self, rank: int) -> int:
        """The process of a rank; LookupError if it is not here."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise LookupError(f"rank {rank} on {self.name}")

    def kill(self) -> None:
        """End everything here at once, as power does."""
        while running := self.processes():
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_SECONDS_PAUSE)

    def close(self) -> None:
        if self._holder.poll() is None:
            self.kill()
        self._holder.communicate()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
