"""A run's plan for another number of ranks than it was started with."""

from __future__ import annotations

import math

from convmesh.oracle.search.candidates import axes_of, factorisations
from convmesh.plans.presets import STRATEGIES
from convmesh.train.run_config import PlanConfig


def plans_for(config: PlanConfig, ranks: int, wanted: int | None, spatial_dims: int) -> list[PlanConfig]:
    """The plans to try, in this order. The plan itself if it was written for this number of ranks.

    Otherwise a preset keeps its axes, on the mesh nearest to the given one; after that, and where a plan file or a mesh
    fixes more, the oracle searches for the best plan for this number.
    """
    if wanted is None or ranks == wanted:
        return [config]
    searched = config.model_copy(update={"strategy": "auto", "mesh": {}})
    if config.strategy == "auto" or config.strategy not in STRATEGIES:
        return [searched]
    meshes = _nearest(config, ranks, spatial_dims) if config.mesh else [{}]
    return [*(config.model_copy(update={"mesh": mesh}) for mesh in meshes), searched]


def _nearest(config: PlanConfig, ranks: int, spatial_dims: int) -> list[dict[str, int]]:
    """Meshes of `ranks` ranks over the strategy's axes, by how far their axes are from those of the given one."""

    def distance(mesh: dict[str, int]) -> float:
        return sum(abs(math.log(mesh.get(axis, 1) / config.mesh.get(axis, 1))) for axis in {*mesh, *config.mesh})

    axes = tuple(dict.fromkeys((*config.mesh, *axes_of(config.strategy, spatial_dims))))
    meshes = sorted(factorisations(ranks, axes), key=distance)
    return [{axis: size for axis, size in mesh.items() if size > 1} for mesh in meshes]
