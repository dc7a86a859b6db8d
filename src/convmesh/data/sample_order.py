"""Which samples make up which batch: a function of seed, epoch and position, the same on every mesh."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from convmesh.data.hashed_draws import hashed
from convmesh.errors import DataError

_DRAW = 1
"""Separates the order's draws from those of the augmentation under the same seed."""


class Order:
    """Batches of sample indices. Training drops an incomplete last batch; evaluation keeps it, unshuffled."""

    def __init__(self, seed: int, samples: int, batch: int, *, shuffle: bool = True, keep_last: bool = False) -> None:
        if batch < 1:
            raise DataError(f"`batch` (={batch}) must be at least 1.")
        if samples < 1 or (samples < batch and not keep_last):
            raise DataError(
                f"`samples` (={samples}) must fill at least one batch of {batch}; use a smaller batch, or "
                "`keep_last=True` for evaluation."
            )
        self.seed, self.samples, self.batch_size = seed, samples, batch
        self.shuffle, self.keep_last = shuffle, keep_last

    @classmethod
    def evaluation(cls, samples: int, batch: int) -> Order:
        """Every sample once, in the order of the file."""
        return cls(0, samples, batch, shuffle=False, keep_last=True)

    @property
    def batches(self) -> int:
        """Batches in one epoch."""
        return -(-self.samples // self.batch_size) if self.keep_last else self.samples // self.batch_size

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """All samples in the order of `epoch`."""
        return _shuffled(self.seed, epoch, self.samples) if self.shuffle else np.arange(self.samples)

    def batch(self, epoch: int, index: int) -> tuple[int, ...]:
        """The samples of batch `index` of `epoch`."""
        if not 0 <= index < self.batches:
            raise DataError(f"`index` (={index}) must be one of the {self.batches} batches of an epoch, from 0.")
        start = index * self.batch_size
        return tuple(self.permutation(epoch)[start : start + self.batch_size].tolist())


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    keys = hashed(seed, _DRAW, epoch, np.arange(samples, dtype=np.uint64))
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
