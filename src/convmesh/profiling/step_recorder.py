"""Records a step as it runs: spans of layers and transfers, as stamps that are read once the step is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from convmesh.dist.stamps import StampClock
from convmesh.dist.traffic import Awaited, Sent
from convmesh.profiling.rank_profile import LayerTime, TimedStep, TransferTimes


@dataclass
class _Flying:
    """A transfer that has been posted."""

    clock: StampClock
    layer: str
    phase: str
    carrier: str
    axes: tuple[str, ...]
    bytes_sent: int
    posted: Any
    begun: Any = None
    ended: Any = None
    done: float | None = None
    message: str = ""

    def needed(self) -> None:
        self.begun = self.clock.stamp()

    def arrived(self) -> None:
        self.ended = self.clock.stamp()

    def complete(self, future: Any) -> None:
        del future
        self.done = time.perf_counter()

    def crossing(self) -> TransferTimes:
        posted, needed, arrived = map(self.clock.seconds, (self.posted, self.begun, self.ended))
        return TransferTimes(
            self.layer, self.phase, self.carrier, self.axes, self.bytes_sent, posted, needed, arrived, self.done,
            self.message,
        )  # fmt: skip


class StepRecorder:
    """Where a step is, and what it has done so far. Layers run one after another, so one place is enough."""

    beyond_steps = False

    def __init__(self, clock: StampClock, asks_futures: bool) -> None:
        self.clock, self._asks_futures = clock, asks_futures
        self._layer, self._phase = "", ""
        self._last = ("", "")
        self._begun: Any = None
        self._messages: list[_Flying] = []
        """Messages from other stages that no layer has used yet."""
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._flying: list[_Flying] = []
        self._sent: list[Sent] = []

    def enter(self, layer: str, phase: str) -> None:
        self._layer, self._phase = layer, phase
        for note in self._messages:
            if note.ended is not None:  # the layer that runs next is the one that needed it
                note.layer, note.phase = layer, phase
        self._messages = [note for note in self._messages if note.ended is None]
        self._begun = self.clock.stamp()

    def leave(self) -> None:
        if self._begun is not None:
            self._spans.append((self._layer, self._phase, self._begun, self.clock.stamp()))
            self._last = self._layer, self._phase
        self._layer = self._phase = ""
        self._begun = None

    def heard(self, event: Sent | Awaited) -> None:
        """Listens to the mesh's traffic for what the next transfer sends."""
        if isinstance(event, Sent):
            self._sent.append(event)

    def posted(self, works: Sequence[Any], carrier: str, axes: tuple[str, ...], message: str = "") -> _Flying:
        """A transfer of the layer that is running, or of the background if it names its carrier."""
        sent, self._sent = self._sent, []
        bytes_sent, now = sum(each.bytes_sent for each in sent), self.clock.stamp()
        if message:
            note = _Flying(self.clock, *self._last, carrier, axes, bytes_sent, now, message=message)
            self._messages += [] if sent else [note]
        elif carrier:
            phase = "update" if self._phase == "update" else "reduction"
            note = _Flying(self.clock, "", phase, carrier, axes, bytes_sent, now)
        else:
            first = sent[0] if sent else Sent("neighbour", 0)
            note = _Flying(self.clock, self._layer, self._phase, first.carrier, first.axes, bytes_sent, now)
        if self._asks_futures and len(works) == 1:
            with suppress(RuntimeError, NotImplementedError):  # messages between two ranks have no future
                works[0].get_future().add_done_callback(note.complete)
        self._flying.append(note)
        return note

    def take(self, step: int, begin: float, end: float, seconds_data: float) -> TimedStep:
        """The step that has just ended."""
        self.clock.settle()
        seconds = self.clock.seconds
        spans = _joined([LayerTime(layer, phase, seconds(a), seconds(b)) for layer, phase, a, b in self._spans])
        crossings = [note.crossing() for note in self._flying if note.ended is not None]
        end = max([end, *(span.end for span in spans)])  # the host may be ahead of its device
        self.forget()
        return TimedStep(
            step, begin, end, seconds_data,
            tuple(span for span in spans if begin <= span.begin and span.end <= end),
            tuple(each for each in crossings if begin <= each.posted and each.arrived <= end),
        )  # fmt: skip

    def forget(self) -> None:
        """Start afresh: what ran between two steps belongs to neither."""
        self._spans, self._flying, self._sent, self._messages = [], [], [], []
        self.clock.begin()


def _joined(spans: list[LayerTime]) -> list[LayerTime]:
    """Join consecutive operators of one layer into one span; what lies between them belongs to the layer, too."""
    joined: list[LayerTime] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.layer, last.phase) == (span.layer, span.phase):
            joined[-1] = LayerTime(span.layer, span.phase, last.begin, span.end)
        else:
            joined.append(span)
    return joined
