"""The store where a job's ranks find each other, served only on the network that the job was given.

torch's own listens on every interface of the first rank's host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Set where torchrun's own process serves its ranks' store."""


def job_store(environ: Mapping[str, str], timeout: timedelta) -> Any:
    """This rank's view of the store; None if the meeting place is a name or is already served, which is left to torch.

    A host's own name may resolve there to an address that others cannot reach, such as 127.0.1.1; an address is exact.
    """
    address, port, rank = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["RANK"])
    if environ.get(_AGENT) == "True" or not _is_address(address):
        return None
    options: dict[str, Any] = {"world_size": int(environ["WORLD_SIZE"]), "timeout": timeout, "multi_tenant": True}
    if rank == 0:
        listener = _listening(address, port)
        if listener is not None:
            options["master_listen_fd"] = listener.detach()
    store = dist.TCPStore(address, port, is_master=rank == 0, **options)  # type: ignore[attr-defined]
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # as if torch had connected the ranks


def _is_address(place: str) -> bool:
    try:
        ipaddress.ip_address(place)
    except ValueError:
        return False
    return True


def _listening(address: str, port: int) -> socket.socket | None:
    """None if the address is not this host's own, as behind a gateway, or is taken, which torch then reports."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError:
        return None
