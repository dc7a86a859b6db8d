"""A job step of SLURM as torch describes jobs: `srun python train.py` needs no launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PORTS = range(20000, 40000)
"""Where a job's ranks meet, by the job's number: all of them know it, and jobs on one host rarely share one."""


def slurm_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch reads, for a task of `srun`; none outside of one, or where a launcher set them.

    A batch script itself has SLURM's variables too, but no step: there it is `srun` or torchrun that starts ranks.
    """
    if "RANK" in environ or "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return {}
    ranks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    here = environ.get("SLURM_STEP_TASKS_PER_NODE", ranks).split(",")[0].split("(")[0]
    number = 97 * int(environ["SLURM_STEP_ID"]) + int(environ.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": environ.get("MASTER_ADDR", first_host(nodes)),
        "MASTER_PORT": environ.get("MASTER_PORT", str(_PORTS[number % len(_PORTS)])),
    }


def first_host(nodes: str) -> str:
    """The first of `node[01-04,07],gpu5`: SLURM's own spelling of a list of hosts."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return f"{match[1]}{match[2] or ''}{match[3] or ''}" if match else nodes
