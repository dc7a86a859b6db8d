"""Files of samples that somebody else made: values or one clear error, in bounded time, from their own folder alone."""

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convmesh.data import open_source
from convmesh.data.stored.npy_file import npy_array
from convmesh.data.stored.stored_array import StoredArray
from convmesh.data.stored.zarr_folder import zarr_arrays
from convmesh.errors import DataError
from convmesh.layout import Box
from tests.checkpoint.test_hostile_manifests import changed, places

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
    st.sampled_from([1 << 70, "/../../", [0, 4], [-4, 4], ["4"], [[4]], "<f4", "gzip", {"name": "bytes"}]),
)  # fmt: skip
MOST = 1 << 16
"""Elements that a test reads of an array whose header may lie."""


def corner_of(array: StoredArray) -> None:
    """Read a corner, as a rank reads its box."""
    box = Box.whole(tuple(min(extent, 8) for extent in array.shape))
    if box.size <= MOST:
        array.read_into(box, np.empty(box.shape, array.dtype))


def corners_of(arrays: dict[str, StoredArray]) -> None:
    for array in arrays.values():
        corner_of(array)


def succeeds_or_says_why(read: Callable[[], object]) -> None:
    with contextlib.suppress(DataError):
        read()


@pytest.mark.parametrize("version", [2, 3])
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_odd_zarr_metadata(tmp_path: Path, version: Any, data: st.DataObject) -> None:
    folder, kept = tmp_path / f"v{version}.zarr", tmp_path / f"v{version}.json"
    header = folder / ("zarr.json" if version == 3 else ".zarray")
    if not folder.exists():
        made = zarr.create_array(
            folder, shape=(6, 4), chunks=(2, 4), dtype="f4", zarr_format=version, compressors=None
        )  # fmt: skip
        made[...] = 1.0
        kept.write_bytes(header.read_bytes())
    plain = json.loads(kept.read_text())
    place = data.draw(st.sampled_from([each for each in places(plain) if each]))
    header.write_text(json.dumps(changed(copy.deepcopy(plain), place, data.draw(ODD))))
    succeeds_or_says_why(lambda: corners_of(zarr_arrays(folder)))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 127), new=st.binary(min_size=1, max_size=6))
def test_odd_npy_headers(tmp_path: Path, at: int, new: bytes) -> None:
    path = tmp_path / "odd.npy"
    np.save(path, np.ones((3, 4), np.float32))
    written = path.read_bytes()
    path.write_bytes(written[:at] + new + written[at + len(new) :])
    succeeds_or_says_why(lambda: corner_of(npy_array(path)))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 2047), new=st.binary(min_size=1, max_size=4))
def test_odd_hdf5_headers(tmp_path: Path, at: int, new: bytes) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file["inputs"] = np.ones((2, 1, 4, 4), np.float32)
        file["targets"] = np.zeros(2, np.int64)
    written = path.read_bytes()
    path.write_bytes(written[:at] + new + written[at + len(new) :])
    succeeds_or_says_why(lambda: open_source(path).read(0))


@pytest.mark.parametrize("kind", ["external", "virtual"])
def test_values_of_other_folders_are_not_given_away(tmp_path: Path, kind: str) -> None:
    (tmp_path / "theirs").mkdir()
    secret, path = tmp_path / "secret.h5", tmp_path / "theirs" / "samples.h5"
    with h5py.File(secret, "w") as file:
        file["inputs"] = np.ones((2, 4), np.float32)
    with h5py.File(path, "w") as file:
        if kind == "external":
            file.create_dataset("inputs", (2, 4), "f4", external=[(str(secret), 0, 32)])
        else:
            layout = h5py.VirtualLayout((2, 4), "f4")
            layout[...] = h5py.VirtualSource("../secret.h5", "inputs", (2, 4))
            file.create_virtual_dataset("inputs", layout)
        file["targets"] = np.zeros(2, np.int64)
    with pytest.raises(DataError, match="outside of its folder"):
        open_source(path)


def test_virtual_datasets_of_the_same_folder_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["inputs"] = np.ones((2, 1, 4), np.float32)
    with h5py.File(tmp_path / "samples.h5", "w") as file:
        layout = h5py.VirtualLayout((2, 1, 4), "f4")
        layout[...] = h5py.VirtualSource("part.h5", "inputs", (2, 1, 4))
        file.create_virtual_dataset("inputs", layout)
        file["targets"] = np.zeros(2, np.int64)
    assert open_source(tmp_path / "samples.h5").read(1).tolist() == [[1.0] * 4]
