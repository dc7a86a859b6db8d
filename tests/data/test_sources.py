"""Every format gives the same boxes, and bad files are refused in words."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.data import ArraySource, Source, TorchSource, open_source
from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError
from convmesh.layout import Box, Span
from tests.data.volumes import SHAPE, volumes, voxel_labels, write_hdf5

X, LABELS = volumes(3), voxel_labels(3)
POOR = "ignore::convmesh.errors.DataWarning"


def write_zarr(path: Path, version: int, **options: Any) -> Path:
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    for name, values, chunks in (("inputs", X, (1, 2, 4, 5, 9)), ("targets", LABELS, (2, 4, 5, 3))):
        group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype, **options)[...] = values
    return path


def write_shards(path: Path) -> Path:
    import zarr

    group = zarr.open_group(str(path), mode="w")
    for name, values, chunks, shards in (
        ("inputs", X, (1, 2, 4, 5, 9), (1, 2, 12, 10, 9)),
        ("targets", LABELS, (1, 4, 5, 3), (2, 12, 10, 9)),
    ):
        array = group.create_array(
            name, shape=values.shape, chunks=chunks, shards=shards, dtype=values.dtype, compressors=None
        )
        array[...] = values
    return path


def write_npy(path: Path) -> Path:
    np.save(path, X.astype(">f4"))
    np.save(path.with_name(f"{path.stem}.targets.npy"), LABELS)
    return path


def write_blosc(path: Path) -> Path:
    import blosc2

    blosc2.asarray(X, urlpath=str(path), mode="w", chunks=(1, 2, 6, 5, 9), blocks=(1, 1, 6, 5, 9))
    blosc2.asarray(LABELS, urlpath=str(path.with_name(f"{path.stem}.targets.b2nd")), mode="w")
    return path


def write_nifti(path: Path, suffix: str) -> Path:
    import nibabel

    for name, values in (("inputs", X), ("targets", LABELS)):
        (path / name).mkdir(parents=True)
        for index, value in enumerate(values):
            image: Any = nibabel.Nifti1Image(value.T.copy(), np.eye(4))
            nibabel.save(image, path / name / f"{index}{suffix}")
    return path


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, Array]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Array]:
        return torch.from_numpy(X[index]), LABELS[index]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    at = tmp_path_factory.mktemp("sources")
    paths = {
        "contiguous": write_hdf5(at / "a.h5", X, LABELS),
        "chunked": write_hdf5(at / "b.h5", X, LABELS, chunks=(1, 2, 5, 4, 9)),
        "gzip": write_hdf5(at / "c.h5", X, LABELS, chunks=(1, 2, 6, 5, 9), compression="gzip", shuffle=True),
        "lzf": write_hdf5(at / "d.h5", X, LABELS, chunks=(1, 2, 6, 5, 9), compression="lzf"),
        "zarr2": write_zarr(at / "e.zarr", 2),
        "zarr3": write_zarr(at / "f.zarr", 3),
        "plain zarr2": write_zarr(at / "g.zarr", 2, compressors=None),
        "plain zarr3": write_zarr(at / "h.zarr", 3, compressors=None),
        "shards": write_shards(at / "i.zarr"),
        "npy": write_npy(at / "j.npy"),
        "b2nd": write_blosc(at / "k.b2nd"),
        "nii": write_nifti(at / "l", ".nii"),
        "nii.gz": write_nifti(at / "m", ".nii.gz"),
    }
    return {name: open_source(path) for name, path in paths.items()} | {"torch": open_source(Pairs())}


FORMATS = ["contiguous", "chunked", "gzip", "lzf", "zarr2", "zarr3", "plain zarr2", "plain zarr3", "shards", "npy",
           "b2nd", "nii", "nii.gz", "torch"]  # fmt: skip
EXACT = ("contiguous", "chunked", "plain zarr2", "plain zarr3", "shards", "npy", "nii")
"""Formats of which any run of bytes can be read."""


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: Span(*sorted(pair))) for n in shape]
    return st.tuples(*spans).map(Box)


@pytest.mark.filterwarnings(POOR)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20)
@given(box=boxes(SHAPE), index=st.integers(0, 2))
def test_a_box_is_that_of_the_whole(name: str, box: Box, index: int, sources: dict[str, Source]) -> None:
    source = sources[name]
    assert (len(source), source.input.shape, source.target.shape) == (3, SHAPE, SHAPE[1:])
    assert np.array_equal(source.read(index, box), X[index][box.slices()])
    space = Box(box.spans[1:])
    assert np.array_equal(source.read_target(index, space), LABELS[index][space.slices()])


@pytest.mark.filterwarnings(POOR)
@pytest.mark.parametrize("name", EXACT)
def test_plain_formats_read_what_is_asked(name: str, sources: dict[str, Source]) -> None:
    source = sources[name]
    before = source.counters.bytes_read
    box = Box((Span(0, 2), Span(3, 9), Span(5, 10), Span(0, 9)))
    source.read(1, box)
    assert source.counters.bytes_read - before == 4 * box.size


@pytest.mark.filterwarnings(POOR)
@pytest.mark.parametrize("library", ["zarrs", "zarr"])
def test_without_tensorstore_zarr_is_read_by_the_next_library(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zarr

    if library == "zarrs":
        pytest.importorskip("zarrs")
    find, absent = importlib.util.find_spec, {"tensorstore", *({"zarrs"} - {library})}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else find(name))
    box = Box((Span(0, 2), Span(3, 9), Span(5, 10), Span(1, 9)))
    with zarr.config.set({"codec_pipeline.path": zarr.config.get("codec_pipeline.path")}):  # put back behind it
        for version in (2, 3):
            source = open_source(write_zarr(tmp_path / f"{version}.zarr", version))
            assert np.array_equal(source.read(1, box), X[1][box.slices()])
        assert ("zarrs" in zarr.config.get("codec_pipeline.path")) == (library == "zarrs")


def test_long_runs_are_read_into_their_place(tmp_path: Path) -> None:
    x = volumes(1, (1, 16, 64, 64))
    source = open_source(write_hdf5(tmp_path / "long.h5", x, np.zeros(1), chunks=(1, 1, 8, 64, 64)))
    box = Box((Span(0, 1), Span(3, 14), Span(0, 64), Span(0, 64)))
    assert np.array_equal(source.read(0, box), x[0][box.slices()])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        open_source(tmp_path / "nothing.h5")


def test_wrong_dataset_lists_those_there_are(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", X, LABELS)
    with pytest.raises(DataError, match=r"`inputs` \(='volumes'\).*inputs \(3, 2, 12, 10, 9\), targets"):
        open_source(path, inputs="volumes")


def test_unknown_suffix_lists_formats(tmp_path: Path) -> None:
    (tmp_path / "a.mat").write_bytes(b"")
    with pytest.raises(DataError, match=r"'\.mat'.*\.h5"):
        open_source(tmp_path / "a.mat")


def test_not_hdf5_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        open_source(tmp_path / "a.h5")


def test_differing_shapes_name_the_odd_file(tmp_path: Path) -> None:
    for name in ("inputs", "targets"):
        (tmp_path / name).mkdir()
        for index in range(3):
            np.save(tmp_path / name / f"{index}.npy", X[0] if index < 2 or name == "targets" else X[0, :, :5])
    with pytest.raises(DataError, match=r"2\.npy is \(2, 5, 10, 9\).*most are \(2, 12, 10, 9\)"):
        open_source(tmp_path)


def test_unequal_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 inputs but 2 targets"):
        open_source(write_hdf5(tmp_path / "a.h5", X, LABELS[:2]))


def test_nan_is_found_when_it_is_read(tmp_path: Path) -> None:
    broken = X.copy()
    broken[1, 0, 5, 5, 5] = np.nan
    path = write_hdf5(tmp_path / "a.h5", broken, LABELS)
    source = open_source(path)
    source.read(1, Box((Span(0, 2), Span(6, 12), Span(0, 10), Span(0, 9))))
    with pytest.raises(DataError, match=r"input of sample 1 .* not finite"):
        source.read(1)
    assert np.isnan(open_source(path, check_finite=False).read(1)).sum() == 1


def test_large_values_are_finite(tmp_path: Path) -> None:
    huge = np.full_like(X, 3e38)
    assert open_source(write_hdf5(tmp_path / "a.h5", huge, LABELS)).read(0).max() == np.float32(3e38)


@pytest.mark.filterwarnings(POOR)
@pytest.mark.parametrize(
    "options", [{}, {"chunks": (1, 2, 12, 10, 9)}, {"chunks": (1, 2, 12, 10, 9), "compression": 4}]
)
def test_truncated_hdf5_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """Cut below HDF5's own check of the length, which finds most of them when the file is opened."""
    source = open_source(write_hdf5(tmp_path / "a.h5", X, LABELS, **options))
    os.truncate(tmp_path / "a.h5", 3000)
    with pytest.raises(DataError, match=r"truncated|broken chunk"):
        source.read(2)
    with pytest.raises(DataError, match="HDF5"):
        open_source(tmp_path / "a.h5")


