"""The supervisor of one host: runs generations of ranks, one after another, until the run is done or beyond help."""

from __future__ import annotations

import threading

from convmesh.supervise.generation import Generation
from convmesh.supervise.journal import Event, Kind
from convmesh.supervise.outcome import FAILURES, Ending, Outcome
from convmesh.supervise.patience import Patience
from convmesh.supervise.policy import Job, Policy
from convmesh.supervise.signals import hearing
from convmesh.supervise.slots import Slots
from convmesh.supervise.telling import Telling
from convmesh.supervise.world import World, free_port


class Supervisor:
    """Runs a job on local ranks; `run` returns its exit status."""

    def __init__(self, job: Job, policy: Policy) -> None:
        self._job, self._policy = job, policy
        self._slots = Slots(policy.ranks, policy.seconds_backoff)
        self._patience, self._telling = Patience(policy), Telling(job.folder)
        self._group: Generation | None = None
        self._signal, self._woken = 0, threading.Event()
        self._left: tuple[int, ...] = ()
        """Slots that go on after a loss; one that comes back before they have started must wait for a checkpoint."""
        self._refused: set[int] = set()
        """Numbers of ranks for which there is no plan."""

    def run(self) -> int:
        """Run until the job is done, is told to stop, or fails for good."""
        status, again = None, False
        with hearing(self._hear):
            while status is None:
                self._woken.wait(self._slots.seconds_until(self._policy.min_ranks))
                status = 128 + self._signal if self._signal else self._generation(again)
                again = True
        return status

    def _hear(self, number: int) -> None:
        self._signal = number
        self._woken.set()
        if self._group is not None:
            self._group.stop(number)

    def _usable(self) -> tuple[int, ...]:
        """Slots for as many ranks as possible now."""
        ready = self._slots.ready()
        counts = (count for count in range(len(ready), 0, -1) if count not in self._refused)
        return ready[: next(counts, 1)]

    def _generation(self, again: bool) -> int | None:
        """Run ranks in the available slots; the job's exit status if that is the end of it."""
        slots = self._left or self._usable()
        self._left = ()
        world = World(len(slots), self._policy.ranks, slots, port=free_port())
        group = self._group = Generation(world, self._job.line(again), self._policy.seconds_timeout)
        try:
            if self._signal:  # heard while the ranks were being started
                group.stop(self._signal)
            outcome = group.wait(lambda: self._look(group))
            self._telling.flush(group.owns_folder)
            return self._concluded(group, outcome)
        finally:
            self._group = None
            group.close()

    def _look(self, group: Generation) -> bool:
        """Between two checks of the ranks: have them make room if slots are back."""
        self._telling.flush(group.owns_folder)
        if len(self._usable()) > group.world.ranks:
            group.ask_for_room()
        return False

    def _concluded(self, group: Generation, outcome: Outcome) -> int | None:
        """What a generation's end means for the job."""
        if outcome.ending is Ending.DONE:
            return 0
        if self._signal:
            if outcome.ending in FAILURES:
                self._tell(group, "stopped", f"stopped by signal {self._signal}, with what was saved before", 0)
            return 128 + self._signal
        if outcome.ending is Ending.MADE_ROOM:
            self._tell(group, "grown", "stops for ranks that are back", len(self._usable()))
            return None
        if outcome.ending is Ending.REFUSED and self._can_shrink(group):
            self._refused.add(group.world.ranks)
            self._tell(group, "shrunk", f"no plan fits {group.world.ranks} ranks", len(self._usable()))
            return None
        return self._after_loss(group, outcome) if outcome.ending in FAILURES else outcome.status

    def _can_shrink(self, group: Generation) -> bool:
        """Whether a refusal may be due to the number of ranks: the run was accepted with more of them."""
        world = group.world
        return self._policy.min_ranks < world.ranks < world.wanted and group.began < 0

    def _after_loss(self, group: Generation, outcome: Outcome) -> int | None:
        for rank in outcome.ranks:
            self._slots.lose(group.slot_of(rank))
        if why := self._patience.lost(outcome, group.step_of_all, group.began):
            self._tell(group, "failed", f"{outcome.reason}; {why}", 0)
            return outcome.status
        usable, fewest = self._usable(), self._policy.min_ranks
        self._left = usable if len(usable) >= fewest else ()
        with_whom = f"with {len(usable)} of {self._policy.ranks} ranks from the last checkpoint"
        awaited = "a rank is" if fewest == 1 else f"{fewest} ranks are"
        how = with_whom if self._left else f"from the last checkpoint when {awaited} back"
        self._tell(group, "lost", f"{outcome.reason}; goes on {how}", max(len(usable), fewest))
        return None

    def _tell(self, group: Generation, kind: Kind, what: str, ranks: int) -> None:
        self._telling.tell(Event(kind, what, group.step, group.world.ranks, ranks))


def supervise(job: Job, policy: Policy) -> int:
    """Run a job on local ranks and keep it alive; its exit status."""
    return Supervisor(job, policy).run()
