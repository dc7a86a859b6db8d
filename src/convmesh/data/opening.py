"""`open_source`: the right source for a path, by its suffix, or for a generator's name."""

from __future__ import annotations

import difflib
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
from convmesh.errors import DataError

SINGLE = {".npy": npy_array, ".b2nd": BloscArray, ".nii": nifti_array, ".nii.gz": nifti_array}
"""Formats with one array per file."""


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

    In HDF5 and Zarr, `inputs` and `targets` name datasets. In a folder they name folders with one file per sample
    (.nii, .nii.gz, .npy, .b2nd), matched in the order of their names; a folder without them is read as images, one
    folder per class. For a lone .npy or .b2nd file, `targets` is another such file, by default `NAME.targets.npy`.
    `add_channel` adds a channel dim to samples without one; NIfTI volumes get theirs automatically.
    """
    if not isinstance(path_or_spec, (str, Path)):
        return TorchSource(path_or_spec, check_finite)
    if is_generator(str(path_or_spec)):
        return generated(str(path_or_spec))
    path = existing(Path(path_or_spec))
    if path.is_dir() and not is_zarr(path) and not (path / inputs).is_dir():
        return ImageFolder(path, size, check_finite)
    pair = _samples(path, inputs, targets, add_channel)
    return ArraySource(str(path), *pair, check_finite=check_finite)


def _samples(path: Path, inputs: str, targets: str, add_channel: bool | None) -> tuple[Samples, Samples]:
    if suffix_of(path) in SINGLE:
        return StackedSamples(single(path), bool(add_channel)), StackedSamples(single(beside(path, targets)))
    if path.is_dir() and not is_zarr(path):
        return listed(path / inputs, add_channel), listed(path / targets, False)
    arrays = named_arrays(path)
    return (
        StackedSamples(_named(path, arrays, "inputs", inputs), bool(add_channel)),
        StackedSamples(_named(path, arrays, "targets", targets)),
    )


def existing(path: Path) -> Path:
    """A path that is there."""
    if not path.exists():
        raise DataError(f"{str(path)!r}: there is no such file or folder{_near(path) or '.'}")
    return path


def _near(path: Path) -> str:
    """The name next to `path` that may have been meant."""
    there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, 1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def suffix_of(path: Path) -> str:
    return ".nii.gz" if path.name.endswith(".nii.gz") else path.suffix.lower()


def beside(path: Path, targets: str) -> Path:
    """The file of targets that goes with a lone file of inputs."""
    if suffix_of(Path(targets)) in SINGLE:
        return path.with_name(targets)
    return path.with_name(f"{path.name.removesuffix(path.suffix)}.{targets}{path.suffix}")


def single(path: Path) -> StoredArray:
    """The array of a file that holds just one."""
    if not path.exists():
        raise DataError(f"there is no {path}; name it with `inputs` or `targets`.")
    return SINGLE[suffix_of(path)](path)


def has_files(folder: Path) -> bool:
    """Whether a folder holds one file per sample."""
    return bool(_files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if suffix_of(f) in SINGLE) if folder.is_dir() else []


def listed(folder: Path, add_channel: bool | None) -> ListedSamples:
    """The files of a folder, one per sample, in the order of their names."""
    files = _files(folder)
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
        f"{str(path)!r} ends in {path.suffix!r}, which is not read; formats are {known}, and folders of them or of "
        f"images.{' `convmesh data convert` turns .npz into one of these.' if path.suffix == '.npz' else ''}"
    )


def _named(path: Path, arrays: Mapping[str, StoredArray], argument: str, name: str) -> StoredArray:
    if name not in arrays:
        there = ", ".join(f"{key} {array.shape}" for key, array in arrays.items()) or "none"
        raise DataError(f"`{argument}` (={name!r}) names no dataset of {path}; its datasets are: {there}.")
    return arrays[name]
