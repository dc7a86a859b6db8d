"""Sums in two levels, for hosts with several ranks and slow links between them.

One all-reduce over all ranks is a ring on Gloo: of n ranks on h hosts, 2(n−1)/n of a bucket leave each host. Where the
ranks of a host sum parts of the bucket first, and each part is then summed over hosts, it is 2(h−1)/h. The values that
are added are the same; only their order differs.
"""

from __future__ import annotations

from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, start_gather, start_sum, start_sum_scatter
from convmesh.gradients.buckets import Axes, Bucket, Slot, SummedBucket
from convmesh.gradients.reduction import AxesOf, GradientReducer

Levels = tuple[Axes, Axes]
"""The axes, or parts of axes, inside hosts and across them."""


class HierarchicalBucket(SummedBucket):
    """A sum-scatter inside the host, an all-reduce of the received part across hosts, a gather inside the host.

    A bucket's second transfer starts with the next bucket of its kind, `before` being the previous one. Otherwise the
    link between hosts would be idle during backward; by then the first, which stays on the host, is usually done.
    """

    def __init__(
        self,
        slots: list[Slot],
        mesh: OpenMesh,
        axes: Axes,
        dtype: torch.dtype,
        levels: Levels,
        before: HierarchicalBucket | None = None,
    ) -> None:
        self._inside, self._across = levels
        self._parts = mesh.mesh.extent(self._inside)
        self._before = before
        self._is_relayed = False
        super().__init__(slots, mesh, axes, dtype)
        self._part = FlatBuffer(self.elements // self._parts, dtype, mesh)

    def _room(self, values: int) -> int:
        """Parts are equal, so the last may end in padding."""
        return -(-values // self._parts) * self._parts

    def start(self) -> None:
        super().start()
        if self._before is not None and self._before.is_started:
            self._before.relay()

    def _post(self) -> Any:
        return start_sum_scatter(self._part, self.buffer, self.mesh, self._inside)

    def relay(self) -> None:
        if self._is_relayed:
            return
        self._is_relayed = True
        self._flight.wait()
        self._flight = start_sum(self._part, self.mesh, self._across)

    def finish(self) -> None:
        self._flight.wait()
        self._flight = start_gather(self.buffer, self._part, self.mesh, self._inside)
        self._is_relayed = False
        super().finish()


class HierarchicalReducer(GradientReducer):
    """Sums over ranks that lie on several hosts, several on each, in two levels; over others in one, as usual."""

    def __init__(self, mesh: OpenMesh, axes_of: AxesOf, ranks_per_host: int, **options: Any) -> None:
        self._ranks_per_host = ranks_per_host
        self._latest: HierarchicalBucket | None = None
        super().__init__(mesh, axes_of, **options)

    def _bucket(self, slots: list[Slot], axes: Axes, dtype: torch.dtype) -> Bucket:
        levels = self.mesh.mesh.runs(axes, self._ranks_per_host)
        if levels is None or not all(levels):
            return super()._bucket(slots, axes, dtype)
        self._latest = HierarchicalBucket(slots, self.mesh, axes, dtype, levels, before=self._latest)
        return self._latest
