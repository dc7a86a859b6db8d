"""Waiting for other ranks, any of which may be gone: the error then says so, whatever this rank was computing."""

from __future__ import annotations

import platform
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from convmesh.dist.host_lines import send_on_while
from convmesh.errors import LostRankError

Posted = TypeVar("Posted")

_SOURCE = re.compile(r"^\[\S+\] ")
"""The place in Gloo's source that raised an error; its advice after the first sentence is no help either."""


def await_work(work: Any) -> None:
    """Wait for one of torch's handles. It fails only because of the other end of the transfer."""
    try:
        send_on_while(work)
        work.wait()
    except RuntimeError as error:
        raise _lost(error) from error


def posted(post: Callable[..., Posted], *args: Any) -> Posted:
    """The result of `post`, which hands a transfer to torch: a connection known to be broken fails at once."""
    try:
        return post(*args)
    except RuntimeError as error:
        raise _lost(error) from error


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """For torch calls that send and wait in one."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> LostRankError:
    told = _SOURCE.sub("", next(iter(str(error).splitlines()), type(error).__name__)).partition(". ")[0]
    return LostRankError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}, on {platform.node()}, lost a rank that it waited for in "
        f"{_operation()}: that one has ended, hangs, or cannot be reached; its own messages say more ({told})"
    )


def _operation() -> str:
    """Our innermost function that is waiting; one outside this folder, which carries all transfers, if there is any."""
    package, carriers = Path(__file__).parents[1], Path(__file__).parent
    places = [(Path(frame.filename), frame) for frame in reversed(traceback.extract_stack())]
    ours = [(file, frame) for file, frame in places if file.is_relative_to(package) and file != Path(__file__)]
    asking = [(file, frame) for file, frame in ours if not file.is_relative_to(carriers)]
    if not ours:
        return "a call from outside"
    file, frame = (asking or ours)[0]
    return f"{frame.name} (convmesh/{file.relative_to(package)}:{frame.lineno})"