def test_truncated_shard_is_refused(tmp_path: Path) -> None:
    source = open_source(write_shards(tmp_path / "a.zarr"))
    os.truncate(tmp_path / "a.zarr" / "inputs" / "c" / "1" / "0" / "0" / "0" / "0", 1000)
    assert np.array_equal(source.read(0), X[0])
    with pytest.raises(DataError, match="broken or truncated Zarr shard"):
        source.read(1)


@pytest.mark.filterwarnings(POOR)
def test_broken_compressed_zarr_is_refused(tmp_path: Path) -> None:
    source = open_source(write_zarr(tmp_path / "a.zarr", 3))
    os.truncate(tmp_path / "a.zarr" / "inputs" / "c" / "1" / "0" / "0" / "0" / "0", 20)
    with pytest.raises(DataError, match="cannot be read"):
        source.read(1)


def test_truncated_npy_is_refused(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "a.npy")
    os.truncate(path, 2000)
    with pytest.raises(DataError, match="truncated"):
        open_source(path).read(2)


def test_samples_without_channels_get_one(tmp_path: Path) -> None:
    source = open_source(write_hdf5(tmp_path / "a.h5", X[:, 0], LABELS), add_channel=True)
    assert source.input.shape == (1, *SHAPE[1:])
    box = Box((Span(0, 1), Span(2, 5), Span(1, 9), Span(0, 9)))
    assert np.array_equal(source.read(2, box), X[2, :1][box.slices()])


