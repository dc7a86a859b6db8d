"""File-system operations that survive a crash: once one returns, its effect is on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

_BYTES_AT_ONCE = 1 << 24


class RunningDigest(Protocol):
    """Sees bytes as they are written."""

    def update(self, data: memoryview, /) -> None: ...


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless they exist."""
    path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, chunks: Iterable[bytes | memoryview], digest: RunningDigest | None = None) -> int:
    """Write a new file to the disk and return its size; it is durable once its folder is, too (`sync_folder`)."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        size = sum(_write(file, memoryview(chunk).cast("B"), digest) for chunk in chunks)
        os.fsync(file)
    finally:
        os.close(file)
    return size


def _write(file: int, data: memoryview, digest: RunningDigest | None) -> int:
    for begin in range(0, len(data), _BYTES_AT_ONCE):
        piece = data[begin : begin + _BYTES_AT_ONCE]
        if digest is not None:
            digest.update(piece)
        done = 0
        while done < len(piece):  # a full disk may accept only a part first
            done += os.write(file, piece[done:])
    return len(data)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable: files made, renamed or removed in it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name in the same folder, durably."""
    os.replace(old, new)
    sync_folder(new.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
