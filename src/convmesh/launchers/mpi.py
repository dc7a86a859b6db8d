"""Ranks of `mpirun` and `mpiexec`: Open MPI, and MPICH and Intel MPI, whose process manager is Hydra.

ConvMesh sends nothing over MPI; the ranks are ordinary processes that meet as torchrun's do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from convmesh.launchers.meeting_point import HERE, meeting_point, unknown_host
from convmesh.launchers.slurm import first_host


def open_mpi_place(environ: Mapping[str, str]) -> dict[str, str]:
    """For a rank of Open MPI's `mpirun`."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return {}
    counts = {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        "WORLD_SIZE": environ["OMPI_COMM_WORLD_SIZE"],
        "LOCAL_WORLD_SIZE": environ["OMPI_COMM_WORLD_LOCAL_SIZE"],
    }
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return {**counts, **_meeting_point(environ, counts, f"open mpi {job}", "Open MPI", "-x MASTER_ADDR=HOST")}


def hydra_place(environ: Mapping[str, str]) -> dict[str, str]:
    """For a rank of MPICH's or Intel MPI's `mpiexec`. `srun --mpi=pmi2` sets `PMI_RANK` too, but no local rank."""
    if "PMI_RANK" not in environ or "MPI_LOCALRANKID" not in environ:
        return {}
    counts = {
        "RANK": environ["PMI_RANK"],
        "LOCAL_RANK": environ["MPI_LOCALRANKID"],
        "WORLD_SIZE": environ["PMI_SIZE"],
        "LOCAL_WORLD_SIZE": environ["MPI_LOCALNRANKS"],
    }
    is_one_host = counts["WORLD_SIZE"] == counts["LOCAL_WORLD_SIZE"]
    job = f"hydra {_starter() if is_one_host else environ.get('SLURM_JOB_ID', '')}"
    return {**counts, **_meeting_point(environ, counts, job, "mpiexec", "-genv MASTER_ADDR HOST")}


def _meeting_point(
    environ: Mapping[str, str], counts: Mapping[str, str], job: str, launcher: str, flag: str
) -> dict[str, str]:
    def host() -> str:
        if counts["WORLD_SIZE"] == counts["LOCAL_WORLD_SIZE"]:
            return HERE
        if nodes := environ.get("SLURM_JOB_NODELIST"):  # mpirun in a batch script starts with its first node
            return first_host(nodes)
        return unknown_host(launcher, f"say so with `mpirun {flag} …`, with the host's name or address")

    return meeting_point(environ, job, host)


def _starter() -> int:
    """The process that started this host's ranks, perhaps through shells: the first ancestor that is not itself a rank.

    Hydra gives ranks nothing else that they share and that no other job has.
    """
    process = os.getppid()
    while _has_rank(process):
        process = _parent(process)
    return process


def _has_rank(process: int) -> bool:
    try:
        return any(
            entry.startswith(b"PMI_RANK=") for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        )
    except OSError:
        return False


def _parent(process: int) -> int:
    # The name, in brackets, may contain anything; the state and the parent come after it.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
