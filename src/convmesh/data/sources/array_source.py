"""Samples in arrays: one array with a sample per row, or one array per sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from convmesh.data.sources.source import ReadCounters, Source
from convmesh.data.stored.stored_array import StoredArray
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError
from convmesh.layout import Box, Span


class Samples(ABC):
    """The inputs of all samples, or their targets."""

    spec: TensorSpec

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def arrays(self) -> Sequence[StoredArray]:
        """The arrays that hold the samples."""

    @abstractmethod
    def at(self, index: int, box: Box) -> tuple[StoredArray, Box]:
        """Where a box of a sample lies."""

    def read_into(self, index: int, box: Box, out: Array) -> int:
        """Write a box of a sample to `out`; return the bytes that left the storage."""
        array, there = self.at(index, box)
        array.read_into(there, _shaped(out, there))
        return array.bytes_to_read(there)

    def read_rows(self, first: int, out: Array) -> None:
        """Fill `out` with whole samples, starting at `first`."""
        for at in range(len(out)):
            self.read_into(first + at, Box.whole(self.spec.shape), out[at, ...])


def _shaped(out: Array, there: Box) -> Array:
    """A view of `out` with the dims of the stored box: one sample dim more, or one channel dim less."""
    extra = len(there.shape) - out.ndim
    return out[(None,) * extra] if extra >= 0 else out[(0,) * -extra]


class StackedSamples(Samples):
    """One array; sample `i` is its row `i`. `add_channel` gives rows without a channel dim one."""

    def __init__(self, array: StoredArray, add_channel: bool = False) -> None:
        if not array.shape:
            raise DataError(f"{array.name} is a single number; it must have a row per sample.")
        shape = (1, *array.shape[1:]) if add_channel else array.shape[1:]
        self.spec = TensorSpec(shape, array.dtype.newbyteorder("="))
        self._array, self._skipped = array, int(add_channel)

    def __len__(self) -> int:
        return self._array.shape[0]

    def arrays(self) -> Sequence[StoredArray]:
        return [self._array]

    def at(self, index: int, box: Box) -> tuple[StoredArray, Box]:
        return self._array, Box((Span(index, index + 1), *box.spans[self._skipped :]))

    def read_rows(self, first: int, out: Array) -> None:
        rows = Span(first, first + len(out))
        box = Box((rows, *Box.whole(self._array.shape[1:]).spans))
        self._array.read_into(box, out.reshape(box.shape))


class ListedSamples(Samples):
    """One array per sample, all of the same shape."""

    def __init__(self, arrays: Sequence[StoredArray], add_channel: bool = False) -> None:
        if not arrays:
            raise DataError("there are no samples; give at least one file.")
        _check_alike(arrays)
        shape = (1, *arrays[0].shape) if add_channel else arrays[0].shape
        self.spec = TensorSpec(shape, arrays[0].dtype.newbyteorder("="))
        self._arrays, self._skipped = list(arrays), int(add_channel)

    def __len__(self) -> int:
        return len(self._arrays)

    def arrays(self) -> Sequence[StoredArray]:
        return self._arrays

    def at(self, index: int, box: Box) -> tuple[StoredArray, Box]:
        return self._arrays[index], Box(box.spans[self._skipped :])


def _check_alike(arrays: Sequence[StoredArray]) -> None:
    kinds = Counter((array.shape, array.dtype.newbyteorder("=")) for array in arrays)
    if len(kinds) > 1:
        (usual, dtype), _ = kinds.most_common(1)[0]
        odd = next(a for a in arrays if (a.shape, a.dtype.newbyteorder("=")) != (usual, dtype))
        raise DataError(
            f"samples must all have one shape and type, but {odd.name} is {odd.shape} {odd.dtype} and most are "
            f"{usual} {dtype}; crop, pad or resample it."
        )


class ArraySource(Source):
    """Inputs and targets from arrays in files."""

    def __init__(self, name: str, inputs: Samples, targets: Samples, check_finite: bool = True) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{name} has {len(inputs)} inputs but {len(targets)} targets; each input needs one.")
        if len(inputs.spec.shape) < 2:
            raise DataError(
                f"an input of {name} has shape {inputs.spec.shape}; it must be channels, then space. For space alone "
                "open it with `add_channel=True`."
            )
        self.inputs, self.targets = inputs, targets
        self.input, self.target = inputs.spec, targets.spec
        self.counters, self.check_finite = ReadCounters(), check_finite
        self._name = name

    def __len__(self) -> int:
        return len(self.inputs)

    def __str__(self) -> str:
        return self._name

    def _input_into(self, index: int, box: Box, out: Array) -> int:
        return self.inputs.read_into(index, box, out)

    def _target_into(self, index: int, box: Box, out: Array) -> int:
        return self.targets.read_into(index, box, out)
