"""File-system operations as a list, and the folder that a crash after any of them leaves behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convmesh.checkpoint import durable

Operation = tuple[str, Path, Any]


class Recorder:
    """Stands in for `os` and `shutil` in `durable`: does the work and writes it down."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._paths: dict[int, Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        file = os.open(path, flags, mode)
        self._paths[file] = path
        if flags & os.O_CREAT:
            self.operations.append(("create", path, None))
        return file

    def write(self, file: int, data: memoryview) -> int:
        count = os.write(file, data)
        self.operations.append(("write", self._paths[file], bytes(data[:count])))
        return count

    def fsync(self, file: int) -> None:
        os.fsync(file)
        self.operations.append(("sync", self._paths[file], None))

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)
        self.operations.append(("rename", old, new))

    def rmtree(self, folder: Path) -> None:
        self.operations += [("unlink", path, None) for path in sorted(folder.iterdir())]
        shutil.rmtree(folder)
        self.operations.append(("rmdir", folder, None))


@contextmanager
def recording() -> Iterator[list[Operation]]:
    recorder: Any = Recorder()
    durable.os, durable.shutil = recorder, recorder  # type: ignore[attr-defined]
    try:
        yield recorder.operations
    finally:
        durable.os, durable.shutil = os, shutil  # type: ignore[attr-defined]


def replay(operations: list[Operation], old: Path, new: Path, kept: float) -> bool:
    """Do `operations` of folder `old` in folder `new`, then lose the power: of files that were not synchronised, the
    disk has the first part (`kept`). Return whether there are any."""
    loose: dict[Path, int] = {}
    for kind, path, more in operations:
        here = new / path.relative_to(old)
        if kind == "create":
            here.parent.mkdir(exist_ok=True)
            here.write_bytes(b"")
            loose[here] = 0
        elif kind == "write":
            with here.open("ab") as file:
                file.write(more)
            loose[here] += len(more)
        elif kind == "sync":
            loose.pop(here, None)
        elif kind == "rename":
            here.replace(new / more.relative_to(old))
        elif kind == "unlink":
            here.unlink()
        else:
            here.rmdir()
    for file_path, size in loose.items():
        if file_path.exists():
            os.truncate(file_path, int(size * kept))
    return bool(loose)
