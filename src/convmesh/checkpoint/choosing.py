"""Which checkpoint to load: the newest whose files are intact, the same one on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from convmesh.checkpoint.box_reader import BoxReader, check_files
from convmesh.checkpoint.manifest import read_manifest
from convmesh.checkpoint.step_folders import newest_first
from convmesh.dist import OpenMesh
from convmesh.dist.agreement import problems_of
from convmesh.dist.told_values import value_of
from convmesh.errors import CheckpointError, CheckpointWarning, ConvMeshError

Choice = tuple[BoxReader | None, dict[int, str]]
"""The checkpoint to load, if any, and the steps of damaged ones, each with what is wrong."""


def choose(folder: Path, mesh: OpenMesh, step: int | None) -> Choice:
    """The newest good checkpoint, or that of `step`; each rank checks the digests of its share of the files."""
    listed = _listed(folder, mesh)
    if step is not None:
        listed = [each for each in listed if each[0] == step]
        if not listed:
            raise CheckpointError(f"`step` (={step}): there is no such checkpoint in {folder}.")
    damaged: dict[int, str] = {}
    told = ""
    for number, name in listed:
        reader, problems = _checked(folder / name, mesh)
        if not problems:
            return reader, damaged
        told = damaged[number] = f"checkpoint {number} cannot be used: {problems[0]}"
        if mesh.rank == 0 and number != listed[-1][0]:
            warnings.warn(f"{told} The one before is loaded instead.", CheckpointWarning, stacklevel=3)
    if damaged:
        raise CheckpointError(f"{told} There is none to load instead in {folder}.")
    return None, {}


def together(mesh: OpenMesh, work: Callable[[], None]) -> None:
    """Do something on every rank, and raise on all of them if one fails."""
    failure: ConvMeshError | None = None
    try:
        work()
    except ConvMeshError as error:
        failure = error
    problems = _problems(mesh, None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if problems:
        raise CheckpointError(f"another rank cannot load the checkpoint: {problems[0]}")


def _listed(folder: Path, mesh: OpenMesh) -> list[tuple[int, str]]:
    """Checkpoints, newest first, as the first rank lists them: steps and folder names."""
    listed = [(each.step, each.path.name) for each in newest_first(folder)] if mesh.rank == 0 else []
    if mesh.mesh.size > 1:
        listed = [(step, name) for step, name in value_of(mesh.world_rank(0), listed, mesh.everyone)]
    return listed


def _checked(path: Path, mesh: OpenMesh) -> tuple[BoxReader | None, list[str]]:
    """A checkpoint's reader, and the problems that any rank finds with it."""
    reader, problem = None, None
    try:
        reader = BoxReader(path, read_manifest(path))
        check_files(path, list(reader.manifest.files.items())[mesh.rank :: mesh.mesh.size])
    except CheckpointError as error:
        problem = str(error)
    return reader, _problems(mesh, problem)


def _problems(mesh: OpenMesh, problem: str | None) -> list[str]:
    assert mesh.everyone is not None
    return problems_of(mesh.everyone, mesh.mesh.size, problem)
