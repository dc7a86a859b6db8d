"""Files that are being written: under another name until they are complete, with a list of what is done.

The list makes a stopped job resumable: the same job continues where it stopped, another one starts afresh.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from convmesh.data.writing.hdf5_writer import Hdf5Writer
from convmesh.data.writing.npy_writer import NpyWriter
from convmesh.data.writing.sample_writer import Contents, SampleWriter
from convmesh.data.writing.zarr_writer import ZarrWriter
from convmesh.errors import DataError

WRITERS: dict[str, type[SampleWriter]] = {
    ".h5": Hdf5Writer,
    ".hdf5": Hdf5Writer,
    ".zarr": ZarrWriter,
    ".npy": NpyWriter,
}


class Unfinished:
    """A file on its way to `path`."""

    def __init__(self, path: Path, contents: Contents, attributes: Mapping[str, object]) -> None:
        self.path, self.writer = path, writer_of(path)
        if path.exists():
            raise DataError(f"`out` (={str(path)!r}) exists; remove it, or write to another path.")
        if not path.parent.is_dir():
            raise DataError(f"`out` (={str(path)!r}): there is no folder {path.parent}; make it first.")
        self.part = path.with_name(f"{path.name}.incomplete")
        self._list = path.with_name(f"{path.name}.incomplete.list")
        shapes = {name: [count, spec.shape, spec.dtype.str] for name, (count, spec) in contents.items()}
        self._job = json.dumps({"contents": shapes, "attributes": dict(attributes)}, sort_keys=True)
        self.done = self._resumed()
        if self.done is None:
            self._begin(contents, attributes)

    def _resumed(self) -> set[int] | None:
        """The samples that an earlier run of the same job wrote; None if there is nothing to resume."""
        if not self.part.exists() or not self._list.exists():
            return None
        job, *lines = self._list.read_text(encoding="utf-8").split("\n")
        return {int(line) for line in lines[:-1]} if job == self._job else None

    def _begin(self, contents: Contents, attributes: Mapping[str, object]) -> None:
        with self.told():
            remove(self.part)
            try:
                self.writer.create(self.part, contents, attributes)
            except OSError:
                remove(self.part)
                raise
            self._list.write_text(f"{self._job}\n", encoding="utf-8")
        self.done = set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """What a disk refuses is a message; what is written already stays, for the same job to go on with."""
        try:
            yield
        except OSError as error:
            raise DataError(f"`out` (={str(self.path)!r}) cannot be written: {error.strerror or error}.") from error

    def mark(self, index: int) -> None:
        """Note that a sample is written."""
        with self._list.open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")

    def finish(self) -> None:
        """Give the file its name, once its bytes are on disk."""
        if self.part.is_file():
            _flush(self.part)
        if self.writer is NpyWriter:
            self._spread()
        else:
            os.replace(self.part, self.path)
        _flush(self.path.parent)
        self._list.unlink()

    def _spread(self) -> None:
        """Move .npy files out of their folder, the one with the requested name last."""
        stem = self.path.name.removesuffix(".npy")
        for file in sorted(self.part.glob("*.npy"), key=lambda f: f.name == "inputs.npy"):
            _flush(file)
            os.replace(file, self.path if file.name == "inputs.npy" else self.path.with_name(f"{stem}.{file.name}"))
        self.part.rmdir()


def writer_of(path: Path) -> type[SampleWriter]:
    """The writer for a path's suffix."""
    if path.suffix.lower() not in WRITERS:
        raise DataError(f"`out` (={str(path)!r}) must end in {', '.join(WRITERS)}.")
    return WRITERS[path.suffix.lower()]


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
