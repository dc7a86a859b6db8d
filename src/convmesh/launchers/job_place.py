"""This process's place in its job: `srun`, `mpirun` and `flux run` start ranks without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convmesh.launchers.flux import flux_place
from convmesh.launchers.mpi import hydra_place, open_mpi_place
from convmesh.launchers.slurm import slurm_place

_LAUNCHERS: tuple[Callable[[Mapping[str, str]], dict[str, str]], ...] = (
    # MPI's first: in a job of SLURM `mpirun` starts a process a node by `srun`, whose variables its ranks inherit.
    open_mpi_place,
    hydra_place,
    flux_place,
    slurm_place,
)


def job_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch reads; none outside of a job, or where a launcher such as torchrun set them."""
    if "RANK" in environ:
        return {}
    return next((place for launcher in _LAUNCHERS if (place := launcher(environ))), {})
