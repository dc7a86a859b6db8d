"""Values stored in a file as they are in memory: only the bytes of a box are read, straight into its buffer.

Long runs of bytes are read with `preadv`, which does not hold Python's lock; boxes of many short runs are copied
from a memory map. npy, uncompressed HDF5 and Zarr, and NIfTI files are all read here.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.stored.stored_array import PerProcess, StoredArray, blocks, dims_text, from_corner
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box

_BYTES_LONG_RUN = 16 * 1024
"""Runs of at least this length are read one by one: below it a call costs more than a map's page faults."""


class OpenFile:
    """A file descriptor and, once it is needed, a memory map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be opened: {error.strerror}.") from error
        self.size = os.fstat(self.descriptor).st_size
        self._map: mmap.mmap | None = None

    def mapped(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        return self._map

    def read_into(self, offset: int, out: Array) -> None:
        """Fill `out`, which is contiguous, with the bytes from `offset` on."""
        self.fill(offset, memoryview(out.reshape(-1).view(np.uint8).data))

    def fill(self, offset: int, view: memoryview) -> None:
        """Fill a view of bytes; the kernel may return fewer at a time than requested."""
        while view:
            count = os.preadv(self.descriptor, [view], offset)
            if count == 0:
                raise truncated(str(self.path), offset, len(view))
            view, offset = view[count:], offset + count

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def truncated(name: str, offset: int, count: int) -> DataError:
    return DataError(
        f"{name} is truncated: it ends before byte {offset + count}, where its last values should be. Copy or make "
        "the file again."
    )


class PlainBlock:
    """A C-ordered array of `shape` at `offset` of a file."""

    def __init__(self, file: OpenFile, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.file, self.offset, self.shape, self.dtype = file, offset, shape, dtype

    def read_into(self, box: Box, out: Array) -> None:
        if box.size == 0:
            return
        count = math.prod(self.shape) * self.dtype.itemsize
        if self.offset + count > self.file.size:  # reading past the end of a map would kill this process
            raise truncated(str(self.file.path), self.offset, count)
        run = _run_dim(box, self.shape)
        bytes_run = math.prod(box.shape[run:]) * self.dtype.itemsize
        direct = out.dtype == self.dtype and self.dtype.isnative and out[(0,) * run].flags.c_contiguous
        if direct and bytes_run >= _BYTES_LONG_RUN:
            self._read_runs(box, out, run)
        else:
            whole: Array = np.ndarray(self.shape, self.dtype, self.file.mapped(), self.offset)
            out[...] = whole[box.slices()]

    def _read_runs(self, box: Box, out: Array, run: int) -> None:
        """Read run after run; there may be thousands, so the loop contains only the call itself."""
        offsets = self._offsets(box, run)
        if out.flags.c_contiguous:
            flat = memoryview(out.reshape(-1).view(np.uint8).data)
            count = len(flat) // len(offsets)
            for number, offset in enumerate(offsets):
                self.file.fill(offset, flat[number * count : (number + 1) * count])
        else:
            for place, offset in zip(np.ndindex(*box.shape[:run]), offsets, strict=True):
                self.file.read_into(offset, out[place])

    def _offsets(self, box: Box, run: int) -> list[int]:
        """Where the runs of a box begin in the file, in order."""
        strides = [self.dtype.itemsize]
        for extent in self.shape[:0:-1]:
            strides.insert(0, strides[0] * extent)
        offsets = [self.offset + sum(span.start * stride for span, stride in zip(box.spans, strides, strict=True))]
        for extent, stride in zip(box.shape[:run], strides, strict=False):
            if extent > 1:
                offsets = [offset + index * stride for offset in offsets for index in range(extent)]
        return offsets


def _run_dim(box: Box, shape: tuple[int, ...]) -> int:
    """The dim from which on the box is one run of the array: all later dims are whole."""
    run = len(shape)
    while run > 0 and (run == len(shape) or box.shape[run] == shape[run]):
        run -= 1
    return run


class PlainArray(StoredArray):
    """One C-ordered array in one file."""

    def __init__(
        self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], name: str | None = None
    ) -> None:
        self.name, self.shape, self.dtype = name or str(path), shape, dtype
        self._path, self.offset = path, offset
        self._file = PerProcess(self._open)

    def _open(self) -> OpenFile:
        return OpenFile(self._path)

    def read_into(self, box: Box, out: Array) -> None:
        PlainBlock(self._file.get(), self.offset, self.shape, self.dtype).read_into(box, out)


class PlainChunks(StoredArray):
    """Chunks without compression at known offsets of one file; a chunk without one holds the fill value."""

    def __init__(self, path: Path, name: str, whole: Box, chunks: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.shape, self.dtype = name, whole.shape, dtype
        self.storage = f"chunks of {dims_text(chunks)}"
        self.chunks = chunks
        self.offsets: Mapping[tuple[int, ...], int] = {}
        self.fill: Any = 0
        self._path = path
        self._file = PerProcess(self._open)

    def _open(self) -> OpenFile:
        return OpenFile(self._path)

    def read_into(self, box: Box, out: Array) -> None:
        file = self._file.get()
        for place, common in blocks(box, self.chunks):
            target = out[common.relative_to(box).slices()]
            if place not in self.offsets:
                target[...] = self.fill
                continue
            block = PlainBlock(file, self.offsets[place], self.chunks, self.dtype)
            block.read_into(from_corner(common, place, self.chunks), target)
