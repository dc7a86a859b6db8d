"""NIfTI volumes: a .nii stores its values in the order z, y, x, so slabs along z are contiguous."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.libraries import library
from convmesh.data.stored.plain_file import PlainArray
from convmesh.data.stored.stored_array import StoredArray
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box


def nifti_array(path: Path) -> StoredArray:
    """The volume of a file as (z, y, x), or (channels, z, y, x)."""
    nibabel = library("nibabel", "reading NIfTI files")
    try:
        proxy = nibabel.load(path).dataobj
        shape, dtype = tuple(reversed(proxy.shape)), np.dtype(proxy.dtype)
        scale = (float(proxy.slope), float(proxy.inter))
    except Exception as error:  # nibabel passes on NumPy's errors about a damaged header
        raise DataError(f"{path} cannot be read as NIfTI: {error}.") from error
    if path.suffix == ".gz":
        return ZippedVolume(path, shape, dtype, scale)
    plain = PlainArray(path, proxy.offset, shape, dtype)
    return plain if scale == (1.0, 0.0) else ScaledVolume(plain, scale)


class ScaledVolume(StoredArray):
    """A volume whose header has a slope and an intercept; values become float32."""

    def __init__(self, stored: StoredArray, scale: tuple[float, float]) -> None:
        self.name, self.shape, self.dtype = stored.name, stored.shape, np.dtype(np.float32)
        self.storage = f"{stored.storage}, scaled"
        self._stored, self._scale = stored, scale

    def read_into(self, box: Box, out: Array) -> None:
        raw: Array = np.empty(box.shape, self._stored.dtype)
        self._stored.read_into(box, raw)
        out[...] = raw.astype(np.float64) * self._scale[0] + self._scale[1]

    def bytes_to_read(self, box: Box) -> int:
        return self._stored.bytes_to_read(box)


class ZippedVolume(StoredArray):
    """A .nii.gz: every read unpacks the whole volume; the last one is kept."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], scale: tuple[float, float]) -> None:
        self.name, self.shape, self.unit, self.storage = str(path), shape, shape, "gzip"
        self.dtype = dtype if scale == (1.0, 0.0) else np.dtype(np.float32)
        self._path = path

    def read_into(self, box: Box, out: Array) -> None:
        out[...] = _unpacked.get(self._path, self.dtype)[box.slices()]


class _LastVolume:
    """The volume that was unpacked last: volumes are often read box by box."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[Path, Array] | None = None

    def get(self, path: Path, dtype: np.dtype[Any]) -> Array:
        with self._lock:
            if self._held is None or self._held[0] != path:
                self._held = (path, _unpack(path, dtype))
            return self._held[1]


def _unpack(path: Path, dtype: np.dtype[Any]) -> Array:
    nibabel = library("nibabel", "reading NIfTI files")
    try:
        values: Array = np.ascontiguousarray(np.asarray(nibabel.load(path).dataobj).T.astype(dtype))
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}. Copy the file again.") from error
    return values


_unpacked = _LastVolume()
