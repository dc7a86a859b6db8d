"""A program's steps with prices: stretches of computation, posted transfers, and waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from weakref import WeakKeyDictionary

from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.plans.steps import Steps, Transfer, Wait, Work


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch of operators, one after another; the device starts each when the host has launched it."""

    seconds: float
    seconds_host: float = 0.0
    """Seconds in which the host launches all of them, where it runs ahead of the device."""
    seconds_late: float = 0.0
    """From the first launch to the end, on an idle device."""

    @classmethod
    def of(cls, priced: Iterable[tuple[float, float]]) -> Busy:
        """From each operator's seconds on the device and on the host."""
        device = host = late = 0.0
        for seconds, launching in priced:
            host += launching
            late = max(late, host) + seconds
            device += seconds
        return cls(device, host, late)


@dataclass(frozen=True, slots=True)
class Posted:
    """A collective over `axes`, or messages to and from `peers`, posted here."""

    number: int
    carrier: str
    axes: tuple[str, ...]
    seconds: float
    bytes_sent: int
    peers: tuple[int, ...] = ()
    """Senders of the messages."""

    @property
    def is_collective(self) -> bool:
        return self.carrier not in MESSAGES


@dataclass(frozen=True, slots=True)
class Needed:
    """A wait for the transfer posted under a number."""

    number: int


MESSAGES = ("neighbour", "stage")
"""Carriers that go from rank to rank; the others are collectives."""

Piece = Busy | Posted | Needed


@dataclass(frozen=True, slots=True)
class Script:
    """A list of steps as priced pieces, and their totals."""

    pieces: tuple[Piece, ...]
    compute: Estimate
    transfers: Estimate

    @property
    def seconds(self) -> float:
        """With no overlap."""
        return self.compute.value + self.transfers.value

    def launched(self) -> Script:
        """With all launches made: the host takes no time for single operators."""
        pieces = (p if not isinstance(p, Busy) else Busy(p.seconds, 0.0, p.seconds) for p in self.pieces)
        return Script(tuple(pieces), self.compute, self.transfers)

    def stretched(self, factor: float) -> Script:
        """With computation `factor` times as long."""
        pieces = (p if not isinstance(p, Busy) else Busy(*(factor * s for s in astuple(p))) for p in self.pieces)
        return Script(tuple(pieces), self.compute.scaled(factor), self.transfers)


_without_transfers: WeakKeyDictionary[ComputeModel, dict[tuple[int, bool], tuple[Steps, Script]]] = WeakKeyDictionary()
"""Scripts of computations alone, which are the same on all meshes."""


class Pricing:
    """Turns lists of steps into scripts; a list that layers share is priced once."""

    def __init__(self, compute: ComputeModel, transfer: TransferModel) -> None:
        self.compute, self.transfer = compute, transfer
        self._known: dict[tuple[int, int, bool], tuple[Steps, Script]] = {}
        self._anywhere = _without_transfers.setdefault(compute, {})

    def script(self, steps: Steps, rank: int, compiled: bool = False) -> Script:
        key = (id(steps), rank, compiled)
        known = self._known.get(key) or self._anywhere.get((id(steps), compiled))
        if known is None:  # keep the steps, so that no other list gets their id
            known = steps, self._priced(steps, rank, compiled)
            if all(isinstance(step, Work) for step in steps):  # neither the mesh nor the rank matters
                self._anywhere[id(steps), compiled] = known
            else:
                self._known[key] = known
        return known[1]

    def update(self, weights: Iterable[tuple[int, str]]) -> Script:
        """The optimiser for tensors given as elements and type."""
        priced = [
            (self.compute.update(elements, dtype), self.compute.host_update(dtype)) for elements, dtype in weights
        ]
        busy = Busy.of((estimate.value, host) for estimate, host in priced)
        return Script((busy,), Estimate.total(estimate for estimate, _ in priced), Estimate.exactly(0.0))

    def _priced(self, steps: Steps, rank: int, compiled: bool) -> Script:
        batches = _batches(steps)
        pieces: list[Piece] = []
        computed: list[Estimate] = []
        sent: list[Estimate] = []
        number = -1
        stretch: list[Work] = []
        for step in steps:
            if isinstance(step, Work):
                stretch.append(step)
                continue
            if isinstance(step, Transfer):
                number += 1
            posted = self._pieces(step, number, batches, rank, sent)
            if posted and stretch:
                pieces.append(self._busy(stretch, computed, compiled))
                stretch = []
            pieces += posted
        if stretch:
            pieces.append(self._busy(stretch, computed, compiled))
        return Script(tuple(pieces), Estimate.total(computed), Estimate.total(sent))

    def _busy(self, stretch: Iterable[Work], computed: list[Estimate], compiled: bool) -> Busy:
        priced = [self.compute.priced(work, compiled) for work in stretch]
        computed += [estimate for estimate, _ in priced]
        return Busy.of((estimate.value, host) for estimate, host in priced)

    def _pieces(
        self, step: Transfer | Wait, number: int, batches: dict[int, _Batch], rank: int, sent: list[Estimate]
    ) -> list[Piece]:
        if isinstance(step, Wait):
            return self._waits(step, batches, rank, sent)
        if step.peer is None:
            estimate = self.transfer.transfer(step, rank)
            sent.append(estimate)
            return [Posted(number, step.carrier, step.axes, estimate.value, step.bytes_sent)]
        batch = batches[number]
        return [self._exchange(batch, rank, sent)] if number == batch.last else []

    def _waits(self, wait: Wait, batches: dict[int, _Batch], rank: int, sent: list[Estimate]) -> list[Piece]:
        if wait.transfers:
            return [Needed(number) for number in dict.fromkeys(batches[n].last for n in wait.transfers)]
        batch = _Batch(-1 - len(sent), (), wait.arriving)  # a rank that only receives: posted where it waits
        return [self._exchange(batch, rank, sent), Needed(batch.last)]

    def _exchange(self, batch: _Batch, rank: int, sent: list[Estimate]) -> Posted:
        """Messages in both directions at once: the slower direction counts."""
        like = batch.sends[0] if batch.sends else Transfer("neighbour", (), 0)
        incoming = [Transfer(like.carrier, like.axes, size, peer) for peer, size in batch.arriving]
        out, back = self.transfer.exchange(batch.sends, rank), self.transfer.exchange(incoming, rank)
        estimate = max(out, back, key=float)
        sent.append(estimate)
        peers = tuple(peer for peer, _ in batch.arriving)
        size = sum(m.bytes_sent for m in batch.sends)
        return Posted(batch.last, like.carrier, like.axes, estimate.value, size, peers)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Messages that travel together, under the number of the last of them."""

    last: int
    sends: Sequence[Transfer]
    arriving: tuple[tuple[int, int], ...]


def _batches(steps: Steps) -> dict[int, _Batch]:
    """By number: the messages that are waited for together; a message without a wait is alone."""
    transfers = [step for step in steps if isinstance(step, Transfer)]
    batches = {number: _Batch(number, (transfer,), ()) for number, transfer in enumerate(transfers)}
    for wait in (step for step in steps if isinstance(step, Wait) and step.transfers):
        batch = _Batch(max(wait.transfers), [transfers[n] for n in wait.transfers], wait.arriving)
        batches |= dict.fromkeys(wait.transfers, batch)
    return batches
