"""Reports of failing processes: the layer that was running, and the error itself if the user can act on it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

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
        trouble = Trouble(dist.get_rank(), watcher.running, text, known)
        with (Path(folder) / f"rank{trouble.rank}.trouble").open("wb") as file:
            pickle.dump(trouble, file)
        raise


def troubles(folder: str) -> list[Trouble]:
    """The reports of all processes that failed."""
    return [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("*.trouble"))]
