"""ConvMesh: convolutional networks too big or too slow for one device, with the gradients of one device."""

from convmesh.dist import OpenMesh, init, open_mesh
from convmesh.errors import ConvMeshError, DisagreementError, LayoutError, MeshError, UnsupportedError
from convmesh.layout import Layout, Mesh
from convmesh.ops import Sharded, from_local, replicated, shard

__all__ = [
    "ConvMeshError",
    "DisagreementError",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshError",
    "OpenMesh",
    "Sharded",
    "UnsupportedError",
    "from_local",
    "init",
    "open_mesh",
    "replicated",
    "shard",
]
