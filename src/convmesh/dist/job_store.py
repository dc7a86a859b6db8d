"""The store at which a job's ranks find each other, served on the network that the job was given and on no other.

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
"""torchrun's own process serves the store of its ranks."""


def job_store(environ: Mapping[str, str], timeout: timedelta) -> Any:
    """This rank's view of it; None where the place to meet is a name, or is served already: that is torch's to find.

    What a host's own name stands for there, on many systems 127.0.1.1, others may not reach; an address is meant.
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
    return dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # as ranks have it whom torch lets meet


def _is_address(place: str) -> bool:
    try:
        ipaddress.ip_address(place)
    except ValueError:
        return False
    return True


def _listening(address: str, port: int) -> socket.socket | None:
    """None if the address is not this host's own, as behind a gateway, or is taken, of which torch tells."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError:
        return None
