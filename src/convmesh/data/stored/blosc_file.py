"""Blosc2's .b2nd arrays, the format of nnU-Net's preprocessed volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.libraries import library
from convmesh.data.stored.stored_array import PerProcess, StoredArray, dims_text
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box


class BloscArray(StoredArray):
    """One .b2nd file; the smallest readable part is a block of a chunk."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._reader = PerProcess(self._opened)
        opened = self._opened()
        self.shape, self.dtype, self.unit = tuple(opened.shape), np.dtype(opened.dtype), tuple(opened.blocks)
        self.storage = f"blocks of {dims_text(opened.blocks)} in chunks of {dims_text(opened.chunks)}"

    def _opened(self) -> Any:
        blosc2 = library("blosc2", "reading .b2nd files")
        try:
            opened = blosc2.open(str(self._path), mode="r")
            if not isinstance(opened, blosc2.NDArray):
                raise DataError(f"{self._path} holds no array, but a {type(opened).__name__}; save an array.")
            return opened
        except DataError:
            raise
        except Exception as error:  # a damaged file can raise anything, even a SyntaxError
            raise DataError(f"{self._path} cannot be read as .b2nd: {error}.") from error

    def read_into(self, box: Box, out: Array) -> None:
        try:
            out[...] = self._reader.get()[box.slices()]
        except (RuntimeError, ValueError, MemoryError) as error:
            raise DataError(f"{self.name} cannot be read: {error}. Copy or make the file again.") from error
