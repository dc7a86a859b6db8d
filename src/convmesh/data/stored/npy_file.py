"""NumPy's .npy files."""

from __future__ import annotations

import sys
from pathlib import Path
from tokenize import TokenError

import numpy as np

from convmesh.data.stored.plain_file import PlainArray
from convmesh.data.stored.stored_array import StoredArray
from convmesh.errors import DataError


def npy_array(path: Path) -> StoredArray:
    """The array of a .npy file; its header is read now, its values on request."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, in_columns, dtype = read(file)
            offset = file.tell()
    except (OSError, ValueError, TypeError, SyntaxError, RecursionError, TokenError, MemoryError) as error:
        raise DataError(f"{path} is not a readable .npy file: {error}.") from error
    if dtype.hasobject:
        raise DataError(f"{path} holds Python objects, which are not read; save numbers.")
    if not all(0 <= extent <= sys.maxsize for extent in shape):
        raise DataError(f"{path} has shape {tuple(shape)} in its header; extents must be from 0 to {sys.maxsize}.")
    if in_columns and len(shape) > 1:
        raise DataError(f"{path} is in Fortran order, whose samples are scattered; `np.save(np.ascontiguousarray(a))`.")
    return PlainArray(path, offset, tuple(shape), dtype)
