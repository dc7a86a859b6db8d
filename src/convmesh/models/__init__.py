"""Reference networks, written from their papers: layer tables, initialisation and parameter counts are tested.

Importing this package does not import torch; creating a network does.
"""

from convmesh.models.catalogue import create, find, names
from convmesh.models.reference import Reference, Small
from convmesh.models.task import Task

__all__ = ["Reference", "Small", "Task", "create", "find", "names"]
