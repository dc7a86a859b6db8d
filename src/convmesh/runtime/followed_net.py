"""Follows the layers of a net while it trains, on any engine."""

from __future__ import annotations

from convmesh.runtime.compiled.compiled_engine import CompiledEngine
from convmesh.runtime.compiled.replay_listener import listen_to_replays
from convmesh.runtime.layer_following import Following, LayerListener
from convmesh.runtime.net import ParallelNet
from convmesh.runtime.pipeline.pipeline_engine import PipelineEngine


class FollowedNet:
    """Tells a listener which layer of a net runs; in a compiled step, which run of operators, named by its layers."""

    def __init__(self, net: ParallelNet, listener: LayerListener) -> None:
        engine = net._running.engine
        layers = {node.node: node.layer for node in net.program.nodes}
        self._is_compiled = not is_cut_by_layer(net)
        # What cannot be traced, a compiled engine runs eagerly.
        followed = engine.eager if isinstance(engine, CompiledEngine) else engine
        self._following = Following(followed, followed.networks, layers, listener)
        if self._is_compiled:
            listen_to_replays(listener)

    def forget(self) -> None:
        """A step is over."""
        self._following.forget()

    def end(self) -> None:
        """Leave the net as it was."""
        self._following.end()
        if self._is_compiled:
            listen_to_replays(None)


def is_cut_by_layer(net: ParallelNet) -> bool:
    """Whether layers run one by one; a compiled step runs several of them at once."""
    engine = net._running.engine
    return not (isinstance(engine, CompiledEngine) or (isinstance(engine, PipelineEngine) and engine.is_compiled))
