"""Zarr arrays without compression: only the bytes of a box are read, also out of shards, by no library.

A shard ends with a table of where its chunks begin and how long they are (Zarr v3, "sharding codec", version 1.0).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.stored.plain_file import OpenFile, PlainBlock
from convmesh.data.stored.stored_array import StoredArray, blocks, dims_text, from_corner
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box

_EMPTY = 2**64 - 1
"""Where a chunk begins that is not in its shard."""
_CHECKSUM = 4


@dataclass(frozen=True)
class ZarrGrid:
    """How an array lies in files: a file per outer chunk, cut into inner chunks if it is a shard."""

    outer: tuple[int, ...]
    inner: tuple[int, ...] | None
    prefix: tuple[str, ...]
    """Folders before the numbers of a chunk."""
    separator: str

    def file(self, folder: Path, place: tuple[int, ...]) -> Path:
        numbers = self.separator.join(map(str, place)) if place else "0"
        return folder.joinpath(*self.prefix, numbers)

    def __str__(self) -> str:
        if self.inner is None:
            return f"chunks of {dims_text(self.outer)}"
        return f"chunks of {dims_text(self.inner)} in shards of {dims_text(self.outer)}"


class PlainZarr(StoredArray):
    """One array without compression."""

    def __init__(
        self, folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], grid: ZarrGrid, fill: Any
    ) -> None:
        self.name, self.shape, self.dtype, self.storage = name, shape, dtype, str(grid)
        self._folder, self._grid, self._fill = folder, grid, fill

    def read_into(self, box: Box, out: Array) -> None:
        for place, common in blocks(box, self._grid.outer):
            target = out[common.relative_to(box).slices()]
            file = self._file(self._grid.file(self._folder, place))
            inside = from_corner(common, place, self._grid.outer)
            if file is None:
                target[...] = self._fill
            elif self._grid.inner is None:
                PlainBlock(file, 0, self._grid.outer, self.dtype).read_into(inside, target)
            else:
                self._read_shard(file, self._grid.inner, inside, target)

    def _file(self, path: Path) -> OpenFile | None:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return _opened(path, found.st_ino, found.st_mtime_ns)

    def _read_shard(self, file: OpenFile, inner: tuple[int, ...], box: Box, out: Array) -> None:
        grid = tuple(a // b for a, b in zip(self._grid.outer, inner, strict=True))
        starts = _starts(file, grid, math.prod(inner) * self.dtype.itemsize)
        for place, common in blocks(box, inner):
            target = out[common.relative_to(box).slices()]
            if starts[place] == _EMPTY:
                target[...] = self._fill
            else:
                block = PlainBlock(file, int(starts[place]), inner, self.dtype)
                block.read_into(from_corner(common, place, inner), target)


@lru_cache(maxsize=512)
def _opened(path: Path, *identity: int) -> OpenFile:
    del identity  # a file that was written anew is opened anew
    return OpenFile(path)


@lru_cache(maxsize=4096)
def _starts(file: OpenFile, grid: tuple[int, ...], bytes_chunk: int) -> Any:
    """Where the chunks of a shard begin."""
    count, size = math.prod(grid), os.fstat(file.descriptor).st_size
    table: Array = np.empty((count, 2), np.dtype("<u8"))
    if size < table.nbytes + _CHECKSUM:
        raise _broken(file)
    file.read_into(size - table.nbytes - _CHECKSUM, table)
    present = table[table[:, 0] != _EMPTY]
    last = size - table.nbytes - _CHECKSUM - bytes_chunk
    if np.any(present[:, 1] != bytes_chunk) or np.any(present[:, 0] > last):
        raise _broken(file)
    return table[:, 0].reshape(grid)


def _broken(file: OpenFile) -> DataError:
    return DataError(f"{file.path} is a broken or truncated Zarr shard. Copy or make the file again.")
