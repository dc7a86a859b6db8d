"""ConvMesh: convolutional networks too big or too slow for one device, with the gradients of one device.

Names load when they are first used, so that planning and `--help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convmesh.dist import OpenMesh, dry_mesh, init, open_mesh
    from convmesh.errors import ConvMeshError, DisagreementError, LayoutError, MeshError, UnsupportedError
    from convmesh.layout import Layout, Mesh
    from convmesh.ops import Sharded, from_local, replicated, shard
    from convmesh.parallel import cut_channels, plan_channels

_HOME = {
    **dict.fromkeys(["OpenMesh", "dry_mesh", "init", "open_mesh"], "convmesh.dist"),
    **dict.fromkeys(
        ["ConvMeshError", "DisagreementError", "LayoutError", "MeshError", "UnsupportedError"], "convmesh.errors"
    ),
    **dict.fromkeys(["Layout", "Mesh"], "convmesh.layout"),
    **dict.fromkeys(["Sharded", "from_local", "replicated", "shard"], "convmesh.ops"),
    **dict.fromkeys(["cut_channels", "plan_channels"], "convmesh.parallel"),
}

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
    "cut_channels",
    "dry_mesh",
    "from_local",
    "init",
    "open_mesh",
    "plan_channels",
    "replicated",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'convmesh' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
