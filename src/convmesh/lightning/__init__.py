"""Lightning's `Trainer` on split networks: `Trainer(strategy=MeshStrategy(plan="auto"))`."""

from convmesh.lightning.mesh_strategy import MeshStrategy

__all__ = ["MeshStrategy"]
