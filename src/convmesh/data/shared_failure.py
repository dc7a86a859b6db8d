"""A reader's failure on one rank becomes an error on all of them, instead of a hang."""

from __future__ import annotations

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh
from convmesh.dist.agreement import problems_of
from convmesh.dist.transfer_watch import wait_for
from convmesh.errors import ConvMeshError, DataError


class SharedFailure:
    """Each rank posts whether it can go on, and later all learn whether everyone can."""

    def __init__(self, mesh: OpenMesh) -> None:
        self._size = mesh.mesh.size
        self._group = mesh.on_host("failures") if self._size > 1 else None
        self._error: Exception | None = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def post(self, error: Exception | None) -> None:
        """Tell the others, without waiting for them."""
        self._error = error
        if self._group is not None:
            self._flag.fill_(error is not None)
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def settle(self) -> None:
        """Raise on every rank if any rank posted an error."""
        if self._work is not None:
            wait_for(self._work)
            self._work = None
            if self._flag.item():
                self._raise_together()
        if self._error is not None:
            raise self._error

    def _raise_together(self) -> None:
        assert self._group is not None
        own = None if self._error is None else _told(self._error)
        problems = problems_of(self._group, self._size, own)
        raise DataError(" ".join(problems)) from self._error


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConvMeshError) else f"{type(error).__name__}: {error}"
