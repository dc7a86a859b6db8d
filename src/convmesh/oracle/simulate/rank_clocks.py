"""Clocks of ranks that run in parallel: each has a device, and links on which transfers overlap its work.

A max-plus calculation, not an event queue: ranks run their scripts as far as they can, and wait for transfers that
others have not posted yet. Collectives over one set of axes run one after another. Collectives over other axes, those
of gradients and weights, and messages run at the same time: each has its own communicator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from convmesh.oracle.simulate.priced_steps import Busy, Needed, Posted, Script
from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.oracle.simulate.timeline import Interval
from convmesh.plans.program import BACKGROUND

Key = Hashable
_Span = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class ScriptPart:
    """A script that a rank runs; ranks in the same transfers run it under the same key."""

    key: Key
    layer: str
    phase: str
    script: Script
    seconds_host: float = 0.0
    """Seconds of the host before it, apart from launching operators."""
    waits: bool = False
    """Whether the host waits for the device first."""


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for all transfers that an earlier part posted and did not wait for."""

    key: Key


Line = Iterable[ScriptPart | Join]
"""The parts that one rank runs, in order."""


@dataclass(slots=True)
class Clock:
    """A rank's time so far, and how it was spent."""

    now: float = 0.0
    host: float = 0.0
    """When the host has launched everything so far."""
    compute: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    idle: float = 0.0
    intervals: list[Interval] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Open:
    """A transfer that a rank posted and has not waited for."""

    tag: Key
    piece: Posted
    layer: str
    phase: str
    channel: Key
    """The communicator it runs on."""
    computed: float
    """Seconds that the rank had computed by then."""


