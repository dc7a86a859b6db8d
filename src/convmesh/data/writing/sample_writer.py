"""What a writer of samples does, and plain rows of values in a file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.tensor_spec import Array, TensorSpec

Contents = Mapping[str, tuple[int, TensorSpec]]
"""What a file is to hold: for each name the number of samples, and the shape and type of one."""

Report = Callable[[int, int], None]
"""Hears how many samples are written, and how many there are."""


def silent(done: int, total: int) -> None:
    """A report that nobody reads."""
    del done, total


class SampleWriter(ABC):
    """Writes samples into a file that it created. Copies of it in other processes may write other samples meanwhile."""

    @classmethod
    @abstractmethod
    def create(cls, path: Path, contents: Contents, attributes: Mapping[str, object]) -> None:
        """Create the file with room for its contents."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open a file that `create` created."""

    @abstractmethod
    def write(self, name: str, index: int, values: Array) -> None:
        """Write one sample."""


def reserve(path: Path, count: int) -> None:
    """Make a file of `count` zero bytes, or fail now if the disk is full."""
    with path.open("ab") as file:
        if count:
            os.posix_fallocate(file.fileno(), 0, count)


def write_at(path: Path, offset: int, values: Array) -> None:
    """Write values to a place in a file; other processes may write elsewhere in it."""
    view, done = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data), 0
    descriptor = os.open(path, os.O_WRONLY)
    try:
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)
    finally:
        os.close(descriptor)


def padded(values: Array, shape: tuple[int, ...]) -> Array:
    """Values at the start of a larger array."""
    if values.shape == shape:
        return values
    whole: Array = np.zeros(shape, values.dtype)
    whole[tuple(slice(0, n) for n in values.shape)] = values
    return whole


def as_stored(values: Any, spec_dtype: np.dtype[Any]) -> Array:
    return np.asarray(values).astype(spec_dtype, copy=False)
