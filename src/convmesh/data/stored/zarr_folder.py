"""Zarr v2 and v3, shards included, through the fastest library that is installed.

Metadata is plain JSON and read as such: a library with threads is first touched when values are read, after any fork.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.libraries import library
from convmesh.data.stored.stored_array import PerProcess, StoredArray, dims_text
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box

_used_by: list[int] = []
"""The processes, from the first ancestor on, that read through tensorstore, whose threads do not survive a fork."""


def zarr_arrays(path: Path) -> dict[str, StoredArray]:
    """All numeric arrays of a Zarr group by name; of a lone array, the array by the name of its folder."""
    found: dict[str, StoredArray] = {}
    for folder in _array_folders(path):
        name = str(folder.relative_to(path)) if folder != path else path.stem
        array = ZarrArray(folder, f"{path}:{name}")
        if array.dtype.kind in "biuf":
            found[name] = array
    return found


def is_zarr(path: Path) -> bool:
    return any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray"))


def _array_folders(path: Path) -> Iterator[Path]:
    """Arrays below `path`; folders of chunks are not searched."""
    if (path / ".zarray").exists() or _metadata(path / "zarr.json").get("node_type") == "array":
        yield path
        return
    for child in sorted(path.iterdir()):
        if child.is_dir() and is_zarr(child):
            yield from _array_folders(child)


def _metadata(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return read
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not readable Zarr metadata: {error}.") from error


class ZarrArray(StoredArray):
    """One array; the smallest readable block is a chunk, or a chunk within a shard."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder
        third = _metadata(folder / "zarr.json")
        described = third or _metadata(folder / ".zarray")
        try:
            self.shape = tuple(described["shape"])
            self.dtype = np.dtype(described["data_type"] if third else described["dtype"])
            self.unit, self.storage = _third_chunks(described) if third else _second_chunks(described)
        except (KeyError, TypeError) as error:
            raise DataError(f"{folder} has Zarr metadata of an unknown kind: {error}.") from error
        self._version = 3 if third else 2
        self._reader = PerProcess(self._opened)

    def _opened(self) -> Any:
        if importlib.util.find_spec("tensorstore") and (not _used_by or _used_by[0] == os.getpid()):
            _used_by[:] = [os.getpid()]
            return self._in_tensorstore(library("tensorstore", "reading Zarr files"))
        zarr = library("zarr", "reading Zarr files")
        if importlib.util.find_spec("zarrs"):
            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        return zarr.open_array(str(self._folder), mode="r")

    def _in_tensorstore(self, tensorstore: Any) -> Any:
        spec = {
            "driver": "zarr3" if self._version == 3 else "zarr",
            "kvstore": {"driver": "file", "path": str(self._folder)},
        }
        return tensorstore.open(spec, open=True, read=True).result()

    def read_into(self, box: Box, out: Array) -> None:
        try:
            reader = self._reader.get()
            part = reader[box.slices()]
            out[...] = part.read().result() if hasattr(part, "read") else part
        except (ValueError, OSError, RuntimeError) as error:
            told = str(error).split(" [")[0].rstrip(".")
            raise DataError(f"{self.name} cannot be read: {told}. Copy or make the file again.") from error


def _third_chunks(described: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    outer = tuple(described["chunk_grid"]["configuration"]["chunk_shape"])
    sharding = next((c for c in described["codecs"] if c["name"] == "sharding_indexed"), None)
    if sharding is None:
        return outer, f"chunks of {dims_text(outer)}"
    inner = tuple(sharding["configuration"]["chunk_shape"])
    return inner, f"chunks of {dims_text(inner)} in shards of {dims_text(outer)}"


def _second_chunks(described: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    chunks = tuple(described["chunks"])
    return chunks, f"chunks of {dims_text(chunks)}"
