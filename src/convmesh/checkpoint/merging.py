"""The manifest of all ranks' files, from what each file says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from convmesh.checkpoint.manifest import FileDigest, Manifest, SavedBox, SavedTensor
from convmesh.checkpoint.tensor_file import read_header
from convmesh.errors import CheckpointError
from convmesh.layout import Box, Span


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05}.safetensors"


def merged(folder: Path, files: dict[str, FileDigest], head: dict[str, Any]) -> Manifest:
    """The manifest of the files in a folder; `head` has the fields that the first rank knows."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    pieces: dict[str, list[SavedBox]] = {}
    shared: dict[str, str] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for file in files:
        table = _table(folder / file)
        told = json.loads(table.pop("__metadata__")["convmesh"])
        kinds |= told["tensors"]
        shared |= told["shared"]
        numbers |= told["numbers"]
        for key, stored in table.items():
            pieces.setdefault(key.rpartition("@")[0], []).append(SavedBox(file, key, _box(key, stored["shape"])))
    tensors = {n: SavedTensor(tuple(shape), dtype, tuple(pieces.get(n, ()))) for n, (dtype, shape) in kinds.items()}
    _check_complete(tensors)
    if head["optimizer"] is not None:
        head = {**head, "optimizer": {**head["optimizer"], "numbers": numbers}}
    return Manifest(**head, files=files, tensors=tensors, shared=shared)


def _table(path: Path) -> dict[str, Any]:
    try:
        return read_header(path)
    except OSError as error:
        raise CheckpointError(
            f"the first rank cannot read {path} ({error.strerror}); all ranks must see the same folder."
        ) from None


def _box(key: str, shape: list[int]) -> Box:
    starts = key.rpartition("@")[2]
    offsets = [int(start) for start in starts.split(",")] if starts else []
    return Box(tuple(Span(start, start + n) for start, n in zip(offsets, shape, strict=True)))


def _check_complete(tensors: dict[str, SavedTensor]) -> None:
    """Check that every value is written once: a cheap check that ranks agree on who writes what."""
    if wrong := [name for name, entry in tensors.items() if not entry.is_complete]:
        sizes = [sum(piece.box.size for piece in tensors[wrong[0]].pieces), tensors[wrong[0]].shape]
        raise CheckpointError(
            f"{wrong[0]!r} would be saved with {sizes[0]} values for shape {sizes[1]} ({len(wrong)} such tensors); the "
            "ranks' networks or optimisers differ."
        )
