"""Files that are made, converted and inspected."""

import gc
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convmesh.cli import main as command
from convmesh.data import SampleGenerator, TensorSpec, generator, open_source
from convmesh.data.converting import convert
from convmesh.data.inspecting import inspect_file
from convmesh.data.making import make
from convmesh.data.tensor_spec import Array
from convmesh.data.writing.chunking import slab_chunks
from convmesh.data.writing.unfinished import remove
from convmesh.errors import DataError
from tests.data.volumes import SHAPE, volumes, voxel_labels, write_hdf5

SUFFIXES = (".h5", ".zarr", ".npy")
POOR = "ignore::convmesh.errors.DataWarning"


def same_as(made: SampleGenerator, path: Path) -> None:
    source = open_source(path)
    assert (len(source), source.input, source.target) == (made.samples, made.input, made.target)
    for index in range(made.samples):
        for read, wanted in zip((source.read(index), source.read_target(index)), made.sample(index), strict=True):
            assert np.array_equal(read, wanted)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("name", "settings"), [("cosmology", {"size": 20}), ("fractals", {"size": 18}), ("digits", {})]
)
def test_files_hold_what_was_generated(suffix: str, name: str, settings: dict[str, int], tmp_path: Path) -> None:
    made = generator(name, {**settings, "samples": 5})
    make(made, tmp_path / f"a{suffix}", processes=2)
    same_as(made, tmp_path / f"a{suffix}")
    assert not list(tmp_path.glob("*incomplete*"))


class Litter:
    """A cycle that nobody holds; it notes a collection by another process than its own."""

    def __init__(self, noted: Path) -> None:
        self.itself, self.process, self.noted = self, os.getpid(), noted

    def __del__(self) -> None:
        if os.getpid() != self.process:
            self.noted.touch()


class Tidy(SampleGenerator):
    """Collects garbage for every sample."""

    samples, input, target = 3, TensorSpec((1, 2), np.dtype(np.float32)), TensorSpec((), np.dtype(np.int64))

    def sample(self, index: int) -> tuple[Array, Array]:
        gc.collect()
        return np.full((1, 2), index, np.float32), np.asarray(index)

    def describe(self) -> dict[str, object]:
        return {"generator": "tidy"}


def test_processes_leave_garbage_of_this_one_alone(tmp_path: Path) -> None:
    """A library whose threads a fork did not copy would wait for them."""
    gc.disable()
    try:
        Litter(tmp_path / "noted")
        make(Tidy(), tmp_path / "a.npy", processes=1)
    finally:
        gc.enable()
    assert not (tmp_path / "noted").exists()


class Stops(SampleGenerator):
    """Fails at a sample, as a job that is stopped."""

    def __init__(self, inner: SampleGenerator, at: int, seen: Path) -> None:
        self.inner, self.at, self.seen = inner, at, seen
        self.input, self.target, self.samples = inner.input, inner.target, inner.samples

    def sample(self, index: int) -> tuple[Array, Array]:
        if index == self.at:
            raise DataError("stopped")
        with self.seen.open("a") as file:
            file.write(f"{index}\n")
        return self.inner.sample(index)

    def describe(self) -> dict[str, object]:
        return self.inner.describe()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_stopped_job_goes_on_where_it_stopped(suffix: str, tmp_path: Path) -> None:
    made, seen = generator("cosmology", {"size": 16, "samples": 9}), tmp_path / "seen"
    with pytest.raises(DataError, match="stopped"):
        make(Stops(made, 6, seen), tmp_path / f"a{suffix}", processes=1)
    assert not (tmp_path / f"a{suffix}").exists()
    make(Stops(made, 99, seen), tmp_path / f"a{suffix}", processes=1)
    written = seen.read_text().split()
    again = {index for index in written if written.count(index) > 1}
    assert again <= {"7", "8"}  # a worker may have begun them by then
    same_as(made, tmp_path / f"a{suffix}")


def test_another_job_starts_anew(tmp_path: Path) -> None:
    first, other = (generator("cosmology", {"size": 16, "samples": 3, "seed": seed}) for seed in (0, 1))
    with pytest.raises(DataError, match="stopped"):
        make(Stops(first, 2, tmp_path / "seen"), tmp_path / "a.h5", processes=1)
    make(other, tmp_path / "a.h5", processes=1)
    same_as(other, tmp_path / "a.h5")


