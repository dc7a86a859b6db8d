"""Profiles a net from one step to another; everything attached to it is removed again."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from convmesh.dist.barriers import wait_for_all
from convmesh.dist.stamps import clock_for
from convmesh.dist.transfer_watch import add_watch, remove_watch
from convmesh.profiling.rank_profile import RankProfile, TimedStep
from convmesh.profiling.step_recorder import StepRecorder
from convmesh.runtime import ParallelNet
from convmesh.runtime.followed_net import FollowedNet, is_cut_by_layer


class ProfileSession:
    """Call `attach`, `end_step` after every step, and `detach`, on every rank."""

    def __init__(self, net: ParallelNet, optimizer: Optimizer, accumulate: int = 1) -> None:
        self._net, self._optimizer, self._accumulate = net, optimizer, accumulate
        self._followed: FollowedNet | None = None
        self._steps: list[TimedStep] = []
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Time steps from now on."""
        wait_for_all(self._net.mesh.everyone)
        self._origin = time.perf_counter()
        device = self._net.mesh.device
        self._recorder = StepRecorder(clock_for(device), asks_futures=device.type == "cpu")
        self._net.mesh.traffic.listener = self._recorder.heard
        add_watch(self._recorder)
        self._handles = [
            self._optimizer.register_step_pre_hook(self._entering("update")),
            self._optimizer.register_step_post_hook(self._leave),
        ]
        self._followed = FollowedNet(self._net, self._recorder)

    def _entering(self, phase: str) -> Callable[..., None]:
        """A hook: what ran until now ends here, and a phase of the whole network begins."""

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
        if self._followed is not None:
            self._followed.forget()

    def detach(self) -> None:
        """Leave net, optimiser and transfers as they were."""
        if self._handles:
            remove_watch(self._recorder)
        for handle in self._handles:
            handle.remove()
        self._net.mesh.traffic.listener = None
        if self._followed is not None:
            self._followed.end()
        self._handles, self._followed = [], None

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
            by_layer=is_cut_by_layer(self._net),
            steps=tuple(self._steps),
        )
