"""Random masks as a function of a seed and the global index.

A row holds all elements that differ only in the last dim. A 64-bit hash of seed and row (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014) yields two 32-bit keys, which a 32-bit hash (MurmurHash3's finaliser)
mixes with the index in the row. Torch's integers wrap around on every device; its right shift copies the sign, so the
result is masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from convmesh.layout import Box, Span

Write = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes random bits and the place to write what is made of them."""

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements hashed at a time: on CPUs few enough for the cache, on GPUs enough to hide kernel launches."""


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_ROW_STEP, _ROW_MIX_1, _ROW_MIX_2 = (
    _signed(v, 64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_ROW_STEP_INVERSE = _signed(pow(_ROW_STEP, -1, 1 << 64), 64)
"""Moves a seed into the product, modulo 2⁶⁴: a compiler keeps row numbers in 32 bits, too few for a product alone."""
_COLUMN_STEP, _MIX_1, _MIX_2 = (_signed(v, 32) for v in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))


def keep_mask(box: Box, shape: Sequence[int], seed: int | torch.Tensor, p: float, device: torch.device) -> torch.Tensor:
    """The `box` of a mask of global `shape` that is True with probability `1 - p`, independently for each index.

    `seed` may be a tensor of one integer on `device`: the mask is then the one for its value.
    """
    dropped_below = min(round(p * 2**32), 2**32 - 1) - 2**31

    def write(bits: torch.Tensor, out: torch.Tensor) -> None:
        torch.ge(bits, dropped_below, out=out)

    return _filled(box, shape, seed, torch.empty(box.shape, dtype=torch.bool, device=device), write)


def random_bits(box: Box, shape: Sequence[int], seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The `box` of 32 random bits per index, independent for each index of the global `shape`."""

    def write(bits: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(bits)

    return _filled(box, shape, seed, torch.empty(box.shape, dtype=torch.int32, device=device), write)


def _filled(
    box: Box, shape: Sequence[int], seed: int | torch.Tensor, result: torch.Tensor, write: Write
) -> torch.Tensor:
    """`result`, filled with what `write` makes of the random bits, some rows at a time."""
    rows, last = Box(box.spans[:-1]), box.spans[-1] if box.spans else Span(0, 1)
    listed, device = result.view(rows.size, last.extent), result.device
    columns = torch.arange(last.start, last.stop, dtype=torch.int32, device=device).mul_(_COLUMN_STEP)
    chunk = max(1, CHUNK.get(device.type, 1 << 20) // max(1, last.extent))
    for first in range(0, rows.size, chunk):
        part = Span(first, min(first + chunk, rows.size))
        keys = _row_keys(_global_rows(part, rows, shape, device), seed)
        write(_hash(keys, columns), listed[part.slice()])
    return result


def _global_rows(part: Span, rows: Box, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers, within the whole tensor, of some of the box's rows."""
    left = torch.arange(part.start, part.stop, device=device)
    numbers = torch.zeros_like(left)
    for dim in reversed(range(len(rows.spans))):
        span = rows.spans[dim]
        numbers += (left % span.extent + span.start) * math.prod(shape[dim + 1 : -1])
        left = left.div(span.extent, rounding_mode="floor")
    return numbers


def _row_keys(rows: torch.Tensor, seed: int | torch.Tensor) -> torch.Tensor:
    """Two 32-bit keys per row, from its 64-bit hash."""
    keys = rows * _ROW_STEP + seed if isinstance(seed, int) else (rows + seed * _ROW_STEP_INVERSE) * _ROW_STEP
    _xor_shifted(keys, 30).mul_(_ROW_MIX_1)
    _xor_shifted(keys, 27).mul_(_ROW_MIX_2)
    return _xor_shifted(keys, 31).view(torch.int32).view(-1, 2)


def _hash(keys: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """32 random bits for every row and column; the finaliser's last xor is omitted, since it only affects low bits."""
    bits = keys[:, :1] ^ columns
    _xor_shifted(bits, 16).mul_(_MIX_1).bitwise_xor_(keys[:, 1:])
    return _xor_shifted(bits, 13).mul_(_MIX_2)


def _xor_shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """`bits ^= bits >>> shift`, in place, with zeros shifted in."""
    kept = (1 << (8 * bits.element_size() - shift)) - 1
    return bits.bitwise_xor_((bits >> shift).bitwise_and_(kept))
