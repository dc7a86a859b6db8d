"""Modules that the tracer cannot look into: which, why, and at which line of the user's code."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PYTHONS_OWN = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Installed packages, whose folder may be inside Python's own."""


OWN_GRADIENTS = "it uses a torch.autograd.Function of its own"


class ClosedError(Exception):
    """The tracer cannot follow the forward; the message says why."""


class DataDependentError(ClosedError):
    """Python needs a value that depends on the data."""


class SharedMemoryError(ClosedError):
    """A tensor is changed in place and read under another name."""


class FailedError(Exception):
    """The model itself fails on the sample: `layer` could not run."""

    def __init__(self, layer: str, message: str, module: str = "") -> None:
        super().__init__(message)
        shown = f" ({module:.80})" if module else ""
        self.layer = f"layer `{layer}`{shown}" if layer else "the model"


@dataclass(frozen=True)
class Closed:
    """A module that stays closed, the reason, and the line that causes it."""

    layer: str
    reason: str
    line: str
    looks_at_values: bool = False
    """Whether Python looks at values of tensors: on a part of the batch it may go another way."""
    whole_batch: bool = False
    """Whether a sample's output may depend on other samples."""

    @property
    def notice(self) -> str:
        where = f" ({self.line})" if self.line else ""
        whole = f"layer `{self.layer or '(the model)'}` stays closed{where}: {self.reason}."
        if not self.layer:
            return f"{whole} No plan can cut it."
        if self.whole_batch:
            return f"{whole} It runs as one node, on the whole batch on every rank."
        return f"{whole} It runs as one node, of which only samples can be cut."


def closed_by(layer: str, error: BaseException) -> Closed:
    """Why `layer` stays closed after tracing it raised `error`."""
    reason = str(error) if isinstance(error, ClosedError) else f"{type(error).__name__}: {_first_line(error)}"
    return Closed(layer, reason, user_line(error), isinstance(error, DataDependentError))


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback: `net.py:12: if x.sum() > 0:`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


def is_users(filename: str) -> bool:
    """Whether a file is not torch's, this package's or Python's own."""
    if filename.startswith((*_NOT_THE_USERS, "<")):
        return False
    return not filename.startswith(_PYTHONS_OWN) or filename.startswith(_INSTALLED)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
