"""The manifest of a checkpoint: which file holds which box of which tensor, and everything that is not a tensor."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from convmesh.checkpoint.manifest_text import problem_in
from convmesh.errors import CheckpointError
from convmesh.layout import Box, Span

VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class SavedBox:
    """A box of a tensor, and where its values are."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class SavedTensor:
    """A tensor: its global shape, its type as safetensors names it, and its disjoint pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SavedBox, ...]

    @property
    def is_complete(self) -> bool:
        return sum(piece.box.size for piece in self.pieces) == math.prod(self.shape)


@dataclass(frozen=True)
class FileDigest:
    """A file's size and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the values of its tensors."""

    step: int
    serial: int
    """Numbers a folder's checkpoints in order of saving. Steps may go back: a run can continue from an older one."""
    saved_at: str
    world: int
    mesh: dict[str, int]
    plan: str
    """SHA-256 of the plan's text."""
    versions: dict[str, str]
    files: dict[str, FileDigest]
    tensors: dict[str, SavedTensor]
    shared: dict[str, str]
    """Further names of weights, each with the name under which its values are saved."""
    optimizer: dict[str, Any] | None
    state: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The manifest's text, which carries its own digest."""
        tensors = {name: _plain(entry) for name, entry in self.tensors.items()}
        plain = {"version": VERSION, **asdict(replace(self, tensors={})), "tensors": tensors}
        plain = json.loads(json.dumps(plain))  # as it will be read: keys are strings
        return json.dumps({**plain, "sha256": _digest(plain)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder; refused if it is damaged or of another version."""
    path = folder / NAME
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {NAME}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not JSON.") from None
    if not isinstance(plain, dict) or plain.pop("sha256", None) != _digest(plain):
        raise CheckpointError(f"{path} is damaged: its digest differs.")
    if (version := plain.pop("version", None)) != VERSION:
        raise CheckpointError(f"{path} has format version {version}; this ConvMesh reads {VERSION}.")
    if problem := problem_in(plain):
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {problem}.")
    files = {name: FileDigest(**digest) for name, digest in plain["files"].items()}
    return Manifest(**{**plain, "files": files, "tensors": {n: _entry(e) for n, e in plain["tensors"].items()}})


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _plain(entry: SavedTensor) -> dict[str, Any]:
    boxes = [[piece.file, piece.key, [list(span) for span in piece.box.spans]] for piece in entry.pieces]
    return {"shape": list(entry.shape), "dtype": entry.dtype, "boxes": boxes}


def _entry(plain: dict[str, Any]) -> SavedTensor:
    pieces = (SavedBox(file, key, _box(spans)) for file, key, spans in plain["boxes"])
    return SavedTensor(tuple(plain["shape"]), plain["dtype"], tuple(pieces))


def _box(spans: Sequence[Sequence[int]]) -> Box:
    return Box(tuple(Span(start, stop) for start, stop in spans))
