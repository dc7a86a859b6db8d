"""Exit statuses, shared by every verb."""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """0 done, 1 a bug in ConvMesh, 2 bad input, 3 no feasible plan, 5 not exact, 74 and 75 try again, 130 stopped."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    NO_PLAN = 3
    NOT_EXACT = 5
    UNWRITABLE = 74  # "input/output error" in sysexits.h: from a rank to its supervisor, which tries again; users see 2
    LOST_RANK = 75  # "temporary failure" in sysexits.h: another try may succeed
    INTERRUPTED = 130


EXPLAINED = (
    "exit status: 0 done; 1 a bug in ConvMesh; 2 bad input, or a disk that cannot be written; 3 no feasible plan; "
    "5 the verified plan is not exact; "
    "75 another rank was lost; "
    "130 interrupted, 143 terminated (a training run is saved first)"
)


class BadInputError(Exception):
    """Unusable input; the user sees only the message."""


def check_writable(argument: str, path: Path) -> None:
    """Refuse an unwritable path before doing the work whose result goes there."""
    folder = path.parent
    if path.is_dir():
        code = errno.EISDIR
    elif not folder.is_dir():
        code = errno.ENOTDIR if folder.exists() else errno.ENOENT
    else:
        code = 0 if os.access(path if path.exists() else folder, os.W_OK) else errno.EACCES
    if code:
        raise BadInputError(f"`{argument}` (={str(path)!r}): {os.strerror(code)}.")
