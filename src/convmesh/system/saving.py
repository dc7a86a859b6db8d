"""Saves systems: figures as TOML, measured tables as JSON next to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from convmesh.errors import SystemFileError
from convmesh.system.measured_tables import TABLES
from convmesh.system.writing import written

if TYPE_CHECKING:
    from convmesh.system.system import System


def save(system: System, path: Path) -> Path:
    """Write the system's file and its tables; an existing file stays intact until the new one is complete."""
    if path.suffix != ".toml":
        raise SystemFileError(f"`path` (={str(path)!r}) must end in .toml, such as {path.with_suffix('.toml').name!r}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        named = {key: _save_table(system, key, path) for key in TABLES if getattr(system, key) is not None}
        write_whole(path, written(system, named))
    except OSError as error:
        raise SystemFileError(f"`path` (={str(path)!r}): {error.strerror}.") from None
    return path


def _save_table(system: System, key: str, path: Path) -> str:
    name = f"{path.stem}.{key}.json"
    getattr(system, key).save(path.with_name(name))
    return name


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, so that nobody reads a partial one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
