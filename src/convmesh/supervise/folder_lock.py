"""The lock of a run folder. The first rank holds it, so of hosts that cannot reach each other only one goes on."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from pathlib import Path
from typing import IO

LOCK = ".lock"
_TRIES, _SECONDS_PAUSE = 3, 0.05
"""A process that only checks whether a folder is in use holds the lock for a moment."""


class FolderInUseError(OSError):
    """Another process holds the folder; the message says which."""


def lock_folder(path: Path) -> IO[str]:
    """The lock file, held by this process; the system releases it when the process ends, however that happens."""
    file = (path / LOCK).open("a+", encoding="utf-8")
    for _ in range(_TRIES):
        if _tried(file, fcntl.LOCK_EX):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            return file
        time.sleep(_SECONDS_PAUSE)
    file.seek(0)
    holder = file.read().strip() or "another process"
    file.close()
    raise FolderInUseError(holder)


def folder_in_use(path: Path) -> bool:
    """Whether a run is using the folder."""
    if not (path / LOCK).exists():
        return False
    with (path / LOCK).open(encoding="utf-8") as file:
        return not _tried(file, fcntl.LOCK_SH)


def _tried(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
