"""Reports of failing processes: the layer that was running, and the error itself if the user can act on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from convmesh import errors
from convmesh.errors import ConvMeshError, OperatorError
from convmesh.verification.observe import Watcher


@dataclass(frozen=True)
class Trouble:
    """How a rank failed; `node` is empty outside of forward."""

    rank: int
    node: str
    text: str
    error: ConvMeshError | None


@contextmanager
def told(folder: str, watcher: Watcher) -> Iterator[None]:
    """Write an error to `folder` before it ends this process."""
    try:
        yield
    except Exception as error:
        # An operator that fails here but not in the dry run is a finding about the plan, not a mistake of the user's.
        known = error if isinstance(error, ConvMeshError) and not isinstance(error, OperatorError) else None
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        written = {
            "rank": dist.get_rank(), "node": watcher.running, "text": text,
            "error": known and [_public_kind(known), str(known)],
        }  # fmt: skip
        (Path(folder) / f"rank{dist.get_rank()}.trouble").write_text(json.dumps(written), encoding="utf-8")
        raise


def troubles(folder: str) -> list[Trouble]:
    """The reports of all processes that failed."""
    return [_read(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.trouble"))]


def _read(text: str) -> Trouble:
    written = json.loads(text)
    return Trouble(written["rank"], written["node"], written["text"], _error(*(written["error"] or ("", ""))))


def _public_kind(error: ConvMeshError) -> str:
    """The kind of an error as users see it: operators' own kinds derive from one."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _error(name: str, message: str) -> ConvMeshError | None:
    """One of our errors, from its class and message."""
    kind = getattr(errors, name) if name else None
    return None if kind is None else kind(message)
