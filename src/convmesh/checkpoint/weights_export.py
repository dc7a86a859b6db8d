"""The weights of a checkpoint as one safetensors file for a single device, without holding them in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from convmesh.checkpoint.box_reader import BoxReader, check_files, shapes_of
from convmesh.checkpoint.durable import remove, rename, write_file
from convmesh.checkpoint.manifest import NAME, Manifest, read_manifest
from convmesh.checkpoint.restoring import WEIGHTS
from convmesh.checkpoint.step_folders import newest_first
from convmesh.checkpoint.tensor_file import TYPES, Stored, header_of, in_file_order
from convmesh.errors import CheckpointError, CheckpointWarning
from convmesh.layout.runs import boxes_of_run

_BYTES_AT_ONCE = 1 << 24
SUBFOLDER = "checkpoints"
"""Of a run's folder."""


@dataclass(frozen=True)
class ExportedWeights:
    """What was written."""

    step: int
    path: Path
    tensors: int
    bytes_size: int


def export_weights(run: str | Path, output: str | Path, step: int | None = None) -> ExportedWeights:
    """Write the weights of a run's newest checkpoint, or that of `step`, to one file; needs no ranks.

    `run` is a run's folder, its folder of checkpoints, or one checkpoint. A plain model loads the file with
    `model.load_state_dict(safetensors.torch.load_file(path))`.
    """
    reader = _good_one(_candidates(Path(run), step))
    names = _names(reader.manifest)
    shapes = shapes_of(reader.manifest.tensors, WEIGHTS)
    kinds = {name: TYPES[reader.manifest.tensors[f"{WEIGHTS}{first}"].dtype] for name, first in names.items()}
    stored = in_file_order([Stored(name, kinds[name], shapes[first]) for name, first in names.items()])
    path = Path(output)
    draft = path.with_name(f".{path.name}.incomplete")
    try:
        size = write_file(draft, _chunks(reader, stored, names))
        rename(draft, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from None
    finally:
        remove(draft)
    return ExportedWeights(reader.manifest.step, path, len(stored), size)


def _names(manifest: Manifest) -> dict[str, str]:
    """All names in a single device's dictionary, each with the name under which its values are saved."""
    weights = shapes_of(manifest.tensors, WEIGHTS)
    if unknown := [name for name, first in manifest.shared.items() if first not in weights]:
        raise CheckpointError(f"step {manifest.step} is no checkpoint of ours: it has no values of {unknown[0]!r}.")
    return {**{name: name for name in weights}, **manifest.shared}


def _candidates(run: Path, step: int | None) -> list[Path]:
    """Checkpoints, newest first."""
    if (run / NAME).is_file():
        by_step = {read_manifest(run).step: run}
    else:
        folder = run / SUBFOLDER if (run / SUBFOLDER).is_dir() else run
        by_step = {each.step: each.path for each in newest_first(folder)}
    if not by_step:
        raise CheckpointError(f"`run` (={str(run)!r}) has no checkpoint; it must be a run's folder or a checkpoint.")
    if step is not None and step not in by_step:
        known = ", ".join(map(str, sorted(by_step)))
        raise CheckpointError(f"`step` (={step}) is not in {str(run)!r}; there are {known}.")
    return list(by_step.values()) if step is None else [by_step[step]]


def _good_one(paths: list[Path]) -> BoxReader:
    """The first checkpoint whose files are intact."""
    for path in paths:
        try:
            manifest = read_manifest(path)
            check_files(path, manifest.files.items())
            return BoxReader(path, manifest)
        except CheckpointError as error:
            if path == paths[-1]:
                raise
            told = f"checkpoint {path.name} cannot be used: {error} The one before is taken instead."
            warnings.warn(told, CheckpointWarning, stacklevel=3)
    raise AssertionError("there is at least one path")


def _chunks(reader: BoxReader, stored: list[Stored], names: dict[str, str]) -> Iterator[bytes | memoryview]:
    yield header_of(stored, {"format": "pt"})
    for each in stored:
        at_once = _BYTES_AT_ONCE // each.dtype.itemsize
        size = each.bytes_size // each.dtype.itemsize
        for start in range(0, size, at_once):
            for box in boxes_of_run(each.shape, start, min(size, start + at_once)):
                values = reader.read(f"{WEIGHTS}{names[each.key]}", box, torch.empty(box.shape, dtype=each.dtype))
                yield values.reshape(-1).view(torch.uint8).numpy().data
            reader.release()
