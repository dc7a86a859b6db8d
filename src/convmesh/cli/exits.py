"""What the exit status says, the same for every verb."""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """0 done, 1 our bug, 2 bad input, 3 no feasible plan, 5 not exact, 130 interrupted."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    NO_PLAN = 3
    NOT_EXACT = 5
    INTERRUPTED = 130


EXPLAINED = (
    "exit status: 0 done; 1 a bug of ConvMesh; 2 bad input; 3 no feasible plan; 5 verified and found not exact; "
    "130 interrupted"
)


class BadInputError(Exception):
    """What the user typed cannot be used; the message is all that is shown."""


def check_writable(argument: str, path: Path) -> None:
    """Refuse a path to which nothing can be written, before the work whose result goes there."""
    folder = path.parent
    if path.is_dir():
        why = errno.EISDIR
    elif not folder.is_dir():
        why = errno.ENOTDIR if folder.exists() else errno.ENOENT
    else:
        why = 0 if os.access(path if path.exists() else folder, os.W_OK) else errno.EACCES
    if why:
        raise BadInputError(f"`{argument}` (={str(path)!r}): {os.strerror(why)}.")
