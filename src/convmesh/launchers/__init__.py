"""Jobs as launchers describe them in the environment, translated into torch's variables."""

from convmesh.launchers.job_place import job_place
from convmesh.launchers.slurm import first_host

__all__ = ["first_host", "job_place"]
