"""The folder of checkpoints: one folder per step, made complete in one rename.

A crash at any moment leaves complete checkpoints and folders whose names begin with a dot, which the next save removes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from convmesh.checkpoint.durable import remove, rename, sync_folder, write_file
from convmesh.checkpoint.manifest import NAME, Manifest, read_manifest
from convmesh.errors import CheckpointError

LATEST = "latest"
_INCOMPLETE, _REPLACED, _DELETED, _DRAFT = ".incomplete-", ".replaced-", ".deleted-", f".{LATEST}"


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A complete checkpoint; without `serial` its manifest is damaged."""

    step: int
    path: Path
    serial: int | None


def incomplete(folder: Path, step: int) -> Path:
    """Where the ranks write a checkpoint."""
    return folder / f"{_INCOMPLETE}{step}"


def paths_by_step(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step. One that was being replaced counts until its successor is in place."""
    names = [path for path in folder.iterdir() if (path / NAME).is_file()] if folder.is_dir() else []
    replaced = {_step(path.name.removeprefix(_REPLACED)): path for path in names if path.name.startswith(_REPLACED)}
    by_step = {**replaced, **{_step(path.name): path for path in names}}
    return {step: by_step[step] for step in sorted(step for step in by_step if step is not None)}


def newest_first(folder: Path) -> list[CompleteCheckpoint]:
    """Complete checkpoints in the order to try them: damaged manifests first, since they may be the newest."""
    complete = [CompleteCheckpoint(step, path, _serial(path)) for step, path in paths_by_step(folder).items()]
    return sorted(complete, key=lambda each: (each.serial is None, each.serial or 0, each.step), reverse=True)


def next_serial(folder: Path) -> int:
    """The serial of the next checkpoint."""
    return 1 + max((each.serial or 0 for each in newest_first(folder)), default=0)


def commit(folder: Path, manifest: Manifest, keep: int | None, damaged: set[int]) -> None:
    """Turn the files that all ranks have written into a checkpoint, update `latest`, remove old checkpoints.

    In this order, each operation durable before the next, so that `latest` and the newest `keep` are always complete.
    """
    _recover(folder)
    draft, final = incomplete(folder, manifest.step), folder / str(manifest.step)
    for path in [path for path in draft.iterdir() if path.name not in manifest.files]:
        remove(path)  # left by an attempt that died, perhaps with more ranks
    write_file(draft / NAME, [manifest.to_json().encode()])
    sync_folder(draft)
    _put_in_place(draft, final)
    write_file(folder / _DRAFT, [f"{manifest.step}\n".encode()])
    rename(folder / _DRAFT, folder / LATEST)
    _remove_old(folder, keep, damaged - {manifest.step})


def abandon(folder: Path, step: int) -> None:
    """Free the space of a checkpoint that failed."""
    draft = incomplete(folder, step)
    if draft.exists():
        remove(draft)


def _recover(folder: Path) -> None:
    """Put back checkpoints whose replacement was interrupted."""
    for step, path in paths_by_step(folder).items():
        if path.name.startswith(_REPLACED):
            rename(path, folder / str(step))


def _put_in_place(draft: Path, final: Path) -> None:
    aside = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        remove(aside)
        rename(final, aside)
    rename(draft, final)


def _remove_old(folder: Path, keep: int | None, damaged: set[int]) -> None:
    ranked = sorted(newest_first(folder), key=_rank_among(damaged), reverse=True)
    for old in ranked[keep:] if keep is not None else []:
        rename(old.path, folder / f"{_DELETED}{old.step}")
    for path in [path for path in folder.iterdir() if path.name.startswith((_INCOMPLETE, _REPLACED, _DELETED))]:
        remove(path)


def _rank_among(damaged: set[int]) -> Callable[[CompleteCheckpoint], tuple[bool, int]]:
    """Order for deletion: damaged checkpoints go first."""
    return lambda each: (each.serial is not None and each.step not in damaged, each.serial or 0)


def _step(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else None


def _serial(path: Path) -> int | None:
    try:
        return read_manifest(path).serial
    except CheckpointError:
        return None
