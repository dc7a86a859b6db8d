"""Where the ranks of a job meet: an address and a port that all of them know without communicating."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from convmesh.errors import MeshError

_PORTS = range(20000, 32000)
"""Below the ports that Linux assigns by itself, so that a free one stays free until the first rank takes it."""

HERE = "127.0.0.1"


def port_of(job: str) -> str:
    """A port derived from the job's name: all ranks know it, and jobs on one host rarely share one."""
    return str(_PORTS[zlib.crc32(job.encode()) % len(_PORTS)])


def meeting_point(environ: Mapping[str, str], job: str, host: Callable[[], str]) -> dict[str, str]:
    """What the user set, else the first rank's `host` and the job's port."""
    return {
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host(),
        "MASTER_PORT": environ.get("MASTER_PORT") or port_of(job),
    }


def unknown_host(launcher: str, fix: str) -> str:
    """For launchers that do not tell ranks where rank 0 runs."""
    raise MeshError(
        f"{launcher} started ranks on several hosts, but does not tell them where rank 0 runs, where they are to meet: "
        f"{fix}."
    )
