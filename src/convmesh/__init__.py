"""ConvMesh: convolutional networks too big or too slow for one device, with the gradients of one device.

Names load when they are first used, so that planning and `--help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from convmesh.processor import avoid_hidden_tiles

if TYPE_CHECKING:
    from convmesh import data, models
    from convmesh.asynchronous.async_weights import AsyncWeights
    from convmesh.asynchronous.claims import Claims
    from convmesh.balance.balancer import Balancer
    from convmesh.balance.fair_shares import MovePolicy
    from convmesh.checkpoint import Checkpointer
    from convmesh.dist import OpenMesh, dry_mesh, init, open_mesh
    from convmesh.errors import (
        CaptureError,
        CaptureWarning,
        CheckpointError,
        CheckpointWarning,
        ConfigError,
        ConvMeshError,
        DataError,
        DataWarning,
        DisagreementError,
        InfeasibleError,
        LabelError,
        LayoutError,
        LostRankError,
        MeshError,
        NonFiniteLossError,
        OpaqueLayerWarning,
        OperatorError,
        OperatorIndexError,
        OperatorRuntimeError,
        OperatorTypeError,
        OperatorValueError,
        PlanError,
        RunError,
        RunsFileError,
        ShapeError,
        SystemFileError,
        UnknownNameError,
        UnsupportedError,
        UnwritableError,
    )
    from convmesh.gradients import LAMB, LARS, GradScaler, ShardedOptimizer, clip_grad_norm_
    from convmesh.layout import Layout, Mesh
    from convmesh.lowering import lower_plan
    from convmesh.lowering.channel_cuts import cut_channels, plan_channels
    from convmesh.measure.calibrate import calibrate
    from convmesh.ops import Sharded, from_local, replicated, shard
    from convmesh.oracle import Anomaly, Assumptions, Prediction, Profile, TimedTransfer, Timeline, find_anomalies
    from convmesh.planner import plan, predict, search
    from convmesh.plans import Plan, Program, Split, load_plan
    from convmesh.runtime import ParallelNet, parallelize
    from convmesh.system import System
    from convmesh.train.run_config import RunConfig
    from convmesh.train.trainer import Intervals, Trainer
    from convmesh.verification import verify

avoid_hidden_tiles()  # before torch computes anything

_HOME = {
    **dict.fromkeys(["OpenMesh", "dry_mesh", "init", "open_mesh"], "convmesh.dist"),
    **dict.fromkeys(
        [
            "CaptureError",
            "CaptureWarning",
            "CheckpointError",
            "CheckpointWarning",
            "ConfigError",
            "ConvMeshError",
            "DataError",
            "DataWarning",
            "DisagreementError",
            "InfeasibleError",
            "LabelError",
            "LayoutError",
            "LostRankError",
            "MeshError",
            "NonFiniteLossError",
            "OpaqueLayerWarning",
            "OperatorIndexError",
            "OperatorRuntimeError",
            "OperatorTypeError",
            "OperatorValueError",
            "OperatorError",
            "PlanError",
            "RunError",
            "RunsFileError",
            "ShapeError",
            "SystemFileError",
            "UnknownNameError",
            "UnsupportedError",
            "UnwritableError",
        ],
        "convmesh.errors",
    ),
    **dict.fromkeys(["Layout", "Mesh"], "convmesh.layout"),
    **dict.fromkeys(
        ["Anomaly", "Assumptions", "Prediction", "Profile", "TimedTransfer", "Timeline", "find_anomalies"],
        "convmesh.oracle",
    ),
    **dict.fromkeys(["Sharded", "from_local", "replicated", "shard"], "convmesh.ops"),
    **dict.fromkeys(["LAMB", "LARS", "GradScaler", "ShardedOptimizer", "clip_grad_norm_"], "convmesh.gradients"),
    "lower_plan": "convmesh.lowering",
    **dict.fromkeys(["cut_channels", "plan_channels"], "convmesh.lowering.channel_cuts"),
    **dict.fromkeys(["plan", "predict", "search"], "convmesh.planner"),
    **dict.fromkeys(["ParallelNet", "parallelize"], "convmesh.runtime"),
    **dict.fromkeys(["Plan", "Program", "Split", "load_plan"], "convmesh.plans"),
    "AsyncWeights": "convmesh.asynchronous.async_weights",
    "Claims": "convmesh.asynchronous.claims",
    "Balancer": "convmesh.balance.balancer",
    "MovePolicy": "convmesh.balance.fair_shares",
    "Checkpointer": "convmesh.checkpoint",
    "System": "convmesh.system",
    "calibrate": "convmesh.measure.calibrate",
    "RunConfig": "convmesh.train.run_config",
    **dict.fromkeys(["Intervals", "Trainer"], "convmesh.train.trainer"),
    "verify": "convmesh.verification",
}

__all__ = [
    "LAMB",
    "LARS",
    "Anomaly",
    "Assumptions",
    "AsyncWeights",
    "Balancer",
    "CaptureError",
    "CaptureWarning",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "Claims",
    "ConfigError",
    "ConvMeshError",
    "DataError",
    "DataWarning",
    "DisagreementError",
    "GradScaler",
    "InfeasibleError",
    "Intervals",
    "LabelError",
    "Layout",
    "LayoutError",
    "LostRankError",
    "Mesh",
    "MeshError",
    "MovePolicy",
    "NonFiniteLossError",
    "OpaqueLayerWarning",
    "OpenMesh",
    "OperatorError",
    "OperatorIndexError",
    "OperatorRuntimeError",
    "OperatorTypeError",
    "OperatorValueError",
    "ParallelNet",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "Program",
    "RunConfig",
    "RunError",
    "RunsFileError",
    "ShapeError",
    "Sharded",
    "ShardedOptimizer",
    "Split",
    "System",
    "SystemFileError",
    "TimedTransfer",
    "Timeline",
    "Trainer",
    "UnknownNameError",
    "UnsupportedError",
    "UnwritableError",
    "calibrate",
    "clip_grad_norm_",
    "cut_channels",
    "data",
    "dry_mesh",
    "find_anomalies",
    "from_local",
    "init",
    "load_plan",
    "lower_plan",
    "models",
    "open_mesh",
    "parallelize",
    "plan",
    "plan_channels",
    "predict",
    "replicated",
    "search",
    "shard",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "models"):
        return importlib.import_module(f"convmesh.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'convmesh' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
