"""The network of a net as one graph of calls, for those who follow it call by call."""

from __future__ import annotations

from typing import Any

from torch import fx

from convmesh.runtime.direct_engine import DirectEngine
from convmesh.runtime.net import ParallelNet


def traced_calls(net: ParallelNet) -> fx.GraphModule | None:
    """The graph that the net's engine calls; None where a step is compiled whole, or cut into stages."""
    engine = net._running.engine
    return engine.module if isinstance(engine, DirectEngine) else None


def loss_of(net: ParallelNet) -> Any:
    return net._running.engine.loss


def replace_loss(net: ParallelNet, loss: Any) -> None:
    """Compute the same loss by another call."""
    net._running.engine.loss = loss
