"""`open_source`: the right source for a path, by its suffix, or for a generator's name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convmesh.data.generators.catalogue_of_generators import generated, is_generator
from convmesh.data.sources.array_source import ArraySource, ListedSamples, Samples, StackedSamples
from convmesh.data.sources.image_folder import ImageFolder
from convmesh.data.sources.source import Source
from convmesh.data.sources.torch_source import TorchSource
from convmesh.data.stored.blosc_file import BloscArray
from convmesh.data.stored.hdf5_file import hdf5_arrays
from convmesh.data.stored.nifti_file import nifti_array
from convmesh.data.stored.npy_file import npy_array
from convmesh.data.stored.stored_array import StoredArray
from convmesh.data.stored.zarr_folder import is_zarr, zarr_arrays
from convmesh.errors import DataError, DataWarning
from convmesh.layout import Box, Span

SINGLE = {".npy": npy_array, ".b2nd": BloscArray, ".nii": nifti_array, ".nii.gz": nifti_array}
"""Formats of one array a file."""
MOST_AMPLIFICATION = 1.5
"""Above this many bytes read for each byte of a half sample, a conversion is advised."""


def open_source(
    path_or_spec: Any,
    *,
    inputs: str = "inputs",
    targets: str = "targets",
    add_channel: bool | None = None,
    size: tuple[int, int] | None = None,
    check_finite: bool = True,
) -> Source:
    """The samples of a file, a folder, a generator (`"cosmology:size=32,samples=512"`) or a torch Dataset.

    In HDF5 and Zarr, `inputs` and `targets` name datasets. In a folder they name folders with a file per sample (.nii,
    .nii.gz, .npy, .b2nd), matched in the order of their names; a folder without them is read as images, a folder per
    class. For a lone .npy or .b2nd file, `targets` is another such file, by default `NAME.targets.npy`. `add_channel`
    gives samples without a channel dim one; NIfTI volumes get theirs by themselves.
    """
    if not isinstance(path_or_spec, (str, Path)):
        return TorchSource(path_or_spec, check_finite)
    if is_generator(str(path_or_spec)):
        return generated(str(path_or_spec))
    path = Path(path_or_spec)
    if not path.exists():
        raise DataError(f"`path_or_spec` (={str(path_or_spec)!r}): there is no such file or folder.")
    if path.is_dir() and not is_zarr(path) and not (path / inputs).is_dir():
        return ImageFolder(path, size, check_finite)
    pair = _samples(path, inputs, targets, add_channel)
    source = ArraySource(str(path), *pair, check_finite=check_finite)
    _warn_of_cost(source)
    return source


def _samples(path: Path, inputs: str, targets: str, add_channel: bool | None) -> tuple[Samples, Samples]:
    if suffix_of(path) in SINGLE:
        other = path.with_name(targets) if suffix_of(Path(targets)) in SINGLE else _beside(path, targets)
        return StackedSamples(single(path), bool(add_channel)), StackedSamples(single(other))
    if path.is_dir() and not is_zarr(path):
        return listed(path / inputs, add_channel), listed(path / targets, False)
    arrays = named_arrays(path)
    return (
        StackedSamples(_named(path, arrays, "inputs", inputs), bool(add_channel)),
        StackedSamples(_named(path, arrays, "targets", targets)),
    )


def suffix_of(path: Path) -> str:
    return ".nii.gz" if path.name.endswith(".nii.gz") else path.suffix.lower()


def _beside(path: Path, targets: str) -> Path:
    return path.with_name(f"{path.name.removesuffix(path.suffix)}.{targets}{path.suffix}")


def single(path: Path) -> StoredArray:
    """The array of a file that holds one."""
    if not path.exists():
        raise DataError(f"there is no {path}; name it with `inputs` or `targets`.")
    return SINGLE[suffix_of(path)](path)


def listed(folder: Path, add_channel: bool | None) -> ListedSamples:
    """The files of a folder, one per sample, in the order of their names."""
    files = sorted(f for f in folder.iterdir() if suffix_of(f) in SINGLE) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} has no files of samples; they end in {', '.join(SINGLE)}.")
    arrays = [single(file) for file in files]
    volumes = suffix_of(files[0]).startswith(".nii") and len(arrays[0].shape) == 3
    return ListedSamples(arrays, volumes if add_channel is None else add_channel)


def named_arrays(path: Path) -> dict[str, StoredArray]:
    """All arrays of an HDF5 or Zarr file by name."""
    if is_zarr(path):
        return zarr_arrays(path)
    if path.suffix.lower() in (".h5", ".hdf5", ".he5", ".nc"):
        return hdf5_arrays(path)
    known = ", ".join((".h5", ".hdf5", ".zarr", *SINGLE))
    raise DataError(
        f"`path_or_spec` (={str(path)!r}) ends in {path.suffix!r}, which is not read; formats are {known}, and folders "
        "of images. `convmesh data convert` reads .npz too."
    )


def _named(path: Path, arrays: Mapping[str, StoredArray], argument: str, name: str) -> StoredArray:
    if name not in arrays:
        there = ", ".join(f"{key} {array.shape}" for key, array in arrays.items()) or "none"
        raise DataError(f"`{argument}` (={name!r}) names no dataset of {path}; its datasets are: {there}.")
    return arrays[name]


def _warn_of_cost(source: ArraySource) -> None:
    """Warn if half a sample along its first dim of space costs much more than half its bytes."""
    shape = source.input.shape
    half = Box((Span(0, shape[0]), Span(0, -(-shape[1] // 2)), *(Span(0, n) for n in shape[2:])))
    array, there = source.inputs.at(0, half)
    needed, read = half.size * source.input.dtype.itemsize, array.bytes_to_read(there)
    if len(shape) > 2 and read > MOST_AMPLIFICATION * needed and array.storage != "gzip":
        warnings.warn(
            f"{array.name} lies in {array.storage}: a rank that needs half a sample reads {read / needed:.1f} times "
            f"the bytes. `convmesh data convert {source} NEW.h5` writes it so that ranks read their parts only.",
            DataWarning,
            stacklevel=3,
        )