class Flow:
    """Runs the scripts; `lost` is the share of an overlapped transfer that still lengthens the step."""

    def __init__(self, crowd: Crowd, lost: float = 0.0, lead: float = 0.0) -> None:
        self._crowd, self._lost, self._lead = crowd, lost, lead
        self.clocks: dict[int, Clock] = defaultdict(Clock)
        self._posts: dict[tuple[int, Key], tuple[float, float]] = {}
        self._queues: dict[tuple[int, Key], list[Key]] = defaultdict(list)
        self._free: dict[tuple[int, Key], float] = defaultdict(float)
        self._done: dict[tuple[int, Key], _Span] = {}
        self._running: set[int] = set()
        self._moved = False
        self._lenient = False

    def run(self, lines: Mapping[int, Line]) -> dict[int, Clock]:
        """Run one line on each rank; the clocks when all are done."""
        waiting = {rank: self._walk(rank, line) for rank, line in lines.items()}
        self._running = set(waiting)
        while waiting:
            self._moved = False
            for rank, walk in list(waiting.items()):
                if next(walk, self) is self:  # done
                    del waiting[rank]
                    self._running.discard(rank)
                    self._moved = True
            # A rank may wait for a stand-in that never posts its transfer: then it goes on without.
            self._lenient = not self._moved
        return self.clocks

    def _walk(self, rank: int, line: Line) -> Iterator[None]:
        clock = self.clocks[rank]
        clock.now += self._lead
        left: dict[Key, list[_Open]] = {}
        for part in line:
            if isinstance(part, Join):
                for opened in left.pop(part.key, ()):
                    yield from self._need(rank, clock, opened)
                continue
            clock.host = max(clock.host, clock.now if part.waits else 0.0) + part.seconds_host
            opened_here: dict[int, _Open] = {}
            count: Counter[Key] = Counter()
            for piece in part.script.pieces:
                if isinstance(piece, Busy):
                    self._work(rank, clock, part, piece)
                elif isinstance(piece, Posted):
                    opened_here[piece.number] = self._post(rank, clock, part, piece, count)
                elif isinstance(piece, Needed) and piece.number in opened_here:
                    yield from self._need(rank, clock, opened_here.pop(piece.number))
            if opened_here:
                left[part.key] = list(opened_here.values())

    def _work(self, rank: int, clock: Clock, part: ScriptPart, piece: Busy) -> None:
        """The device starts when it is free and the host has launched the work."""
        begin = clock.now
        late = max(0.0, clock.host + piece.seconds_late - begin - piece.seconds)
        clock.now = begin + piece.seconds + late
        clock.host += piece.seconds_host
        clock.compute += piece.seconds
        clock.idle += late
        clock.intervals.append(Interval(rank, "compute", part.layer, part.phase, "compute", begin, clock.now))

    def _post(self, rank: int, clock: Clock, part: ScriptPart, piece: Posted, count: Counter[Key]) -> _Open:
        channel: Key = (piece.axes, part.phase in BACKGROUND) if piece.is_collective else ""
        tag = (part.key, channel, count[channel])
        count[channel] += 1
        self._posts[rank, tag] = clock.now, piece.seconds
        if piece.is_collective:
            self._queues[rank, channel].append(tag)
        self._moved = True
        return _Open(tag, piece, part.layer, part.phase, channel, clock.compute)

    def _need(self, rank: int, clock: Clock, opened: _Open) -> Iterator[None]:
        while (span := self._span(rank, opened)) is None:
            yield
        self._moved = True
        ready, begin, end = span
        stall, taken = max(0.0, end - clock.now), end - begin
        idle = min(stall, max(0.0, ready - clock.now))
        behind = max(0.0, taken - (stall - idle))
        # A transfer that overlapped another wait, not work, slowed nothing down.
        lost = min(behind, clock.compute - opened.computed) * self._lost
        clock.exposed += stall - idle + lost
        clock.hidden += behind - lost
        clock.idle += idle
        clock.now = max(clock.now, end) + lost
        piece = opened.piece
        clock.intervals.append(
            Interval(
                rank, "communication", opened.layer, opened.phase, piece.carrier, begin, end,
                piece.bytes_sent, piece.axes,
            )
        )  # fmt: skip

    def _span(self, rank: int, opened: _Open) -> _Span | None:
        """When all ranks have posted a transfer, its begin and its end; None while one has not."""
        if opened.piece.is_collective:
            return self._collective(rank, opened)
        return self._messages(rank, opened)

    def _messages(self, rank: int, opened: _Open) -> _Span | None:
        """Messages leave when their senders post them, one batch after another."""
        ready = self._posts[rank, opened.tag][0]
        for sender in {self._crowd.stand_in(peer) for peer in opened.piece.peers}:
            post = self._posts.get((sender, opened.tag))
            if post is not None:
                ready = max(ready, post[0])
            elif self._may_post(sender):
                return None
        begin = max(ready, self._free[rank, ""])
        self._free[rank, ""] = begin + opened.piece.seconds
        return ready, begin, self._free[rank, ""]

    def _collective(self, rank: int, opened: _Open) -> _Span | None:
        """Starts when all ranks of the group have posted it and their earlier collectives there are done."""
        queue = self._queues[rank, opened.channel]
        while (rank, opened.tag) not in self._done:
            if not self._resolve(rank, opened, queue[0]):
                return None
        return self._done[rank, opened.tag]

    def _resolve(self, rank: int, opened: _Open, tag: Key) -> bool:
        by_member = {m: self._posts.get((m, tag)) for m in self._crowd.group(rank, opened.piece.axes)}
        if any(post is None and self._may_post(member) for member, post in by_member.items()):
            return False
        # A member that went on without the others is done with it.
        posts = {m: post for m, post in by_member.items() if post is not None and (m, tag) not in self._done}
        ready = max(posted for posted, _ in posts.values())
        begin = max(ready, *(self._free[member, opened.channel] for member in posts))
        end = begin + max(seconds for _, seconds in posts.values())
        for member in posts:
            self._done[member, tag] = ready, begin, end
            self._free[member, opened.channel] = end
            self._queues[member, opened.channel].remove(tag)
        return True

    def _may_post(self, rank: int) -> bool:
        return rank in self._running and not self._lenient
