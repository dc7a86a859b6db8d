"""Posting transfers: at once, or, while a step is traced, as nodes of its graph that post them in every replay.

A node holds only a number: what it stands for is in the trace. The order of the nodes is the order of the transfers on
the wire, and nothing may change it, because the other ranks rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx.node import has_side_effect

from convmesh.dist.lost_ranks import await_work, posted
from convmesh.dist.transfer_watch import noted

Tensors = list[torch.Tensor]
Post = Callable[[Tensors, Tensors], Sequence[Any]]
"""Posts sends from the first list and receives into the second, on this rank; returns torch's handles."""


class Launched(Protocol):
    """A transfer under way."""

    def wait(self) -> Tensors:
        """What arrived."""


class Flying:
    """A posted transfer. Keeps its buffers alive."""

    def __init__(self, works: Sequence[Any], sent: Tensors, received: Tensors) -> None:
        self._works, self._sent, self._received = works, sent, received
        self._note = noted(works) if works else None

    def wait(self) -> Tensors:
        if self._note is not None:
            self._note.needed()
        for work in self._works:
            await_work(work)
        if self._note is not None:
            self._note.arrived()
        self._works, self._note = (), None
        return self._received


def launch(post: Post, sent: Tensors, received: Tensors) -> Launched:
    """Post a transfer; `received` may be `sent` itself, for a collective in place. `post` must hold no tensor."""
    trace = _TRACE.get()
    return Flying(posted(post, sent, received), sent, received) if trace is None else trace.launch(post, sent, received)


@dataclass(frozen=True)
class Posting:
    """A transfer of a traced step, to be posted in every replay."""

    post: Post
    rooms: list[tuple[int, torch.dtype, torch.device]] | None
    """Elements, type and device of what it receives; None in place."""

    def run(self, sent: Tensors) -> Flying:
        if self.rooms is None:
            return Flying(posted(self.post, sent, sent), sent, sent)
        received = [torch.empty(elements, dtype=dtype, device=device) for elements, dtype, device in self.rooms]
        return Flying(posted(self.post, sent, received), sent, received)


@dataclass
class TransferTrace:
    """The transfers of a step that is being traced, in order."""

    postings: list[Posting] = field(default_factory=list)

    def launch(self, post: Post, sent: Tensors, received: Tensors) -> Launched:
        number = len(self.postings)
        rooms = None if received is sent else [(t.numel(), t.dtype, t.device) for t in received]
        self.postings.append(Posting(post, rooms))
        return _TracedLaunch(torch.ops.convmesh.post(sent, number), number)


@dataclass(frozen=True)
class _TracedLaunch:
    received: Tensors
    number: int

    def wait(self) -> Tensors:
        arrived: Tensors = torch.ops.convmesh.wait(self.received, self.number)
        return arrived


_TRACE: ContextVar[TransferTrace | None] = ContextVar("transfer trace", default=None)


@contextmanager
def tracing_transfers() -> Iterator[TransferTrace]:
    """In here transfers become nodes of the graph that is being traced, and nothing is sent."""
    trace = TransferTrace()
    token = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(token)


def is_tracing_transfers() -> bool:
    return _TRACE.get() is not None


def is_post(target: Any) -> bool:
    """Whether a node of a traced graph posts a transfer."""
    return target is torch.ops.convmesh.post.default


def is_wait(target: Any) -> bool:
    """Whether a node of a traced graph waits for one."""
    return target is torch.ops.convmesh.wait.default


def _fake_post(sent: Tensors, number: int) -> Tensors:
    trace = _TRACE.get()
    assert trace is not None
    rooms = trace.postings[number].rooms
    if rooms is None:
        return [torch.empty_like(t) for t in sent]
    return [torch.empty(elements, dtype=dtype, device=device) for elements, dtype, device in rooms]


def _fake_wait(received: Tensors, number: int) -> Tensors:
    del number
    return [torch.empty_like(t) for t in received]


_LIBRARY = torch.library.Library("convmesh", "DEF")
_LIBRARY.define("post(Tensor[] sent, int number) -> Tensor[]")
_LIBRARY.define("wait(Tensor[] received, int number) -> Tensor[]")
torch.library.register_fake("convmesh::post", _fake_post, lib=_LIBRARY)
torch.library.register_fake("convmesh::wait", _fake_wait, lib=_LIBRARY)
for _call in (torch.ops.convmesh.post.default, torch.ops.convmesh.wait.default):
    has_side_effect(_call)  # even where nothing reads what arrives
