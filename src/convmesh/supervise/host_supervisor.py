"""The supervisor of one of several hosts: runs this host's part of each generation that the coordinator makes."""

from __future__ import annotations

import platform
import time
from typing import Any

from convmesh.supervise.coordinator import BEGUN, HUNG, Coordinator, Heritage
from convmesh.supervise.folder_lock import folder_in_use
from convmesh.supervise.generation import Generation
from convmesh.supervise.journal import Event
from convmesh.supervise.meeting_store import StoreLostError
from convmesh.supervise.outcome import UNWRITABLE, Ending, Outcome
from convmesh.supervise.policy import Job, Policy
from convmesh.supervise.rendezvous import Rendezvous, port_here
from convmesh.supervise.run_token import run_token
from convmesh.supervise.signals import hearing
from convmesh.supervise.slots import Slots
from convmesh.supervise.telling import Telling
from convmesh.supervise.world import World

_SECONDS_PAUSE, _SECONDS_REUNION = 0.1, 5.0
"""How often to look for a new generation, and, while there is none, for others who meet elsewhere."""


class HostSupervisor:
    """Runs a job on the ranks of several hosts; `run` returns its exit status, the same on all of them."""

    def __init__(self, job: Job, policy: Policy, endpoints: str, hosts: int) -> None:
        self._job, self._policy = job, policy
        self._slots = Slots(policy.ranks, policy.seconds_backoff)
        self._telling = Telling(job.folder)
        self._meeting = Rendezvous(endpoints, policy, run_token(job.folder))
        self._coordinator = self._coordinating(hosts)
        self._port = port_here(self._meeting.address)
        self._generation: Generation | None = None
        self._heritage = Heritage(hosts)
        self._has_begun = False
        """Whether there has been a generation."""
        self._reunites_at = time.monotonic() + _SECONDS_REUNION
        self._signal = 0

    def _coordinating(self, hosts: int | Heritage) -> Coordinator | None:
        return Coordinator(self._meeting, self._policy, hosts, self._telling) if self._meeting.serves else None

    def run(self) -> int:
        """Run until the coordinator ends the job, whichever host it is on by then."""
        with hearing(self._hear):
            while True:
                try:
                    return self._run_here()
                except StoreLostError as error:
                    if self._signal:
                        return 128 + self._signal
                    self._move(error)

    def _run_here(self) -> int:
        """Run while supervisors meet at one place."""
        number = self._meeting.get("current") or 0
        while (world := self._await_world(number)) is not None:
            self._take_part(number, world)
            number += 1
        return self._left()

    def _move(self, error: StoreLostError) -> None:
        """Meet elsewhere. Of hosts that cannot reach each other, the one whose ranks have the run folder goes on."""
        self._meeting.move(lambda: not folder_in_use(self._job.folder))
        self._port = port_here(self._meeting.address)
        if self._has_begun:
            self._meeting.set(BEGUN, True)
        heritage = self._heritage
        self._coordinator = self._coordinating(heritage)
        if self._coordinator is not None:
            what = f"{error}, where supervisors met; goes on from the last checkpoint, led by {platform.node()}"
            self._telling.tell(Event("lost", what, heritage.step, heritage.ranks, len(self._slots.ready())))

    def _left(self) -> int:
        """Leave; the job's exit status."""
        status = self._meeting.get("end")
        if status is None:
            status = 128 + self._signal
            if self._coordinator is not None:
                self._meeting.set("end", status)
        self._meeting.leave(0 if self._coordinator is None else self._coordinator.hosts_alive)
        self._meeting.close()
        return int(status)

    def _hear(self, number: int) -> None:
        self._signal = number
        if self._generation is not None:
            self._generation.stop(number)

    def _look(self) -> None:
        self._meeting.beat(0 if self._signal else len(self._slots.ready()), self._port)
        if self._coordinator is not None:
            self._coordinator.look()
            self._reunite(self._coordinator)

    def _reunite(self, coordinator: Coordinator) -> None:
        """Hosts that could not reach each other may meet at two places, and each wait for the others."""
        now = time.monotonic()
        if not coordinator.waits:
            self._reunites_at = now + _SECONDS_REUNION
        elif now >= self._reunites_at:
            if place := self._meeting.give_way():
                self._telling.say(f"goes to {place}, where others meet")
            self._reunites_at = time.monotonic() + _SECONDS_REUNION

    def _await_world(self, number: int) -> Any:
        """The next generation, or None at the end."""
        while not self._signal and self._meeting.get("end") is None:
            self._look()
            if (world := self._meeting.get(f"world/{number}")) is not None:
                return world
            time.sleep(_SECONDS_PAUSE)
        return None

    def _take_part(self, number: int, world: Any) -> None:
        """Run this host's ranks of a generation, or wait for the next one if it has none."""
        self._has_begun = True
        ranks = dict(world["hosts"]).get(self._meeting.member, 0)
        if ranks:
            self._run_ranks(number, world, ranks)
        while not ranks and not self._signal and not self._has_ended(number):
            self._look()
            time.sleep(_SECONDS_PAUSE)

    def _has_ended(self, number: int) -> bool:
        current = self._meeting.get("current") or 0
        return current > number or any(self._meeting.get(key) is not None for key in ("end", f"over/{number}"))

    def _run_ranks(self, number: int, world: Any, ranks: int) -> None:
        first = sum(count for member, count in world["hosts"] if member < self._meeting.member)
        everyone = sum(count for _, count in world["hosts"])
        here = World(
            everyone, world["wanted"], self._slots.ready()[:ranks], first, world["address"], world["port"],
            self._meeting.address, True,
        )  # fmt: skip
        group = self._generation = Generation(here, self._job.line(world["again"]), self._policy.seconds_timeout)
        if self._signal:  # heard while the ranks were being started
            group.stop(self._signal)
        try:
            outcome = group.wait(lambda: self._is_over(number, group))
            if outcome.ending is Ending.ELSEWHERE and self._meeting.get(f"over/{number}") == HUNG:
                outcome = group.hang()
            self._report(number, group, outcome)
        finally:
            self._generation = None
            self._heritage = Heritage(len(world["hosts"]) - 1, world["wanted"], group.step, everyone)
            group.close()
            self._port = port_here(self._meeting.address)

    def _is_over(self, number: int, group: Generation) -> bool:
        self._look()
        self._telling.flush(group.owns_folder)
        if self._meeting.get(f"room/{number}"):
            group.ask_for_room()
        return bool(self._meeting.get(f"over/{number}"))

    def _report(self, number: int, group: Generation, outcome: Outcome) -> None:
        """A rank that ends with an error may only have lost a rank on another host: it keeps its slot."""
        is_own_fault = outcome.ending is Ending.HUNG or outcome.status > 128 or outcome.status == UNWRITABLE
        for rank in outcome.ranks if is_own_fault else ():
            self._slots.lose(group.slot_of(rank))
        self._look()
        told = {
            "ending": outcome.ending.name,
            "status": outcome.status,
            "ranks": outcome.ranks,
            "reason": outcome.reason and f"on {platform.node()}: {outcome.reason}",
        }
        where = {"step": group.step, "step_of_all": group.step_of_all, "began": group.began}
        self._meeting.set(f"report/{number}/{self._meeting.member}", {**told, **where})


def supervise_host(job: Job, policy: Policy, endpoints: str, hosts: int) -> int:
    """Run a job on several hosts, this one among them; its exit status."""
    return HostSupervisor(job, policy, endpoints, hosts).run()
