"""Passes stored samples between ranks, part to part.

When a group of ranks needs a sample that another group keeps, each of its ranks is sent the values of its own box.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from convmesh.data.augment import SampleTransform
from convmesh.data.feeding import Feed, sample_box
from convmesh.data.sample_store import SampleStore
from convmesh.data.tensor_spec import Array
from convmesh.dist import OpenMesh
from convmesh.layout import Box, Layout


class Parcelled(NamedTuple):
    """Values that one rank sends another: those of `box` of the sample at a place in the batch."""

    peer: int
    at: int
    box: Box


@dataclass(frozen=True)
class StoredBatch:
    """What a batch takes from the store: places in the batch, the part that keeps each, and how each is transformed."""

    layout: Layout
    indices: tuple[int, ...]
    keepers: dict[int, int]
    transforms: dict[int, SampleTransform | None]


class SlabExchange:
    """One tensor's samples in the store of every rank."""

    def __init__(self, feed: Feed, mesh: OpenMesh, store: SampleStore) -> None:
        self._feed, self._mesh, self._store = feed, mesh, store
        self._group = mesh.on_host(f"samples {feed.name}") if mesh.mesh.size > 1 else None
        self._layout = feed.layout_of(1).with_shape((1, *feed.spec.shape))
        self._axes = self._layout.cuts[0].axes
        self._replicas = [name for name in mesh.mesh.axes if name not in self._layout.axes]
        self._members = self._ranks_by_part()
        shares = [self._held(rank).size for ranks in self._members.values() for rank in ranks]
        self._bytes_slab = max(shares) * feed.spec.dtype.itemsize

    def _ranks_by_part(self) -> dict[int, list[int]]:
        """The ranks of each part of the samples, among this rank's replica: each replica serves itself."""
        mesh, by_part = self._mesh.mesh, defaultdict(list)
        here = mesh.coordinates(self._mesh.rank)
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            if all(at[name] == here[name] for name in self._replicas):
                by_part[mesh.part(self._axes, at)].append(rank)
        return dict(by_part)

    def _held(self, rank: int) -> Box:
        return sample_box(self._layout.box(rank))[1]

    def start(
        self,
        epoch: int,
        indices: tuple[int, ...],
        layout: Layout,
        shard: torch.Tensor,
        threads: ThreadPoolExecutor,
        exchanger: ThreadPoolExecutor,
    ) -> list[Future[None]]:
        """Fill this rank's shard of a batch from the store and, for samples that are not in it, from disk."""
        samples, box = sample_box(layout.box(self._mesh.rank))
        places, readers, kept = shard.numpy(), [], {}
        bounds = layout.cuts[0].partition.bounds
        mine = self._mesh.mesh.part(self._axes, self._mesh.mesh.coordinates(self._mesh.rank))
        for at, index in enumerate(indices):
            part = self._store.keeper(self._feed.name, index)
            if part is None and self._store.admit(
                self._feed.name, index, bisect_right(bounds, at) - 1, self._bytes_slab
            ):
                part = bisect_right(bounds, at) - 1
                readers += [threads.submit(self._keep, index)] if part == mine else []
            if part is not None:
                kept[at] = part
            elif samples.start <= at < samples.stop:
                place = places[at - samples.start, ...]
                readers.append(threads.submit(self._feed.fill, epoch, index, box, place))
        transforms = {at: self._feed.transform(epoch, indices[at]) for at in kept}
        batch = StoredBatch(layout, indices, kept, transforms)
        return [*readers, exchanger.submit(self._exchange, batch, places, list(readers))]

    def _keep(self, index: int) -> None:
        """Read this rank's part of a sample into its memory; if that fails, use zeros, so that no rank waits."""
        held = self._held(self._mesh.rank)
        slab: Array = np.zeros(held.shape, self._feed.spec.dtype)
        self._store.slabs[self._feed.name, index] = slab
        if held.size:
            self._feed.read(index, held, slab)

    def _exchange(self, batch: StoredBatch, places: Array, readers: list[Future[None]]) -> None:
        for reader in readers:
            reader.exception()
        arriving = self._sent_and_received(batch)
        samples, box = sample_box(batch.layout.box(self._mesh.rank))
        for at in range(samples.start, samples.stop):
            if at in batch.keepers and box.size:
                values = self._assembled(batch, at, box, arriving)
                self._feed.put(values, batch.transforms[at], places[at - samples.start, ...])

    def _assembled(self, batch: StoredBatch, at: int, box: Box, arriving: dict[Parcelled, Array]) -> Array:
        """The values to read for a box of the sample at a given place in the batch."""
        needed = _source_box(batch.transforms[at], box)
        slab = self._store.slabs.get((self._feed.name, batch.indices[at]))
        held = self._held(self._mesh.rank)
        if slab is not None and needed.intersect(held) == needed:
            return slab[needed.relative_to(held).slices()]
        values: Array = np.empty(needed.shape, self._feed.spec.dtype)
        if slab is not None and (own := needed.intersect(held)).size:
            values[own.relative_to(needed).slices()] = slab[own.relative_to(held).slices()]
        for parcel, piece in arriving.items():
            if parcel.at == at:
                values[parcel.box.relative_to(needed).slices()] = piece
        return values

    def _sent_and_received(self, batch: StoredBatch) -> dict[Parcelled, Array]:
        if self._group is None:
            return {}
        leaving, arriving = _by_peer(self._sends(batch)), _by_peer(self._receives(batch))
        held = self._held(self._mesh.rank)
        work = []
        for peer, parcels in leaving.items():
            pieces = [
                self._store.slabs[self._feed.name, batch.indices[p.at]][p.box.relative_to(held).slices()].reshape(-1)
                for p in parcels
            ]
            payload = torch.from_numpy(np.concatenate(pieces).view(np.uint8))
            work.append(dist.isend(payload, self._mesh.world_rank(peer), group=self._group))
        landed: dict[int, Array] = {}
        for peer, parcels in arriving.items():
            landed[peer] = np.empty(sum(p.box.size for p in parcels), self._feed.spec.dtype)
            into = torch.from_numpy(landed[peer].view(np.uint8))
            work.append(dist.irecv(into, self._mesh.world_rank(peer), group=self._group))
        for item in work:
            assert item is not None
            item.wait()
        return {p: piece for peer, parcels in arriving.items() for p, piece in _unpacked(parcels, landed[peer])}

    def _sends(self, batch: StoredBatch) -> Iterator[Parcelled]:
        """What others need of the samples that this rank keeps."""
        rank, bounds = self._mesh.rank, batch.layout.cuts[0].partition.bounds
        mine = self._mesh.mesh.part(self._axes, self._mesh.mesh.coordinates(rank))
        held = self._held(rank)
        for at, part in batch.keepers.items():
            for peer in self._members[bisect_right(bounds, at) - 1] if part == mine else ():
                needed = _source_box(batch.transforms[at], sample_box(batch.layout.box(peer))[1])
                if peer != rank and (common := needed.intersect(held)).size:
                    yield Parcelled(peer, at, common)

    def _receives(self, batch: StoredBatch) -> Iterator[Parcelled]:
        """What this rank needs of samples that others keep."""
        samples, box = sample_box(batch.layout.box(self._mesh.rank))
        for at, part in batch.keepers.items():
            if samples.start <= at < samples.stop:
                needed = _source_box(batch.transforms[at], box)
                for peer in self._members[part]:
                    if peer != self._mesh.rank and (common := needed.intersect(self._held(peer))).size:
                        yield Parcelled(peer, at, common)


def _source_box(transform: SampleTransform | None, box: Box) -> Box:
    return box if transform is None else transform.source_box(box)


def _by_peer(parcels: Iterator[Parcelled]) -> dict[int, list[Parcelled]]:
    by_peer: dict[int, list[Parcelled]] = defaultdict(list)
    for parcel in parcels:
        by_peer[parcel.peer].append(parcel)
    return by_peer


def _unpacked(parcels: list[Parcelled], values: Array) -> Iterator[tuple[Parcelled, Array]]:
    start = 0
    for parcel in parcels:
        yield parcel, values[start : start + parcel.box.size].reshape(parcel.box.shape)
        start += parcel.box.size
