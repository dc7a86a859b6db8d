"""Profiling a net from one step to another: everything that is attached to it is taken off again."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from convmesh.dist.stamps import clock_for
from convmesh.dist.transfer_watch import add_watch, remove_watch
from convmesh.plans.loss_memory import LOSS
from convmesh.profiling.node_timer import BackwardTimer, NodeTimer
from convmesh.profiling.rank_profile import RankProfile, TimedStep
from convmesh.profiling.step_recorder import StepRecorder
from convmesh.runtime import ParallelNet
from convmesh.runtime.traced_calls import loss_of, replace_loss, traced_calls


class ProfileSession:
    """Call `attach`, `end_step` after every step, and `detach`, on every rank."""

    def __init__(self, net: ParallelNet, optimizer: Optimizer, accumulate: int = 1) -> None:
        self._net, self._optimizer, self._accumulate = net, optimizer, accumulate
        self._network = traced_calls(net)
        self._steps: list[TimedStep] = []
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Time steps from here on."""
        dist.barrier()
        self._origin = time.perf_counter()
        device = self._net.mesh.device
        self._recorder = StepRecorder(clock_for(device), asks_futures=device.type == "cpu")
        self._backward = BackwardTimer(self._recorder)
        self._net.mesh.traffic.listener = self._recorder.heard
        add_watch(self._recorder)
        self._handles = [
            self._optimizer.register_step_pre_hook(self._entering("update")),
            self._optimizer.register_step_post_hook(self._leave),
        ]
        if self._network is None:
            self._follow_whole()
        else:
            self._follow_layers()

    def _follow_layers(self) -> None:
        network: Any = self._network
        layers = {node.node: node.layer for node in self._net.program.nodes}
        network.forward = NodeTimer(network, layers, self._recorder, self._backward).run
        self._loss = loss_of(self._net)
        replace_loss(self._net, self._timed_loss)

    def _timed_loss(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.enter(LOSS, "forward")
        loss = self._loss(*args, **kwargs)
        self._recorder.leave()
        self._backward.own(LOSS, loss)
        return loss

    def _follow_whole(self) -> None:
        """Forward is the net's call, backward what follows it until the update."""
        self._handles += [
            self._net.register_forward_pre_hook(self._entering("forward")),
            self._net.register_forward_hook(self._entering("backward")),
        ]

    def _entering(self, phase: str) -> Callable[..., None]:
        """A hook: what ran so far ends here, and a phase of the whole network begins."""

        def enter(*told: Any) -> None:
            del told
            self._recorder.leave()
            self._recorder.enter("", phase)

        return enter

    def _leave(self, *told: Any) -> None:
        del told
        self._recorder.leave()

    def end_step(self, step: int, begin: float, end: float, seconds_data: float) -> None:
        """Step `step` took from `begin` to `end` of `time.perf_counter`."""
        self._steps.append(self._recorder.take(step, begin, end, seconds_data))
        self._backward.forget()

    def detach(self) -> None:
        """Leave net, optimiser and transfers as they were."""
        if self._handles:
            remove_watch(self._recorder)
        for handle in self._handles:
            handle.remove()
        self._net.mesh.traffic.listener = None
        if self._network is not None and self._handles:
            del self._network.forward
            replace_loss(self._net, self._loss)
        self._handles = []

    @property
    def profile(self) -> RankProfile:
        """What was measured so far."""
        mesh = self._net.mesh
        return RankProfile(
            rank=mesh.rank,
            mesh=dict(mesh.mesh.axes),
            host=platform.node(),
            origin=self._origin,
            accumulate=self._accumulate,
            by_layer=self._network is not None,
            steps=tuple(self._steps),
        )
