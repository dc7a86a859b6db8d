"""Handwritten digits: the 1797 of scikit-learn's wheel (Alpaydin and Kaynak, 1998), resized for LeNet-5.

The file is read directly: importing scikit-learn would cost every rank a second, for one table of numbers.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from convmesh.data.generators.sample_generator import SampleGenerator, check_positive
from convmesh.data.libraries import library
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError

TESTED = 5
"""One digit in this many is held out for tests."""


class Digits(SampleGenerator):
    """Images of `size`² from -1 to 1, and their classes; `split` is train, test or all."""

    def __init__(
        self, size: int = 32, split: Literal["train", "test", "all"] = "all", samples: int | None = None
    ) -> None:
        check_positive(size=size)
        if split not in ("train", "test", "all"):
            raise DataError(f"`split` (={split!r}) must be train, test or all.")
        self.size, self.split = size, split
        chosen = np.arange(len(_images()[0]))
        tested = chosen % TESTED == TESTED - 1
        self._chosen = chosen[{"train": ~tested, "test": tested, "all": tested | ~tested}[split]]
        if samples is not None and not 0 < samples <= len(self._chosen):
            raise DataError(f"`samples` (={samples}) must be from 1 to {len(self._chosen)}: there are no more digits.")
        self.samples = samples or len(self._chosen)
        self.input = TensorSpec((1, size, size), np.dtype(np.float32))
        self.target = TensorSpec((), np.dtype(np.int64))

    def sample(self, index: int) -> tuple[Array, Array]:
        at = self._chosen[index]
        return _grown(self.size)[at], np.asarray(_images()[1][at], np.int64)

    def describe(self) -> dict[str, object]:
        return {"generator": "digits", "size": self.size, "split": self.split, "samples": self.samples}


@lru_cache(maxsize=1)
def _images() -> tuple[Any, Any]:
    """All images of 8 x 8 and their classes."""
    spec = importlib.util.find_spec("sklearn")  # which imports nothing
    folders = (spec.submodule_search_locations if spec else None) or ()
    file = next((f for folder in folders if (f := Path(folder, "datasets", "data", "digits.csv.gz")).exists()), None)
    if file is None:
        digits = library("sklearn.datasets", "the generator `digits`", "digits").load_digits()
        return digits.images, digits.target
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


@lru_cache(maxsize=2)
def _grown(size: int) -> Any:
    """All images resized to `size`, with a channel."""
    import scipy.ndimage  # not needed by other generators

    factors = (1, size / 8, size / 8)
    grown = scipy.ndimage.zoom(_images()[0].astype(np.float32), factors, order=1, grid_mode=True, mode="nearest")
    return grown[:, None] / np.float32(8) - np.float32(1)
