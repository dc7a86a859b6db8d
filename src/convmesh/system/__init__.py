"""Cluster descriptions: devices, memory, links, collectives and power, each number with its origin."""

from convmesh.system.collective_costs import ALGORITHMS, PROTOCOLS, Collectives, Method
from convmesh.system.figure import ORIGINS, Figure, Origin
from convmesh.system.hardware import FORMATS, MEDIA, Device, HostNode, LinkLevel, Power
from convmesh.system.placement import GroupSpan, Placement, RankGroup
from convmesh.system.system import System
from convmesh.system.system_files import part_names

__all__ = [
    "ALGORITHMS",
    "FORMATS",
    "MEDIA",
    "ORIGINS",
    "PROTOCOLS",
    "Collectives",
    "Device",
    "Figure",
    "GroupSpan",
    "HostNode",
    "LinkLevel",
    "Method",
    "Origin",
    "Placement",
    "Power",
    "RankGroup",
    "System",
    "part_names",
]
