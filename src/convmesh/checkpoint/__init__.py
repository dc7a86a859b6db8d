"""Checkpoints: saved by all ranks behind training, loaded on any mesh, never by pickle."""

from convmesh.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
