"""HDF5: h5py finds the chunks, and threads read and decode them without HDF5's lock."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convmesh.data.libraries import library
from convmesh.data.stored.plain_file import OpenFile, PlainArray, PlainChunks
from convmesh.data.stored.stored_array import PerProcess, StoredArray, blocks, dims_text, from_corner
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box

_DEFLATE, _SHUFFLE = 1, 2
"""HDF5's numbers of the filters that are decoded here; others are left to HDF5."""


class StoredChunk(NamedTuple):
    """Where a chunk lies, and which filters were skipped when it was written."""

    offset: int
    stored_bytes: int
    skipped: int


def hdf5_arrays(path: Path) -> dict[str, StoredArray]:
    """All numeric datasets of a file by name."""
    h5py = library("h5py", "reading HDF5 files")
    arrays: dict[str, StoredArray] = {}
    try:
        with h5py.File(path, "r") as file:
            file.visititems(lambda name, item: _add(arrays, path, name, item, h5py))
    except DataError:
        raise
    except Exception as error:  # any of HDF5's tables may be missing in a damaged file
        raise DataError(f"{path} cannot be read as HDF5: {error}.") from error
    return arrays


def _add(found: dict[str, StoredArray], path: Path, name: str, item: Any, h5py: Any) -> None:
    if isinstance(item, h5py.Dataset) and item.shape is not None and item.dtype.kind in "biuf":
        found[name] = _array(path, f"{path}:{name}", item)


def _array(path: Path, name: str, dataset: Any) -> StoredArray:
    filters = _filters(dataset)
    _check_inside(path, name, dataset)
    plain = not dataset.is_virtual and dataset.external is None
    if plain and dataset.chunks is None and (offset := dataset.id.get_offset()) is not None:
        return PlainArray(path, offset, dataset.shape, dataset.dtype, name)
    if plain and dataset.chunks is not None and set(filters) <= {_DEFLATE, _SHUFFLE}:
        return _chunked(path, name, dataset, filters)
    return LockedDataset(path, name, dataset)


def _check_inside(path: Path, name: str, dataset: Any) -> None:
    """A file may keep its values in others; refuse those outside of its folder, which it must not expose."""
    named = [file for file, *_ in dataset.external or ()]
    if dataset.is_virtual:
        named += [source.file_name for source in dataset.virtual_sources() if source.file_name != "."]
    folder = path.resolve().parent
    for file in named:
        if not (folder / file).resolve().is_relative_to(folder):
            raise DataError(f"{name} has values in {file!r}, outside of its folder; copy them into one file.")


def _filters(dataset: Any) -> list[int]:
    properties = dataset.id.get_create_plist()
    return [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]


def _chunked(path: Path, name: str, dataset: Any, filters: list[int]) -> StoredArray:
    table: dict[tuple[int, ...], StoredChunk] = {}

    def add(info: Any) -> None:
        place = tuple(at // extent for at, extent in zip(info.chunk_offset, dataset.chunks, strict=True))
        table[place] = StoredChunk(info.byte_offset, info.size, info.filter_mask)

    dataset.id.chunk_iter(add)
    if filters:
        return CompressedChunks(path, name, dataset, filters, table)
    plain = PlainChunks(path, name, Box.whole(dataset.shape), dataset.chunks, dataset.dtype)
    plain.offsets = {place: chunk.offset for place, chunk in table.items()}
    plain.fill = dataset.fillvalue
    return plain


class CompressedChunks(StoredArray):
    """Chunks that are deflated, shuffled or both: read whole, decoded by threads."""

    def __init__(
        self, path: Path, name: str, dataset: Any, filters: Sequence[int], table: dict[tuple[int, ...], StoredChunk]
    ) -> None:
        self.name, self.shape, self.dtype = name, dataset.shape, dataset.dtype
        self.unit: tuple[int, ...] = dataset.chunks
        self.storage = f"compressed chunks of {dims_text(self.unit)}"
        self.fill, self._filters, self._table, self._path = dataset.fillvalue, tuple(filters), table, path
        self._open = PerProcess(self._opened)

    def _opened(self) -> tuple[OpenFile, ThreadPoolExecutor]:
        return OpenFile(self._path), ThreadPoolExecutor(os.cpu_count() or 1, "convmesh-chunks")

    def read_into(self, box: Box, out: Array) -> None:
        file, threads = self._open.get()
        work = [threads.submit(self._put, file, *met, box, out) for met in blocks(box, self.unit or ())]
        for part in work:
            part.result()

    def _put(self, file: OpenFile, place: tuple[int, ...], common: Box, box: Box, out: Array) -> None:
        target = out[common.relative_to(box).slices()]
        chunk = self._table.get(place)
        if chunk is None:
            target[...] = self.fill
            return
        assert self.unit is not None
        target[...] = self._decoded(file, chunk)[from_corner(common, place, self.unit).slices()]

    def _decoded(self, file: OpenFile, chunk: StoredChunk) -> Array:
        raw: Any = np.empty(chunk.stored_bytes, np.uint8)
        file.read_into(chunk.offset, raw)
        try:
            for position, kind in reversed(list(enumerate(self._filters))):
                if not chunk.skipped >> position & 1:
                    raw = zlib.decompress(raw) if kind == _DEFLATE else self._unshuffled(raw)
            return np.frombuffer(raw, self.dtype).reshape(self.unit or ())
        except (zlib.error, ValueError) as error:
            raise DataError(
                f"{self.name} has a broken chunk at byte {chunk.offset}: {error}. Copy or make the file again."
            ) from error

    def _unshuffled(self, raw: Any) -> Any:
        planes = np.frombuffer(raw, np.uint8).reshape(self.dtype.itemsize, -1)
        values: Array = np.empty(planes.shape[::-1], np.uint8)
        for at, plane in enumerate(planes):  # several times faster than copying the transpose
            values[:, at] = plane
        return values.reshape(-1)


class LockedDataset(StoredArray):
    """Any other dataset, through HDF5 itself: one thread at a time."""

    def __init__(self, path: Path, name: str, dataset: Any) -> None:
        self.name, self.shape, self.dtype, self.unit = name, dataset.shape, dataset.dtype, dataset.chunks
        self.storage = "read through HDF5" + (f" in chunks of {dims_text(self.unit)}" if self.unit else "")
        self._path, self._inner = path, dataset.name
        self._dataset = PerProcess(self._opened)

    def _opened(self) -> Any:
        h5py = library("h5py", "reading HDF5 files")
        # The cache must hold a whole chunk; otherwise HDF5 decodes it again for every row.
        return h5py.File(self._path, "r", rdcc_nbytes=64 * 2**20)[self._inner]

    def read_into(self, box: Box, out: Array) -> None:
        try:
            out[...] = self._dataset.get()[box.slices()]
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}. Copy or make the file again.") from error
