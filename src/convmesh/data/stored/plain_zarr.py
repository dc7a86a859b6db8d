"""Uncompressed Zarr arrays: only the bytes of a box are read, even from shards, without a library.

A shard ends with a table of where its chunks begin and how long they are (Zarr v3, "sharding codec", version 1.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.stored.plain_file import OpenFile, PlainBlock
from convmesh.data.stored.stored_array import PerProcess, StoredArray, blocks, dims_text, from_corner
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box

_EMPTY = 2**64 - 1
"""The offset of a chunk that is not in its shard."""
_CHECKSUM = 4
_MOST_OPEN = 256
"""Files of one array that may stay open."""


@dataclass(frozen=True)
class ZarrGrid:
    """How an array is stored in files: one file per outer chunk, cut into inner chunks if it is a shard."""

    outer: tuple[int, ...]
    inner: tuple[int, ...] | None
    prefix: tuple[str, ...]
    """Folders before a chunk's numbers."""
    separator: str

    def file(self, folder: Path, place: tuple[int, ...]) -> Path:
        numbers = self.separator.join(map(str, place)) if place else "0"
        return folder.joinpath(*self.prefix, numbers)

    def __str__(self) -> str:
        if self.inner is None:
            return f"chunks of {dims_text(self.outer)}"
        return f"chunks of {dims_text(self.inner)} in shards of {dims_text(self.outer)}"


class PlainZarr(StoredArray):
    """One uncompressed array."""

    def __init__(
        self, folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], grid: ZarrGrid, fill: Any
    ) -> None:
        self.name, self.shape, self.dtype, self.storage = name, shape, dtype, str(grid)
        self._folder, self._grid, self._fill = folder, grid, fill
        self._files: PerProcess[dict[tuple[int, ...], OpenFile]] = PerProcess(dict)

    def read_into(self, box: Box, out: Array) -> None:
        for place, common in blocks(box, self._grid.outer):
            target = out[common.relative_to(box).slices()]
            file = self._file(place)
            inside = from_corner(common, place, self._grid.outer)
            if file is None:
                target[...] = self._fill
            elif self._grid.inner is None:
                PlainBlock(file, 0, self._grid.outer, self.dtype).read_into(inside, target)
            else:
                self._read_shard(file, self._grid.inner, inside, target)

    def _file(self, place: tuple[int, ...]) -> OpenFile | None:
        """The file of an outer chunk, or None if there is none; the latest files stay open."""
        opened = self._files.get()
        file = opened.get(place)
        if file is None and (path := self._grid.file(self._folder, place)).exists():
            file = opened[place] = OpenFile(path)
            for oldest in list(opened)[:-_MOST_OPEN]:  # a list, since other threads open files too
                opened.pop(oldest, None)
        return file

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


@lru_cache(maxsize=_MOST_OPEN)
def _starts(file: OpenFile, grid: tuple[int, ...], bytes_chunk: int) -> Any:
    """Where the chunks of a shard begin."""
    count, size = math.prod(grid), file.size
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
