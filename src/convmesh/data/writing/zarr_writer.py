"""Zarr v3: one shard per sample, with slabs as its chunks; small samples in one chunk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convmesh.data.libraries import library
from convmesh.data.stored.stored_array import PerProcess
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.data.writing.chunking import is_small, slab_chunks
from convmesh.data.writing.sample_writer import Contents, SampleWriter, as_stored, reserve, write_at


class ZarrWriter(SampleWriter):
    """Shards are files, so processes that write different samples never share one."""

    @classmethod
    def create(cls, path: Path, contents: Contents, attributes: Mapping[str, object]) -> None:
        zarr = library("zarr", "writing Zarr files")
        group = zarr.open_group(str(path), mode="w", zarr_format=3)
        group.attrs.update(attributes)
        for name, (samples, spec) in contents.items():
            _reserve(path, group, name, samples, spec)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._group = PerProcess(self._opened)

    def _opened(self) -> Any:
        return library("zarr", "writing Zarr files").open_group(str(self._path), mode="r+")

    def write(self, name: str, index: int, values: Array) -> None:
        array = self._group.get()[name]
        stored = as_stored(values, array.dtype)
        if array.shards is None:
            write_at(_chunk_file(self._path / name, len(array.shape)), index * stored.nbytes, stored)
        else:
            array[index] = stored


def _reserve(path: Path, group: Any, name: str, samples: int, spec: TensorSpec) -> None:
    shape = (samples, *spec.shape)
    small = is_small(spec)
    chunks = shape if small else (1, *slab_chunks(spec))
    shards = None if small else (1, *(_multiple(n, c) for n, c in zip(spec.shape, chunks[1:], strict=True)))
    group.create_array(name, shape=shape, dtype=spec.dtype, chunks=chunks, shards=shards, compressors=None)
    if small:
        file = _chunk_file(path / name, len(shape))
        file.parent.mkdir(parents=True, exist_ok=True)
        reserve(file, samples * spec.bytes_sample)


def _multiple(extent: int, chunk: int) -> int:
    return -(-extent // chunk) * chunk


def _chunk_file(folder: Path, dims: int) -> Path:
    """The only chunk of an array."""
    return folder.joinpath("c", *["0"] * dims)
