"""Says what this machine has for ConvMesh, what is missing, and what to do about it."""

from convmesh.doctor.examine import examine
from convmesh.doctor.finding import Finding, State

__all__ = ["Finding", "State", "examine"]
