"""Batches for a split network: threads read each rank's boxes of the samples, ahead of the steps."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from convmesh.data.augment import Augment
from convmesh.data.feeding import Feed, input_feed, sample_box, target_feed
from convmesh.data.reading_cost import warn_of_cost
from convmesh.data.sample_order import Order
from convmesh.data.sample_store import SampleStore
from convmesh.data.shared_failure import SharedFailure
from convmesh.data.slab_exchange import SlabExchange
from convmesh.data.sources.source import Source
from convmesh.errors import DataError
from convmesh.layout import Layout
from convmesh.runtime import ParallelNet
from convmesh.runtime.placing import carrying


@dataclass
class ComingBatch:
    """A batch on its way: host tensors and the readers that fill them."""

    tensors: list[tuple[torch.Tensor, Layout, torch.dtype]] = field(default_factory=list)
    readers: list[Future[None]] = field(default_factory=list)

    def settled(self) -> Exception | None:
        """The first reader's error, once all readers are done."""
        errors = [reader.exception() for reader in self.readers]
        return next((error for error in errors if isinstance(error, Exception)), None)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        moved = [carrying(t.to(device, dtype, non_blocking=True), layout) for t, layout, dtype in self.tensors]
        return moved[0], moved[1]


class Loader:
    """Yields this rank's shards of every batch, as `net.shard_input` and `net.shard_target` cut them; reads no more.

    Integer inputs become torch's default type and integer targets int64; `dtype` sets another type for floating-point
    values. An error of one rank's reader is raised on every rank, before the step that needs the batch.
    """

    def __init__(
        self,
        source: Source,
        net: ParallelNet,
        order: Order,
        augment: Augment | None = None,
        threads: int = 2,
        prefetch: int = 2,
        store: SampleStore | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if order.samples > len(source):
            raise DataError(f"`order` is for {order.samples} samples, but {source} has {len(source)}.")
        if threads < 1 or prefetch < 1:
            raise DataError(f"`threads` (={threads}) and `prefetch` (={prefetch}) must be at least 1.")
        self.source, self.net, self.order = source, net, order
        self.seconds_waiting = 0.0
        """How long the last step waited for its batch."""
        self.seconds_waiting_total = 0.0
        self._feeds = [input_feed(source, net, augment, dtype), target_feed(source, net, augment, dtype)]
        if net.mesh.rank == 0:  # it knows every rank's part; one warning is enough
            warn_of_cost(source, self._feeds, net.mesh.mesh.size)
        self._prefetch, self._threads = prefetch, threads
        self._failure = SharedFailure(net.mesh)
        self._exchanges = [SlabExchange(feed, net.mesh, store) for feed in self._feeds] if store is not None else []

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank read from storage so far."""
        return self.source.counters.bytes_read

    @property
    def bytes_needed(self) -> int:
        """Bytes that this rank asked storage for so far."""
        return self.source.counters.bytes_needed

    def __len__(self) -> int:
        return self.order.batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of an epoch, starting at batch `start`."""
        return self.batches((epoch, number) for number in range(start, self.order.batches))

    def batches(self, places: Iterable[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches at these places, each an epoch and a number in it; a few are read ahead."""
        threads = ThreadPoolExecutor(self._threads, "convmesh-reader")
        exchanger = ThreadPoolExecutor(1, "convmesh-exchange")  # one, so that ranks exchange batches in one order
        try:
            yield from self._read_ahead(iter(places), threads, exchanger)
        finally:
            # Batches under way are finished: the store counts on them.
            threads.shutdown()
            exchanger.shutdown()

    def _read_ahead(
        self, places: Iterator[tuple[int, int]], threads: ThreadPoolExecutor, exchanger: ThreadPoolExecutor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        coming: deque[ComingBatch] = deque()

        def ask(count: int) -> None:
            for epoch, number in itertools.islice(places, count):
                coming.append(self._asked(epoch, number, threads, exchanger))

        began = time.perf_counter()
        ask(self._prefetch + 1)
        if coming:
            self._failure.post(coming[0].settled())
        while coming:
            self._failure.settle()
            batch = coming.popleft()
            ask(1)
            # The verdict on the next batch travels during this step, so that no rank waits for it.
            if coming:
                self._failure.post(coming[0].settled())
            shards = batch.on(self.net.mesh.device)
            self.seconds_waiting = time.perf_counter() - began
            self.seconds_waiting_total += self.seconds_waiting
            yield shards
            began = time.perf_counter()

    def _asked(
        self, epoch: int, number: int, threads: ThreadPoolExecutor, exchanger: ThreadPoolExecutor
    ) -> ComingBatch:
        """Start reading a batch."""
        indices = self.order.batch(epoch, number)
        batch = ComingBatch()
        for position, feed in enumerate(self._feeds):
            layout = feed.layout_of(len(indices))
            shard = torch.empty(
                layout.box(self.net.mesh.rank).shape,
                dtype=feed.host_dtype,
                pin_memory=self.net.mesh.device.type == "cuda",
            )
            batch.tensors.append((shard, layout, feed.dtype))
            if self._exchanges:
                exchange = self._exchanges[position]
                batch.readers += exchange.start(epoch, indices, layout, shard, threads, exchanger)
            else:
                batch.readers += self._read(feed, epoch, indices, layout, shard, threads)
        return batch

    def _read(
        self,
        feed: Feed,
        epoch: int,
        indices: tuple[int, ...],
        layout: Layout,
        shard: torch.Tensor,
        threads: ThreadPoolExecutor,
    ) -> list[Future[None]]:
        samples, box = sample_box(layout.box(self.net.mesh.rank))
        places = shard.numpy()
        if box.size == 0:
            return []
        return [
            threads.submit(feed.fill, epoch, indices[at], box, places[at - samples.start, ...])
            for at in range(samples.start, samples.stop)
        ]
