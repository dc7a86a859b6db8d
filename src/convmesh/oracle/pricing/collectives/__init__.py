"""What collectives and messages cost on a cluster's links, by the algorithms and protocols that libraries have."""

from convmesh.oracle.pricing.collectives.group_shape import Crossing, Shape
from convmesh.oracle.pricing.collectives.methods import Choice, fastest

__all__ = ["Choice", "Crossing", "Shape", "fastest"]
