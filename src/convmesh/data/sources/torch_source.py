"""Any torch Dataset: samples are made whole, and cut in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from convmesh.data.sources.source import ReadCounters, Source
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError
from convmesh.layout import Box

_KEPT = 16
"""Samples to keep: a sample's input and target are requested separately."""


class TorchSource(Source):
    """A dataset of (input, target) pairs; read by one thread at a time, since many datasets allow no more."""

    def __init__(self, dataset: Any, check_finite: bool = True) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(f"`dataset` (={type(dataset).__name__}) must have a length and be indexed by sample.")
        self._dataset = dataset
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Array, Array]] = OrderedDict()
        self.counters, self.check_finite = ReadCounters(), check_finite
        first, target = self._pair(0)
        self.input, self.target = TensorSpec(first.shape, first.dtype), TensorSpec(target.shape, target.dtype)

    def __len__(self) -> int:
        return len(self._dataset)

    def __str__(self) -> str:
        return type(self._dataset).__name__

    def _pair(self, index: int) -> tuple[Array, Array]:
        with self._lock:
            if index not in self._kept:
                self._kept[index] = self._made(index)
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[index]

    def _made(self, index: int) -> tuple[Array, Array]:
        item = self._dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"sample {index} of {self} is {type(item).__name__}; it must be a pair (input, target).")
        return _as_array(item[0]), _as_array(item[1])

    def _cut(self, which: int, index: int, box: Box, out: Array) -> int:
        values, spec = self._pair(index)[which], (self.input, self.target)[which]
        if values.shape != spec.shape:
            raise DataError(
                f"samples must all have one shape, but sample {index} of {self} is {values.shape} and sample 0 is "
                f"{spec.shape}; crop, pad or resample it."
            )
        out[...] = values[box.slices()]
        return spec.bytes_sample

    def _input_into(self, index: int, box: Box, out: Array) -> int:
        return self._cut(0, index, box, out)

    def _target_into(self, index: int, box: Box, out: Array) -> int:
        return self._cut(1, index, box, out)


def _as_array(value: Any) -> Array:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
