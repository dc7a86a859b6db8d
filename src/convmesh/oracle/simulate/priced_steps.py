"""A program's steps with prices: stretches of computation, transfers that are posted, and waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.plans.steps import Steps, Transfer, Wait, Work


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch of operators, one after another, each of which the device starts when it was asked for."""

    seconds: float
    seconds_host: float = 0.0
    """What the host needs to ask for all of them, where it goes ahead of the device."""
    seconds_late: float = 0.0
    """From when the host begins to ask to the end, if the device had nothing else to do."""

    @classmethod
    def of(cls, priced: Iterable[tuple[float, float]]) -> Busy:
        """From each operator's seconds on the device and on the host."""
        device = host = late = 0.0
        for seconds, asking in priced:
            host += asking
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
    """From whom messages come."""

    @property
    def is_collective(self) -> bool:
        return self.carrier not in MESSAGES


@dataclass(frozen=True, slots=True)
class Needed:
    """The result of what was posted under a number is needed here."""

    number: int


MESSAGES = ("neighbour", "stage")
"""Carriers that go from rank to rank; the others are collectives."""

Piece = Busy | Posted | Needed


@dataclass(frozen=True, slots=True)
class Script:
    """What one list of steps does, and what it costs in all."""

    pieces: tuple[Piece, ...]
    compute: Estimate
    transfers: Estimate

    @property
    def seconds(self) -> float:
        """With nothing running behind anything else."""
        return self.compute.value + self.transfers.value

    def stretched(self, factor: float) -> Script:
        """With all computation that many times as long."""
        pieces = (p if not isinstance(p, Busy) else Busy(*(factor * s for s in astuple(p))) for p in self.pieces)
        return Script(tuple(pieces), self.compute.scaled(factor), self.transfers)


class Pricing:
    """Turns lists of steps into scripts; lists that layers share are priced once."""

    def __init__(self, compute: ComputeModel, transfer: TransferModel) -> None:
        self.compute, self.transfer = compute, transfer
        self._known: dict[tuple[int, int], tuple[Steps, Script]] = {}

    def script(self, steps: Steps, rank: int) -> Script:
        key = (id(steps), rank)
        if key not in self._known:  # the steps are kept, so that their identity is theirs alone
            self._known[key] = steps, self._priced(steps, rank)
        return self._known[key][1]

    def update(self, weights: Iterable[tuple[int, str]]) -> Script:
        """The optimiser for tensors of so many elements and such a type."""
        found = [(self.compute.update(elements, dtype), self.compute.host_update(dtype)) for elements, dtype in weights]
        busy = Busy.of((estimate.value, host) for estimate, host in found)
        return Script((busy,), Estimate.total(estimate for estimate, _ in found), Estimate.exactly(0.0))

    def _priced(self, steps: Steps, rank: int) -> Script:
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
            found = self._pieces(step, number, batches, rank, sent)
            if found and stretch:
                pieces.append(self._busy(stretch, computed))
                stretch = []
            pieces += found
        if stretch:
            pieces.append(self._busy(stretch, computed))
        return Script(tuple(pieces), Estimate.total(computed), Estimate.total(sent))

    def _busy(self, stretch: Iterable[Work], computed: list[Estimate]) -> Busy:
        found = [(self.compute.work(work), self.compute.host(work)) for work in stretch]
        computed += [estimate for estimate, _ in found]
        return Busy.of((estimate.value, host) for estimate, host in found)

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
        batch = _Batch(-1 - len(sent), (), wait.arriving)  # a rank that only receives: asked for where it waits
        return [self._exchange(batch, rank, sent), Needed(batch.last)]

    def _exchange(self, batch: _Batch, rank: int, sent: list[Estimate]) -> Posted:
        """Messages in both directions at once: the slower one counts."""
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
    """By number: what is waited for together. Messages that nothing waits for go alone."""
    transfers = [step for step in steps if isinstance(step, Transfer)]
    found = {number: _Batch(number, (transfer,), ()) for number, transfer in enumerate(transfers)}
    for wait in (step for step in steps if isinstance(step, Wait) and step.transfers):
        batch = _Batch(max(wait.transfers), [transfers[n] for n in wait.transfers], wait.arriving)
        found |= dict.fromkeys(wait.transfers, batch)
    return found