def test_image_folders(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (4, 6, 5, 3), dtype=np.uint8)
    for index, name in enumerate(["cats", "cats", "dogs", "dogs"]):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.fromarray(pixels[index]).save(tmp_path / name / f"{index}.png")
    source = open_source(tmp_path)
    assert (len(source), source.input.shape, [int(source.read_target(i)) for i in range(4)]) == (
        4,
        (3, 6, 5),
        [0, 0, 1, 1],
    )
    box = Box((Span(1, 3), Span(2, 6), Span(0, 4)))
    assert np.array_equal(source.read(2, box), np.moveaxis(pixels[2], 2, 0)[box.slices()])
    Image.fromarray(pixels[0][:4]).save(tmp_path / "dogs" / "9.png")
    with pytest.raises(DataError, match="one size"):
        open_source(tmp_path).read(4)
    assert open_source(tmp_path, size=(8, 8)).read(4).shape == (3, 8, 8)


def test_a_dataset_of_no_pairs_is_refused() -> None:
    with pytest.raises(DataError, match="pair"):
        TorchSource([torch.zeros(3)])


def test_boxes_outside_are_refused(sources: dict[str, Source]) -> None:
    assert isinstance(sources["npy"], ArraySource)
    with pytest.raises(DataError, match="must lie within"):
        sources["npy"].read(0, Box((Span(0, 2), Span(0, 13), Span(0, 10), Span(0, 9))))
    with pytest.raises(DataError, match="3 samples"):
        sources["npy"].read(3)
