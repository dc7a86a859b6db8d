"""Weight gradients: summed over ranks, clipped, scaled, and passed to optimisers."""

from convmesh.gradients.clip import clip_grad_norm_
from convmesh.gradients.layerwise import LAMB, LARS
from convmesh.gradients.scaler import GradScaler
from convmesh.gradients.sharded_optimizer import ShardedOptimizer

__all__ = ["LAMB", "LARS", "GradScaler", "ShardedOptimizer", "clip_grad_norm_"]
