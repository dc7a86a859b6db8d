"""Sums in two levels, for hosts with several ranks and slow links between them.

One all-reduce over all ranks is a ring on Gloo: with n ranks on h hosts, 2(n−1)/n of a bucket leave each host. If the
ranks of a host first sum parts of the bucket, and each part is then summed over hosts, it is 2(h−1)/h. The same values
are added, only in another order.

A bucket is summed in segments: while one crosses the link, others are summed and gathered inside the hosts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.flat_buffers import FlatBuffer, Flight, start_gather, start_sum, start_sum_scatter
from convmesh.gradients.buckets import Axes, Bucket, Slot, SummedBucket
from convmesh.gradients.reduction import AxesOf, GradientReducer

Levels = tuple[Axes, Axes]
"""The axes, or parts of axes, inside hosts and across them."""


BYTES_SEGMENT = 2 << 20
"""Per segment of what a rank sends to other hosts, on CPUs (benchmarks/hierarchical.md). GPUs send all at once."""


class HierarchicalBucket(SummedBucket):
    """A sum-scatter inside the host, an all-reduce of the received part across hosts, a gather inside the host.

    A bucket's second transfers start with the next bucket of its kind; `before` is the previous one. Otherwise the link
    between hosts would be idle during backward; by then the first transfers, inside the host, are usually done.
    """

    def __init__(
        self,
        slots: list[Slot],
        mesh: OpenMesh,
        axes: Axes,
        dtype: torch.dtype,
        levels: Levels,
        bytes_segment: int,
        before: HierarchicalBucket | None = None,
    ) -> None:
        self._inside, self._across = levels
        self._parts = mesh.mesh.extent(self._inside)
        self._before = before
        self._is_relayed = False
        super().__init__(slots, mesh, axes, dtype)
        received = FlatBuffer(self.elements // self._parts, dtype, mesh)
        sizes = _segments(received.values.numel(), max(1, bytes_segment // dtype.itemsize))
        parts, wholes = received.split(sizes), self.buffer.split([size * self._parts for size in sizes])
        self._segments = [_Segment(*both) for both in zip(wholes, parts, strict=True)]

    def _room(self, values: int) -> int:
        """Parts are equal, so the last may end in padding."""
        return -(-values // self._parts) * self._parts

    def start(self) -> None:
        super().start()
        if self._before is not None and self._before.is_started:
            self._before.relay()

    def _post(self) -> Flight:
        for segment in self._segments:
            segment.flight = start_sum_scatter(segment.part, segment.whole, self.mesh, self._inside)
        return Flight()

    def relay(self) -> None:
        if self._is_relayed:
            return
        self._is_relayed = True
        for segment in self._segments:
            segment.flight.wait()
            segment.flight = start_sum(segment.part, self.mesh, self._across)

    def finish(self) -> None:
        for segment in self._segments:
            segment.flight.wait()
            segment.flight = start_gather(segment.whole, segment.part, self.mesh, self._inside)
        for segment in self._segments:
            segment.flight.wait()
        self._is_relayed = False
        super().finish()


@dataclass
class _Segment:
    """A run of a bucket's values, and this rank's part of their sum."""

    whole: FlatBuffer
    part: FlatBuffer
    flight: Flight = field(default_factory=Flight)


def _segments(elements: int, most: int) -> list[int]:
    """The lengths of the fewest equal runs of at most `most` elements each; the last may be shorter."""
    each = -(-elements // -(-elements // most))
    return [min(each, elements - begin) for begin in range(0, elements, each)]


class HierarchicalReducer(GradientReducer):
    """Sums over several hosts with several ranks each in two levels; other sums take one, as usual."""

    def __init__(
        self, mesh: OpenMesh, axes_of: AxesOf, ranks_per_host: int, bytes_segment: int = 0, **options: Any
    ) -> None:
        self._ranks_per_host = ranks_per_host
        is_measured = (mesh.stands_for if mesh.is_dry else mesh.device.type) == "cpu"
        self._bytes_segment = bytes_segment or (BYTES_SEGMENT if is_measured else sys.maxsize)
        self._latest: HierarchicalBucket | None = None
        super().__init__(mesh, axes_of, **options)

    def _bucket(self, slots: list[Slot], axes: Axes, dtype: torch.dtype) -> Bucket:
        levels = self.mesh.mesh.runs(axes, self._ranks_per_host)
        if levels is None or not all(levels):
            return super()._bucket(slots, axes, dtype)
        self._latest = HierarchicalBucket(
            slots, self.mesh, axes, dtype, levels, self._bytes_segment, before=self._latest
        )
        return self._latest
