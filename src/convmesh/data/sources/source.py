"""A source of samples: inputs and targets that can be read by box."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError
from convmesh.layout import Box


@dataclass
class ReadCounters:
    """Bytes requested, and bytes that had to be read for them; readers are threads."""

    bytes_needed: int = 0
    bytes_read: int = 0
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    @property
    def amplification(self) -> float:
        """Bytes read for each byte needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def add(self, needed: int, read: int) -> None:
        with self._lock:
            self.bytes_needed += needed
            self.bytes_read += read

    def __getstate__(self) -> dict[str, int]:
        return {"bytes_needed": self.bytes_needed, "bytes_read": self.bytes_read}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Source(ABC):
    """Samples of one shape. Reading is safe from several threads; files open in the process that reads."""

    input: TensorSpec
    """One sample's input: (C, [D,] H, W)."""
    target: TensorSpec
    """One sample's target: () for a class, (k,) for values, ([C,] [D,] H, W) for a target per voxel."""
    counters: ReadCounters
    check_finite: bool = True
    """Whether values that are not finite are refused when they are read."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _input_into(self, index: int, box: Box, out: Array) -> int:
        """Write a box of an input to `out`; return the bytes that left the storage."""

    @abstractmethod
    def _target_into(self, index: int, box: Box, out: Array) -> int:
        """Write a box of a target to `out`; return the bytes that left the storage."""

    def read(self, index: int, box: Box | None = None, out: Array | None = None) -> Array:
        """The values of `box` (default: all) of the input of sample `index`; nothing else is read."""
        return self._read("input", index, box, out)

    def read_target(self, index: int, box: Box | None = None, out: Array | None = None) -> Array:
        """The values of `box` (default: all) of the target of sample `index`."""
        return self._read("target", index, box, out)

    def _read(self, which: str, index: int, box: Box | None, out: Array | None) -> Array:
        spec: TensorSpec = getattr(self, which)
        box = Box.whole(spec.shape) if box is None else box
        self._check(which, index, box, spec)
        out = self._room(which, box, spec) if out is None else out
        if box.size:
            read = (self._input_into if which == "input" else self._target_into)(index, box, out)
            self.counters.add(box.size * spec.dtype.itemsize, read)
            if self.check_finite and not is_finite(out):
                raise DataError(
                    f"the {which} of sample {index} of {self} has values that are not finite numbers; repair the data, "
                    "or open it with `check_finite=False` (in a run file: `data.args = { check_finite = false }`)."
                )
        return out

    def _room(self, which: str, box: Box, spec: TensorSpec) -> Array:
        """Memory for a box; a damaged file may claim any size."""
        try:
            return np.empty(box.shape, spec.dtype)
        except (MemoryError, ValueError) as error:
            raise DataError(f"the {which} of a sample of {self}, {box.shape} of {spec.dtype}: {error}.") from error

    def _check(self, which: str, index: int, box: Box, spec: TensorSpec) -> None:
        if not 0 <= index < len(self):
            raise DataError(f"`index` (={index}) must be one of the {len(self)} samples of {self}, from 0.")
        inside = len(box.spans) == len(spec.shape) and all(
            s.start >= 0 and s.stop <= n for s, n in zip(box.spans, spec.shape, strict=True)
        )
        if not inside:
            raise DataError(f"`box` (={box}) must lie within the {which}'s shape {spec.shape} of {self}.")


def is_finite(values: Array) -> bool:
    """Whether all values are finite. One sum decides, unless it overflows; then every value is checked."""
    if values.dtype.kind != "f":
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())
