"""From a model to its split version."""

from convmesh.parallel.channels import ChannelPlan, cut_channels, plan_channels
from convmesh.parallel.gradients.clip import clip_grad_norm_
from convmesh.parallel.gradients.scaler import GradScaler
from convmesh.parallel.gradients.zero import ShardedOptimizer
from convmesh.parallel.lowering.lower import Lowered, lower
from convmesh.parallel.net import ParallelNet
from convmesh.parallel.parallelize import parallelize
from convmesh.parallel.planning import lower_plan, plan
from convmesh.parallel.predicting import predict
from convmesh.parallel.searching import search

__all__ = [
    "ChannelPlan",
    "GradScaler",
    "Lowered",
    "ParallelNet",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "cut_channels",
    "lower",
    "lower_plan",
    "parallelize",
    "plan",
    "plan_channels",
    "predict",
    "search",
]
