"""Tasks of Flux, the resource manager of LLNL's machines."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from convmesh.launchers.meeting_point import HERE, meeting_point, unknown_host


def flux_place(environ: Mapping[str, str]) -> dict[str, str]:
    """For a task of `flux run`."""
    if "FLUX_TASK_RANK" not in environ or "FLUX_JOB_SIZE" not in environ:
        return {}
    ranks, nodes = int(environ["FLUX_JOB_SIZE"]), int(environ.get("FLUX_JOB_NNODES", "1"))
    job = f"flux {environ.get('FLUX_JOB_ID', '')}"
    return {
        "RANK": environ["FLUX_TASK_RANK"],
        "LOCAL_RANK": environ.get("FLUX_TASK_LOCAL_ID", "0"),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(-(-ranks // nodes)),
        **meeting_point(environ, job, lambda: HERE if nodes == 1 else _first_host()),
    }


def _first_host() -> str:
    """The first of the job's hosts, as Flux names them."""
    try:
        asked = subprocess.run(
            ["flux", "hostlist", "--nth=0", "local"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return unknown_host("Flux", "say so with `flux run --env=MASTER_ADDR=HOST …`, with the host's name or address")
    return asked.stdout.strip()
