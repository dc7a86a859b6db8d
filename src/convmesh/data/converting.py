"""`convert`: any readable samples, into a file that ranks can read in part."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from convmesh.data.opening import SINGLE, beside, existing, listed, named_arrays, single, suffix_of
from convmesh.data.sources.array_source import ListedSamples, Samples, StackedSamples
from convmesh.data.stored.stored_array import StoredArray
from convmesh.data.stored.zarr_folder import is_zarr
from convmesh.data.tensor_spec import Array
from convmesh.data.writing.sample_writer import Report, silent
from convmesh.data.writing.unfinished import Unfinished
from convmesh.errors import DataError
from convmesh.layout import Box

BYTES_AT_ONCE = 512 * 2**20
"""Read at most this much at a time; enough that chunks with many samples are decoded once."""


def convert(
    path: Path,
    out: Path,
    *,
    inputs: str = "inputs",
    targets: str = "targets",
    report: Report = silent,
) -> None:
    """Write every array of `path` to `out`; those called `inputs` and `targets` get these names."""
    existing(path)
    renamed = {inputs: "inputs", targets: "targets"}
    arrays = {renamed.get(name, name): samples for name, samples in _found(path, inputs, targets).items()}
    contents = {name: (len(samples), samples.spec) for name, samples in arrays.items()}
    file = Unfinished(out, contents, {"converted_from": path.name})
    writer, done, total = file.writer(file.part), 0, sum(len(samples) for samples in arrays.values())
    for name, samples in arrays.items():
        for first, values in _groups(samples):
            with file.told():
                for index, value in enumerate(values, first):
                    writer.write(name, index, value)
            done += len(values)
            report(done, total)
    with file.told():
        file.finish()


def _found(path: Path, inputs: str, targets: str) -> Mapping[str, Samples]:
    if suffix_of(path) == ".npz":
        return {name: StackedSamples(MemoryArray(f"{path}:{name}", array)) for name, array in _unzipped(path).items()}
    if suffix_of(path).startswith(".nii"):
        volume = single(path)
        return {"inputs": ListedSamples([volume], add_channel=len(volume.shape) == 3)}
    if suffix_of(path) in SINGLE:
        files = {"inputs": path, "targets": beside(path, targets)}
        return {name: StackedSamples(single(file)) for name, file in files.items() if file.exists()}
    if path.is_dir() and not is_zarr(path):
        return _in_folders(path, inputs, targets)
    arrays = {name: StackedSamples(array) for name, array in named_arrays(path).items() if array.shape}
    if not arrays:
        raise DataError(f"{path} has no arrays of numbers.")
    return arrays


def _in_folders(path: Path, inputs: str, targets: str) -> dict[str, Samples]:
    if not (path / inputs).is_dir():
        return {"inputs": listed(path, None)}
    folders: dict[str, Samples] = {"inputs": listed(path / inputs, None)}
    return folders | ({"targets": listed(path / targets, False)} if (path / targets).is_dir() else {})


def _unzipped(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if archive[name].ndim}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as .npz: {error}.") from error


class MemoryArray(StoredArray):
    """An array that is already in memory."""

    def __init__(self, name: str, values: Array) -> None:
        self.name, self.shape, self.dtype, self._values = name, values.shape, values.dtype, values
        self.storage = "memory"

    def read_into(self, box: Box, out: Array) -> None:
        out[...] = self._values[box.slices()]


def _groups(samples: Samples) -> Iterator[tuple[int, Array]]:
    """All samples in order, in groups of a chunk's size; each group with the number of its first sample."""
    for first in range(0, len(samples), step := _step(samples)):
        rows: Array = np.empty((min(step, len(samples) - first), *samples.spec.shape), samples.spec.dtype)
        samples.read_rows(first, rows)
        yield first, rows


def _step(samples: Samples) -> int:
    unit = samples.arrays()[0].unit
    rows = unit[0] if isinstance(samples, StackedSamples) and unit else 1
    return max(1, min(rows, BYTES_AT_ONCE // max(1, samples.spec.bytes_sample)))
