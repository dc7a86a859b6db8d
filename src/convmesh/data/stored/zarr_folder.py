"""Zarr v2 and v3, including shards, through the fastest library that is installed.

Metadata is plain JSON and read as such: a library with threads is first used when values are read, after any fork.
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
from convmesh.data.stored.plain_zarr import PlainZarr, ZarrGrid
from convmesh.data.stored.stored_array import PerProcess, StoredArray
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box

_used_by: list[int] = []
"""The processes, from the first ancestor on, that read through tensorstore, whose threads do not survive a fork."""


def zarr_arrays(path: Path) -> dict[str, StoredArray]:
    """All numeric arrays of a Zarr group by name; a lone array goes by the name of its folder."""
    arrays: dict[str, StoredArray] = {}
    for folder in _array_folders(path):
        name = str(folder.relative_to(path)) if folder != path else path.stem
        array = _array(folder, f"{path}:{name}")
        if array.dtype.kind in "biuf":
            arrays[name] = array
    return arrays


def is_zarr(path: Path) -> bool:
    return any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray"))


def _array_folders(path: Path) -> Iterator[Path]:
    """Arrays below `path`; chunk folders are not searched."""
    if (path / ".zarray").exists() or _metadata(path / "zarr.json").get("node_type") == "array":
        yield path
        return
    for child in sorted(path.iterdir()):
        if child.is_dir() and is_zarr(child):
            yield from _array_folders(child)


def _metadata(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable Zarr metadata: {error}.") from error
    if not isinstance(read, dict):
        raise DataError(f"{path} is not readable Zarr metadata: it must be a JSON object.")
    return read


def _array(folder: Path, name: str) -> StoredArray:
    third = _metadata(folder / "zarr.json")
    described = third or _metadata(folder / ".zarray")
    try:
        shape = tuple(described["shape"])
        dtype = np.dtype(described["data_type"] if third else described["dtype"])
        grid, plain = _third_grid(described) if third else _second_grid(described)
        _check_grid(shape, grid)
        fill = _number(described["fill_value"]) if plain and dtype.kind in "biuf" else None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, SyntaxError) as error:  # NumPy compiles types
        told = f"{type(error).__name__}: {error}"
        raise DataError(f"{folder} has Zarr metadata of an unknown kind ({told}).") from error
    if fill is not None:
        return PlainZarr(folder, name, shape, dtype, grid, fill)
    return ZarrArray(folder, name, shape, dtype, grid, "zarr3" if third else "zarr")


class ZarrArray(StoredArray):
    """One compressed array; the smallest readable block is a chunk, or a chunk within a shard."""

    def __init__(
        self, folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], grid: ZarrGrid, driver: str
    ) -> None:
        self.name, self.shape, self.dtype, self.storage = name, shape, dtype, f"compressed {grid}"
        self.unit = grid.inner or grid.outer
        self._folder, self._driver = folder, driver
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
            "driver": self._driver,
            "kvstore": {"driver": "file", "path": str(self._folder)},
        }
        return tensorstore.open(spec, open=True, read=True).result()

    def read_into(self, box: Box, out: Array) -> None:
        try:
            reader = self._reader.get()
            part = reader[box.slices()]
            out[...] = part.read().result() if hasattr(part, "read") else part
        except Exception as error:  # three libraries and their codecs each fail in their own ways
            told = str(error).split(" [")[0].rstrip(".")
            raise DataError(f"{self.name} cannot be read: {told}. Copy or make the file again.") from error


def _check_grid(shape: tuple[int, ...], grid: ZarrGrid) -> None:
    """Refuse what no writer makes: empty chunks would be searched for ever, and names could leave the folder."""
    for extents, least in ((shape, 0), (grid.outer, 1), (grid.inner or (), 1)):
        if not all(type(extent) is int and least <= extent < 1 << 62 for extent in extents):
            raise ValueError(f"extents {extents} must be whole numbers from {least} on")
    if len(grid.outer) != len(shape) or (grid.inner is not None and len(grid.inner) != len(shape)):
        raise ValueError(f"chunks must have the {len(shape)} dims of the array")
    if grid.inner is not None and any(outer % inner for outer, inner in zip(grid.outer, grid.inner, strict=True)):
        raise ValueError(f"shards of {grid.outer} must be whole numbers of chunks of {grid.inner}")
    if grid.separator not in (".", "/"):
        raise ValueError(f"chunks are named with {grid.separator!r}; it must be '.' or '/'")


def _third_grid(described: dict[str, Any]) -> tuple[ZarrGrid, bool]:
    """How a v3 array is stored in files, and whether its values are stored as they are in memory."""
    outer, codecs = tuple(described["chunk_grid"]["configuration"]["chunk_shape"]), described["codecs"]
    keys = described["chunk_key_encoding"]
    separator = keys.get("configuration", {}).get("separator", "/" if keys["name"] == "default" else ".")
    prefix = ("c",) if keys["name"] == "default" and separator == "/" else ()
    known = keys["name"] == "default" and separator == "/"
    if codecs[0]["name"] != "sharding_indexed":
        return ZarrGrid(outer, None, prefix, separator), known and _are_bytes(codecs)
    inside = codecs[0]["configuration"]
    names = [codec["name"] for codec in inside["index_codecs"]]
    plain = _are_bytes(inside["codecs"]) and names == ["bytes", "crc32c"] and inside.get("index_location") != "start"
    return ZarrGrid(outer, tuple(inside["chunk_shape"]), prefix, separator), known and plain and len(codecs) == 1


def _are_bytes(codecs: list[dict[str, Any]]) -> bool:
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    return len(codecs) == 1 and codecs[0]["name"] == "bytes" and endian == "little"


def _second_grid(described: dict[str, Any]) -> tuple[ZarrGrid, bool]:
    """The same for a v2 array."""
    plain = described["compressor"] is None and not described["filters"] and described["order"] == "C"
    return ZarrGrid(tuple(described["chunks"]), None, (), described.get("dimension_separator", ".")), plain


def _number(fill: Any) -> float:
    return 0.0 if fill is None else float(fill)
