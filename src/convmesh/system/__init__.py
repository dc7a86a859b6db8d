"""Clusters as numbers: devices, memory, links, collectives, power, and where each number comes from."""

from convmesh.system.collectives import ALGORITHMS, PROTOCOLS, Collectives, Method
from convmesh.system.figure import ORIGINS, Figure, Origin
from convmesh.system.files import part_names
from convmesh.system.hardware import FORMATS, MEDIA, Device, LinkLevel, Node, Power
from convmesh.system.placement import Group, Placement, Span
from convmesh.system.system import System

__all__ = [
    "ALGORITHMS",
    "FORMATS",
    "MEDIA",
    "ORIGINS",
    "PROTOCOLS",
    "Collectives",
    "Device",
    "Figure",
    "Group",
    "LinkLevel",
    "Method",
    "Node",
    "Origin",
    "Placement",
    "Power",
    "Span",
    "System",
    "part_names",
]
