"""This process's place in its job: `srun`, `mpirun` and `flux run` start ranks without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convmesh.launchers.flux import flux_place
from convmesh.launchers.mpi import hydra_place, open_mpi_place
from convmesh.launchers.slurm import slurm_place

_LAUNCHERS: tuple[Callable[[Mapping[str, str]], dict[str, str]], ...] = (
    # MPI first: in a SLURM job `mpirun` starts one process per node through `srun`, whose variables its ranks inherit.
    open_mpi_place,
    hydra_place,
    flux_place,
    slurm_place,
)


def job_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch reads; none outside a job, or where a launcher such as torchrun has set them."""
    if "RANK" in environ:
        return {}
    return next((place for launcher in _LAUNCHERS if (place := launcher(environ))), {})
