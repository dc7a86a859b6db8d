"""Tasks of SLURM's `srun`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from convmesh.launchers.meeting_point import HERE, meeting_point


def slurm_place(environ: Mapping[str, str]) -> dict[str, str]:
    """For a task of `srun`.

    A batch script itself also has SLURM's variables, but no step: there, `srun` or torchrun starts the ranks.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return {}
    ranks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", HERE)
    job = f"slurm {environ.get('SLURM_JOB_ID', '')} {environ['SLURM_STEP_ID']}"
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": environ.get("SLURM_STEP_TASKS_PER_NODE", ranks).split(",")[0].split("(")[0],
        **meeting_point(environ, job, lambda: first_host(nodes)),
    }


def first_host(nodes: str) -> str:
    """The first of `node[01-04,07],gpu5`: SLURM's own spelling of a list of hosts."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return f"{match[1]}{match[2] or ''}{match[3] or ''}" if match else nodes
