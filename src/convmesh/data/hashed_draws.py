"""Random numbers that are functions of integers: no state, so the same on every mesh and after every resume.

The mixer is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), which is
integer arithmetic: unlike the streams of a library it cannot change with a version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)


def hashed(*keys: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64 mixed bits for each combination of keys; keys may be arrays, which broadcast."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            number = np.uint64(key % 2**64) if isinstance(key, int) else key.astype(np.uint64)
            state = _mixed(state + _STEP + number)
    return np.asarray(state)


def fraction(*keys: int) -> float:
    """A number in [0, 1)."""
    return float(hashed(*keys) >> np.uint64(11)) / 2**53


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed
