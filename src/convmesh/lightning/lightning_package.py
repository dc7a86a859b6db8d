"""Lightning, under the name the user imports it by: `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The same classes twice. A trainer from one does not accept the other's strategy."""


def package_name() -> str:
    """The one that is already imported, else the first that is installed."""
    loaded = [name for name in NAMES if name in sys.modules]
    installed = [name for name in NAMES if find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ImportError("`convmesh.lightning` needs Lightning: pip install 'convmesh[lightning]'.")
    return (loaded or installed)[0]


def part(name: str) -> Any:
    """A module of the package: `part("strategies")`."""
    return importlib.import_module(f"{_NAME}.{name}")


_NAME = package_name()
