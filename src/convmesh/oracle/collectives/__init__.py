"""What collectives and messages cost on a cluster's links, by the algorithms and protocols that libraries have."""

from convmesh.oracle.collectives.methods import Choice, fastest
from convmesh.oracle.collectives.shape import Crossing, Shape

__all__ = ["Choice", "Crossing", "Shape", "fastest"]
