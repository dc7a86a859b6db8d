"""Seconds of collectives and messages on a cluster's links, by algorithm and protocol."""

from convmesh.oracle.pricing.collectives.group_shape import Crossing, Shape
from convmesh.oracle.pricing.collectives.methods import Choice, fastest

__all__ = ["Choice", "Crossing", "Shape", "fastest"]
