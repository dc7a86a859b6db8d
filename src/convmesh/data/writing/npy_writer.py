"""NumPy files: `inputs` in NAME.npy, other arrays next to it in NAME.OTHER.npy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from convmesh.data.stored.npy_file import npy_array
from convmesh.data.stored.plain_file import PlainArray
from convmesh.data.tensor_spec import Array
from convmesh.data.writing.sample_writer import Contents, SampleWriter, as_stored, reserve, write_at


class NpyWriter(SampleWriter):
    """A folder of .npy files while it is being written; each becomes a separate file when finished."""

    @classmethod
    def create(cls, path: Path, contents: Contents, attributes: Mapping[str, object]) -> None:
        del attributes  # the format has no place for them
        path.mkdir()
        for name, (samples, spec) in contents.items():
            file = path / f"{name.replace('/', '.')}.npy"
            with file.open("wb") as opened:
                described = {"descr": spec.dtype.str, "fortran_order": False, "shape": (samples, *spec.shape)}
                np.lib.format.write_array_header_1_0(opened, described)
                start = opened.tell()
            reserve(file, start + samples * spec.bytes_sample)

    def __init__(self, path: Path) -> None:
        self._arrays = {file.name.removesuffix(".npy"): (file, npy_array(file)) for file in path.glob("*.npy")}

    def write(self, name: str, index: int, values: Array) -> None:
        file, array = self._arrays[name.replace("/", ".")]
        assert isinstance(array, PlainArray)
        stored = as_stored(values, array.dtype)
        write_at(file, array.offset + index * stored.nbytes, stored)
