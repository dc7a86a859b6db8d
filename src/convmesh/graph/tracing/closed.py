"""What keeps a module closed to the tracer: which, why, and where in the user's code."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_PYTHONS_OWN = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Packages of others, which may lie inside the folder of Python's own."""


class ClosedError(Exception):
    """The tracer cannot follow; the message says why."""


class DataDependentError(ClosedError):
    """Python asks for what only the data can tell."""


class FailedError(Exception):
    """The model itself fails on the sample: `layer` could not run."""

    def __init__(self, layer: str, message: str, module: str = "") -> None:
        super().__init__(message)
        shown = f" ({module:.80})" if module else ""
        self.layer = f"layer `{layer}`{shown}" if layer else "the model"


@dataclass(frozen=True)
class Closed:
    """A module that stays closed, with the reason and the line that is to blame."""

    layer: str
    reason: str
    line: str

    @property
    def notice(self) -> str:
        where = f" ({self.line})" if self.line else ""
        whole = f"layer `{self.layer or '(the model)'}` stays closed{where}: {self.reason}."
        return f"{whole} It runs as one node with its samples cut only."


def closed_by(layer: str, error: BaseException) -> Closed:
    """Why `layer` stays closed after tracing it raised `error`."""
    reason = str(error) if isinstance(error, ClosedError) else f"{type(error).__name__}: {_first_line(error)}"
    return Closed(layer, reason, user_line(error))


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code that led to an error: `net.py:12: if x.sum() > 0:`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor of this package, nor of Python itself."""
    if filename.startswith((*_NOT_THE_USERS, "<")):
        return False
    return not filename.startswith(_PYTHONS_OWN) or filename.startswith(_INSTALLED)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
