"""Safetensors files, written as a stream: the header first, then every tensor's bytes in order."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convmesh.errors import CheckpointError, UnsupportedError

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
"""By the format's name."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}
_ALIGNED = 8


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, by its key."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes_size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(stored: Sequence[Stored]) -> list[Stored]:
    """Wide types first, so that every tensor begins at a multiple of its type's size."""
    return sorted(stored, key=lambda each: -each.dtype.itemsize)


def header_of(stored: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors, which follow without gaps."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for each in stored:
        end = begin + each.bytes_size
        table[each.key] = {"dtype": type_name(each.dtype), "shape": each.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, Any]:
    """A file's table of tensors, with its `__metadata__`."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(min(size, path.stat().st_size)))
    except (ValueError, RecursionError, struct.error):
        raise CheckpointError(f"{path} is no safetensors file.") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is no safetensors file.")
    return table


def type_name(dtype: torch.dtype) -> str:
    """The format's name of a type."""
    if dtype not in _NAMES:
        raise UnsupportedError(f"a tensor of {dtype} cannot be saved: safetensors has {', '.join(TYPES)}.")
    return _NAMES[dtype]
