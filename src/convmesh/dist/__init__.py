"""Meshes of running processes, exchanges and sums between them."""

from convmesh.dist.collectives import Reduction, all_reduce, copy_over, sum_over, weights_over
from convmesh.dist.exchange import exchange
from convmesh.dist.open_mesh import OpenMesh, dry_mesh, init, open_mesh
from convmesh.dist.step_settings import StepSettings
from convmesh.dist.traffic import Traffic

__all__ = [
    "OpenMesh",
    "Reduction",
    "StepSettings",
    "Traffic",
    "all_reduce",
    "copy_over",
    "dry_mesh",
    "exchange",
    "init",
    "open_mesh",
    "sum_over",
    "weights_over",
]
