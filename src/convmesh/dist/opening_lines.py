"""Opening lines between the ranks of a mesh that share a host.

Every rank listens at a name of its own that is no file, so that nothing is left when ranks are killed. Names and
secrets are told by Gloo; who connects without the secret is turned away.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from convmesh.dist.host_lines import HostLine
from convmesh.dist.told_values import values_of_all
from convmesh.errors import MeshError

VARIABLE = "CONVMESH_HOST_LINES"
"""Environment variable; 0 leaves all messages of this rank to Gloo."""

_BYTES_SECRET = 16

_open: dict[object, dict[int, HostLine]] = {}
"""By job and rank of the job: meshes over the same ranks share lines."""

_asked: set[tuple[object, tuple[int, ...]]] = set()
"""Jobs and members whose lines were opened, as far as they can be."""


def open_lines(group: Any, members: Sequence[int], seconds_timeout: float) -> dict[int, HostLine]:
    """Lines from this rank to those `members` of its job, which all call this, that share its host; by rank there."""
    job, everyone = dist.group.WORLD, tuple(sorted(members))
    _close(besides=job)
    lines = _open.setdefault(job, {})
    if (job, everyone) not in _asked and len(everyone) > 1 and dist.get_backend(group) != "fake":
        with ExitStack() as stack:
            lines.update(_opened(stack, group, everyone, lines, seconds_timeout))
        _asked.add((job, everyone))
    return {rank: lines[rank] for rank in everyone if rank in lines}


def _opened(
    stack: ExitStack, group: Any, members: tuple[int, ...], known: dict[int, HostLine], seconds_timeout: float
) -> dict[int, HostLine]:
    """New lines: later ranks call, earlier ones answer. Whom a rank could not reach is told before anybody waits."""
    here, secret = dist.get_rank(), secrets.token_bytes(_BYTES_SECRET)
    listener = stack.enter_context(_listener(len(members))) if _is_possible() else None
    name = listener.getsockname()[1:].decode() if listener else ""
    told = values_of_all(group, len(members), [_place(), name, secret.hex()])
    listening = dict(zip(members, told, strict=True))
    called: dict[int, socket.socket] = {}
    for rank, (place, there, key) in listening.items():
        if rank < here and rank not in known and name and there and place == _place():
            connection = _called(there, _greeting(here, bytes.fromhex(key)))
            called.update({rank: connection} if connection else {})
    reached = dict(zip(members, values_of_all(group, len(members), sorted(called)), strict=True))
    callers = {rank for rank, others in reached.items() if here in others}
    answered = _answered(listener, callers, secret) if listener else {}
    return {rank: HostLine(each, seconds_timeout) for rank, each in {**called, **answered}.items()}


def _is_possible() -> bool:
    return sys.platform == "linux" and os.environ.get(VARIABLE) != "0"


def _place() -> str:
    """What processes share that can reach such names of each other: a running system, and its network."""
    if not _is_possible():
        return ""
    network = Path("/proc/self/ns/net").stat()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {network.st_dev} {network.st_ino}"


def _listener(callers: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0convmesh-{secrets.token_hex(8)}")
    listener.listen(callers)
    return listener


def _called(name: str, greeting: bytes) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")
        connection.sendall(greeting)
    except OSError:
        connection.close()
        return None
    return connection


def _greeting(rank: int, secret: bytes) -> bytes:
    return rank.to_bytes(8, "little") + secret


def _answered(listener: socket.socket, callers: set[int], secret: bytes) -> dict[int, socket.socket]:
    """The connections of ranks that are known to have called and to have sent their greeting; others are closed."""
    listener.setblocking(False)
    answered: dict[int, socket.socket] = {}
    while set(answered) < callers:
        try:
            connection = listener.accept()[0]
        except OSError as error:
            raise MeshError(f"rank {dist.get_rank()} lost a rank of its host while they connected: {error}") from error
        rank = _greeted(connection, secret)
        if rank in callers - set(answered):
            answered[rank] = connection
        else:
            connection.close()
    return answered


def _greeted(connection: socket.socket, secret: bytes) -> int:
    """The rank that has called; -1 for a stranger."""
    connection.setblocking(False)
    try:
        greeting = connection.recv(8 + _BYTES_SECRET)
    except OSError:
        return -1
    return int.from_bytes(greeting[:8], "little") if hmac.compare_digest(greeting[8:], secret) else -1


def _close(besides: object = None) -> None:
    """Close the lines of jobs that are over."""
    for job in [job for job in _open if job is not besides]:
        for line in _open.pop(job).values():
            line.close()
        _asked.difference_update([asked for asked in _asked if asked[0] is job])


# Processes that a rank starts would hold its ends open when it is gone, and nobody would learn of that.
os.register_at_fork(after_in_child=_close)