def test_existing_and_unwritable_paths_are_refused(tmp_path: Path) -> None:
    made = generator("digits", {"samples": 1})
    (tmp_path / "a.h5").touch()
    with pytest.raises(DataError, match="exists"):
        make(made, tmp_path / "a.h5")
    with pytest.raises(DataError, match="no folder"):
        make(made, tmp_path / "b" / "a.h5")
    with pytest.raises(DataError, match=r"must end in \.h5"):
        make(made, tmp_path / "a.mat")


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_is_told(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While samples are made and while they are converted; the same command then goes on."""
    np.savez(tmp_path / "a.npz", inputs=volumes(3, (1, 32, 32, 32)), targets=np.zeros(3))
    out = tmp_path / f"new{suffix}"
    make_some = ["make", "cosmology", "--size", "32", "--samples", "3", "--processes", "1", "--out", str(out)]
    for job in (["convert", str(tmp_path / "a.npz"), str(out)], make_some):
        with files_up_to(100_000):
            assert command(["data", *job]) == 2
        told = capsys.readouterr().err
        assert told == f"convmesh: `out` (={str(out)!r}) cannot be written: File too large.\n"
        assert not out.exists()
        assert command(["data", *job]) == 0
        assert len(open_source(out)) == 3
        remove(out)


@pytest.mark.parametrize("shape", [(1, 512, 512, 512), (4, 256, 256, 256), (3, 4096, 4096), (512, 512, 512)])
def test_chunks_of_large_samples_are_of_2_to_16_mb(shape: tuple[int, ...]) -> None:
    spec = TensorSpec(shape, np.dtype(np.float32))
    assert 2 * 2**20 <= 4 * np.prod(slab_chunks(spec)) <= 16 * 2**20
    lead = len(shape) - 3 if len(shape) > 3 or shape[0] > 4 else 1
    assert slab_chunks(spec)[lead + 1 :] == shape[lead + 1 :]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["gzip", "npz", "npy", "nii.gz"])
def test_converted_files_hold_the_same(suffix: str, kind: str, tmp_path: Path) -> None:
    x, labels = volumes(3), voxel_labels(3)
    convert(poor_file(tmp_path, kind, x, labels), tmp_path / f"new{suffix}")
    source = open_source(tmp_path / f"new{suffix}")
    for index in range(3):
        assert np.array_equal(source.read(index), x[index])
        assert np.array_equal(source.read_target(index), labels[index])
    assert source.counters.amplification == 1


def poor_file(folder: Path, kind: str, x: Array, labels: Array) -> Path:
    if kind == "gzip":
        return write_hdf5(folder / "poor.h5", x, labels, chunks=(3, 1, 12, 10, 1), compression="gzip")
    if kind == "npz":
        np.savez_compressed(folder / "poor.npz", inputs=x, targets=labels)
        return folder / "poor.npz"
    if kind == "npy":
        np.save(folder / "poor.npy", x)
        np.save(folder / "poor.targets.npy", labels)
        return folder / "poor.npy"
    import nibabel

    for name, values in (("inputs", x), ("targets", labels)):
        (folder / "poor" / name).mkdir(parents=True)
        for index, value in enumerate(values):
            image: Any = nibabel.Nifti1Image(value.T.copy(), np.eye(4))
            nibabel.save(image, folder / "poor" / name / f"{index}.nii.gz")
    return folder / "poor"


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="npz"):
        convert(tmp_path / "a.npz", tmp_path / "a.h5")
    with pytest.raises(DataError, match="no such file"):
        convert(tmp_path / "b.h5", tmp_path / "a.h5")


def test_costs_of_cuts_are_told(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", volumes(3), voxel_labels(3), chunks=(1, 2, 6, 10, 9), compression="gzip")
    facts = inspect_file(path, ranks=2)
    assert facts.samples == 3
    assert {(cut.array, cut.dims): cut.amplification for cut in facts.cuts if cut.array == "inputs"} == {
        ("inputs", "D"): 1.0, ("inputs", "H"): 2.0, ("inputs", "W"): pytest.approx(9 / 5),
    }  # fmt: skip
    assert facts.cuts[0].bytes_needed == 4 * np.prod(SHAPE) / 2


def test_what_keeps_a_file_from_being_trained_on_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    images = tmp_path / "images" / "cats"
    images.mkdir(parents=True)
    Image.new("RGB", (6, 5)).save(images / "0.png")
    np.save(tmp_path / "b.npy", volumes(2))
    cases = {
        str(write_hdf5(tmp_path / "a.h5", volumes(3), voxel_labels(2))): "3 inputs but 2 targets; each input needs one",
        str(tmp_path / "b.npy"): "2 samples without targets; say which arrays",
        str(images.parent): "images  (1, 3, 5, 6) uint8",
    }
    for path, told in cases.items():
        assert command(["data", "info", path]) == 0
        assert told in capsys.readouterr().out
    np.save(tmp_path / "one.npy", volumes(1))
    assert command(["data", "info", str(tmp_path / "one.npy")]) == 0
    assert ": 1 sample without targets" in capsys.readouterr().out
    for verb in (["info", str(tmp_path / "bb.npy")], ["convert", str(tmp_path / "bb.npy"), str(tmp_path / "c.h5")]):
        assert command(["data", *verb]) == 2
        assert f"did you mean {str(tmp_path / 'b.npy')!r}?" in capsys.readouterr().err
    np.save(tmp_path / "b.targets.npy", voxel_labels(2))
    assert command(["data", "info", str(tmp_path / "b.npy")]) == 0
    assert "2 samples\n" in capsys.readouterr().out


def test_the_command_makes_converts_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, other = str(tmp_path / "a.h5"), str(tmp_path / "b.zarr")
    assert command(["data", "make", "cosmology", "--size", "16", "--samples", "3", "--out", made]) == 0
    assert command(["data", "convert", made, other]) == 0
    capsys.readouterr()
    assert command(["data", "info", other, "--json", "--ranks", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 3
    assert [array["shape"] for array in facts["arrays"]] == [[3, 1, 16, 16, 16], [3, 2]]
    assert {cut["amplification"] for cut in facts["cuts"]} == {1.0}
    assert command(["data", "info", made]) == 0
    assert "reads 1.00× that" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["info", "none.h5"], "no such file"),
        (["make", "digits", "--seed", "1", "--out", "a.h5"], "no setting of digits"),
        (["make", "digits", "--out", "a.txt"], "must end in"),
        (["convert", "none.npz", "a.h5"], "no such file"),
    ],
)
def test_bad_input_is_one_message(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["data", *args]) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1
