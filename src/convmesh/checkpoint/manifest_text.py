"""What a manifest's text must look like, whoever wrote it: a forged one may carry a correct digest."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from convmesh.checkpoint.tensor_file import TYPES

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
FEW_DIMS = 64
"""Torch's limit."""


def _plain_name(name: str) -> str:
    """Refuse paths: one could leave the checkpoint's folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError("must be the name of a file in the checkpoint's folder")
    return name


def _known_type(name: str) -> str:
    if name not in TYPES:
        raise ValueError(f"must be one of {', '.join(TYPES)}")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
Spans = Annotated[list[tuple[Count, Count]], Field(max_length=FEW_DIMS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class FileText(_Strict):
    """A file's size and digest."""

    size: Count
    sha256: str


class TensorText(_Strict):
    """A tensor's pieces: file, key in the file, spans."""

    shape: Annotated[list[Count], Field(max_length=FEW_DIMS)]
    dtype: Annotated[str, AfterValidator(_known_type)]
    boxes: list[tuple[FileName, str, Spans]]


class ManifestText(_Strict):
    """All of a manifest except its version and its own digest."""

    step: Count
    serial: Count
    saved_at: str
    world: Count
    mesh: dict[str, Count]
    plan: str
    versions: dict[str, str]
    files: dict[FileName, FileText]
    tensors: dict[str, TensorText]
    shared: dict[str, str]
    optimizer: dict[str, Any] | None
    state: dict[str, Any]


def problem_in(plain: dict[str, Any]) -> str:
    """The first thing that none of our manifests has; empty if it could be one."""
    try:
        read = ManifestText.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        first = error.errors()[0]
        return f"`{'.'.join(map(str, first['loc']))}`: {first['msg'][0].lower()}{first['msg'][1:]}"
    return next((told for name, tensor in read.tensors.items() if (told := _misfit(name, tensor, read))), "")


def _misfit(name: str, tensor: TensorText, read: ManifestText) -> str:
    """Check sizes before anything allocates memory by them: values must fit into files of known size."""
    for file, _, spans in tensor.boxes:
        inside = len(spans) == len(tensor.shape) and all(
            start <= stop <= extent for (start, stop), extent in zip(spans, tensor.shape, strict=True)
        )
        if not inside:
            return f"`tensors.{name}`: a box is not inside of shape {tensor.shape}"
        if file not in read.files:
            return f"`tensors.{name}`: its file {file!r} is not listed"
    bytes_needed = TYPES[tensor.dtype].itemsize
    for extent in tensor.shape:
        bytes_needed *= extent
    if bytes_needed > sum(read.files[file].size for file in {file for file, _, _ in tensor.boxes}):
        return f"`tensors.{name}`: shape {tensor.shape} is more than its files hold"
    return ""
