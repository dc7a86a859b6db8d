"""Libraries that only some formats need: imported when a file asks for them, missing ones named with the fix."""

from __future__ import annotations

import importlib
from typing import Any

from convmesh.errors import DataError


def library(name: str, purpose: str, extra: str = "data") -> Any:
    """The library `name`, or an error that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{purpose} needs {name}; install it with `pip install 'convmesh[{extra}]'`.") from error
