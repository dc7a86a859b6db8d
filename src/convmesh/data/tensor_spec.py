"""Shape and type of one sample's tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One sample's input or target, without the batch."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes_sample(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
