"""The folder of a user's own systems, such as `local`: this machine as measured by `convmesh calibrate`."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL = "local"
"""The system that calibration writes."""

VARIABLE = "CONVMESH_SYSTEMS"
"""The environment variable that names another folder."""


def user_folder() -> Path:
    """$CONVMESH_SYSTEMS, else convmesh/systems in the user's data folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "convmesh" / "systems"


def user_systems() -> dict[str, Path]:
    """The files in that folder, by name."""
    folder = user_folder()
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder.is_dir() else {}
