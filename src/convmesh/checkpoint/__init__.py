"""Checkpoints: saved by all ranks in the background, loaded on any mesh, never by pickle."""

from convmesh.checkpoint.checkpointer import Checkpointer
from convmesh.checkpoint.torch_format import export_torch_checkpoint, import_torch_checkpoint
from convmesh.checkpoint.weights_export import ExportedWeights, export_weights

__all__ = [
    "Checkpointer",
    "ExportedWeights",
    "export_torch_checkpoint",
    "export_weights",
    "import_torch_checkpoint",
]
