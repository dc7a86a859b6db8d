"""HDF5 files: h5py makes the file with all chunks in place, and every process writes its chunks where they belong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convmesh.data.libraries import library
from convmesh.data.stored.hdf5_file import hdf5_arrays
from convmesh.data.stored.plain_file import PlainArray, PlainChunks
from convmesh.data.stored.stored_array import blocks
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.data.writing.chunking import is_small, slab_chunks
from convmesh.data.writing.sample_writer import Contents, SampleWriter, as_stored, padded, write_at
from convmesh.layout import Box, Span


class Hdf5Writer(SampleWriter):
    """Chunks of one sample or a slab of it, uncompressed; small samples in rows."""

    @classmethod
    def create(cls, path: Path, contents: Contents, attributes: Mapping[str, object]) -> None:
        h5py = library("h5py", "writing HDF5 files")
        with _disk_errors(), h5py.File(path, "w", libver="v110") as file:
            for name, (samples, spec) in contents.items():
                _reserve(h5py, file, name, samples, spec)
            for key, value in attributes.items():
                file.attrs[key] = value if isinstance(value, (int, float, str)) else json.dumps(value)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays = hdf5_arrays(path)

    def write(self, name: str, index: int, values: Array) -> None:
        array = self._arrays[name]
        stored = as_stored(values, array.dtype)[None]
        if isinstance(array, PlainArray):
            write_at(self._path, array.offset + index * stored.nbytes, stored)
            return
        assert isinstance(array, PlainChunks)
        box = Box((Span(index, index + 1), *Box.whole(array.shape[1:]).spans))
        for place, common in blocks(box, array.chunks):
            piece = stored[common.relative_to(box).slices()]
            write_at(self._path, array.offsets[place], padded(piece, array.chunks))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Of a file that cannot be written, HDF5 raises a RuntimeError when it is closed."""
    try:
        yield
    except RuntimeError as error:
        told = re.search(r"errno = (\d+), error message = '([^']*)'", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), told[2]) from error


def _reserve(h5py: Any, file: Any, name: str, samples: int, spec: TensorSpec) -> None:
    """Make a dataset whose chunks are all in place but not written yet."""
    shape = (samples, *spec.shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if not is_small(spec):
        properties.set_chunk((1, *slab_chunks(spec)))
    space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(spec.dtype)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    h5py.h5d.create(file.id, name.encode(), kind, space, properties, lcpl=links)
