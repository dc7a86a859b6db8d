"""The meshes on which every split operator is tested: 1, 2, 3, 4, 6 and 8 ranks; each dim alone and together."""

import pytest

from convmesh import Mesh

GRIDS = [
    Mesh(),
    Mesh(data=2),
    Mesh(depth=2),
    Mesh(height=2),
    Mesh(width=2),
    Mesh(depth=3),
    Mesh(width=3),
    Mesh(data=2, depth=2),
    Mesh(height=2, width=2),
    Mesh(data=3, height=2),
    Mesh(depth=3, width=2),
    Mesh(depth=2, height=2, width=2),
    Mesh(data=2, height=2, width=2),
    Mesh(width=8),
]

on_grids = pytest.mark.parametrize(
    "mesh", GRIDS, ids=lambda m: "x".join(f"{k}{v}" for k, v in m.axes.items()) or "single"
)
