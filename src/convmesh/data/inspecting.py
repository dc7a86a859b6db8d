"""`inspect_file`: what a file holds, and what it costs ranks to read their parts of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from convmesh.data.opening import SINGLE, beside, existing, has_files, listed, named_arrays, single, suffix_of
from convmesh.data.sources.array_source import ListedSamples, Samples, StackedSamples
from convmesh.data.sources.image_folder import ImageFolder
from convmesh.data.stored.stored_array import StoredArray
from convmesh.data.stored.zarr_folder import is_zarr
from convmesh.errors import DataError
from convmesh.layout import Box, Partition, Span

LETTERS = "DHW"


@dataclass(frozen=True)
class ArrayFacts:
    """One array of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    bytes_decoded: int


@dataclass(frozen=True)
class CutCost:
    """What the rank that reads the most reads of one sample when `dims` are cut over `ranks`."""

    array: str
    dims: str
    ranks: int
    bytes_needed: int
    bytes_read: int

    @property
    def amplification(self) -> float:
        """Bytes read for each byte needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


@dataclass(frozen=True)
class FileFacts:
    """A file of samples."""

    path: str
    samples: int | None
    arrays: tuple[ArrayFacts, ...]
    cuts: tuple[CutCost, ...]
    targets: int | None = None
    """How many of them have targets; None without any."""


def inspect_file(path: Path, ranks: int = 4, inputs: str = "inputs", targets: str = "targets") -> FileFacts:
    """The arrays of a file, and for inputs and targets the cost of cutting each dim of space over `ranks`."""
    existing(path)
    if ranks < 1:
        raise DataError(f"`ranks` (={ranks}) must be at least 1.")
    if path.is_dir() and not is_zarr(path) and not (path / inputs).is_dir() and not has_files(path):
        return _image_facts(path)
    arrays, samples = _arrays(path, inputs, targets)
    facts = tuple(_facts(name, array) for name, array in arrays.items())
    space = min(3, len(samples["inputs"].spec.shape) - 1) if "inputs" in samples else 0
    cuts = [cost for name, kept in samples.items() for cost in _costs(name, kept, space, ranks)]
    counts = {name: len(kept) for name, kept in samples.items()}
    return FileFacts(str(path), counts.get("inputs"), facts, tuple(cuts), counts.get("targets"))


def _image_facts(path: Path) -> FileFacts:
    """A folder of images, which are always read whole."""
    images = ImageFolder(path)
    shape = (len(images), *images.input.shape)
    facts = ArrayFacts("images", shape, str(images.input.dtype), "a file each", len(images) * images.input.bytes_sample)
    return FileFacts(str(path), len(images), (facts,), (), len(images))


def _arrays(path: Path, inputs: str, targets: str) -> tuple[dict[str, StoredArray], dict[str, Samples]]:
    """All arrays by name, and the samples among them."""
    if path.is_dir() and not is_zarr(path):
        names = {inputs: "inputs", targets: "targets"} if (path / inputs).is_dir() else {".": "inputs"}
        whole: dict[str, Samples] = {
            name: listed(path / at, None) for at, name in names.items() if (path / at).is_dir()
        }
        return {f"{name}/*": kept.arrays()[0] for name, kept in whole.items()}, whole
    if suffix_of(path) in SINGLE:
        array = single(path)
        volume = suffix_of(path).startswith(".nii")
        samples: Samples = ListedSamples([array], len(array.shape) == 3) if volume else StackedSamples(array)
        other = beside(path, targets)
        if volume or not other.exists():
            return {path.name: array}, {"inputs": samples}
        goal = single(other)
        return {path.name: array, other.name: goal}, {"inputs": samples, "targets": StackedSamples(goal)}
    arrays = named_arrays(path)
    wanted = {"inputs": inputs, "targets": targets}
    return arrays, {
        name: StackedSamples(arrays[at]) for name, at in wanted.items() if at in arrays and arrays[at].shape
    }


def _facts(name: str, array: StoredArray) -> ArrayFacts:
    return ArrayFacts(name, array.shape, str(array.dtype), array.storage, math.prod(array.shape) * array.dtype.itemsize)


def _costs(name: str, samples: Samples, space: int, ranks: int) -> list[CutCost]:
    shape = samples.spec.shape
    if len(samples) == 0 or space == 0 or len(shape) < space:
        return []
    lead = len(shape) - space
    return [
        _cost(name, samples, lead + dim, LETTERS[len(LETTERS) - space + dim], ranks)
        for dim in range(space)
        if shape[lead + dim] >= ranks
    ]


def _cost(name: str, samples: Samples, dim: int, letter: str, ranks: int) -> CutCost:
    whole, partition = Box.whole(samples.spec.shape).spans, Partition.even(samples.spec.shape[dim], ranks)
    worst = (0, 0)
    for part in range(ranks):
        spans: list[Span] = [*whole[:dim], partition.span(part), *whole[dim + 1 :]]
        box = Box(tuple(spans))
        array, there = samples.at(0, box)
        worst = max(worst, (array.bytes_to_read(there), box.size * samples.spec.dtype.itemsize))
    return CutCost(name, letter, ranks, worst[1], worst[0])
