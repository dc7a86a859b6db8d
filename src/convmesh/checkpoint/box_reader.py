"""Reads boxes of a checkpoint's tensors from the files that have them, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from convmesh.checkpoint.manifest import FileDigest, Manifest, SavedBox, SavedTensor
from convmesh.checkpoint.tensor_file import TYPES
from convmesh.errors import CheckpointError
from convmesh.layout import Box

_BYTES_AT_ONCE = 1 << 22
_THREADS = 4


class BoxReader:
    """The tensors of one checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, Any] = {}

    def whole(self, name: str) -> torch.Tensor:
        """A small tensor, whole."""
        entry = self.manifest.tensors[name]
        return self.read(name, Box.whole(entry.shape), torch.empty(entry.shape, dtype=TYPES[entry.dtype]))

    @torch.no_grad()
    def read(self, name: str, box: Box, into: torch.Tensor) -> torch.Tensor:
        """Copy a box of a tensor into memory of the same shape."""
        entry = self.manifest.tensors[name]
        for piece in entry.pieces:
            common = piece.box.intersect(box)
            if common.size:
                into[common.relative_to(box).slices()] = self._slice(piece, common.relative_to(piece.box))
        return into

    def _slice(self, piece: SavedBox, inner: Box) -> torch.Tensor:
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self.folder / piece.file, framework="pt")
            file = self._files[piece.file]
            slices = inner.slices()
            values: torch.Tensor = file.get_slice(piece.key)[slices] if slices else file.get_tensor(piece.key)
        except (OSError, SafetensorError, IndexError) as error:
            raise CheckpointError(f"{self.folder / piece.file} cannot be read: {error}.") from None
        if tuple(values.shape) != inner.shape:
            told = f"tensor {piece.key!r} has shape {(*values.shape,)} where the manifest has {inner.shape}"
            raise CheckpointError(f"{self.folder / piece.file}: {told}.")
        return values

    def release(self) -> None:
        """Close the files, and with them the pages that were mapped."""
        self._files.clear()


def check_files(folder: Path, files: Iterable[tuple[str, FileDigest]]) -> None:
    """Refuse files whose bytes differ from those that were written."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda pair: _check_file(folder / pair[0], pair[1]), files))


def _check_file(path: Path, expected: FileDigest) -> None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes instead of {expected.size}.")
        if _sha256(path) != expected.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs.")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_BYTES_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def shapes_of(entries: dict[str, SavedTensor], prefix: str) -> dict[str, tuple[int, ...]]:
    """Global shapes, by name, of the tensors whose names begin with `prefix`."""
    return {name.removeprefix(prefix): e.shape for name, e in entries.items() if name.startswith(prefix)}
