"""Decides the generations of several hosts; runs in the supervisor that serves the rendezvous."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convmesh.supervise.journal import Event
from convmesh.supervise.outcome import FAILURES, LOST_RANK, Ending, Outcome
from convmesh.supervise.patience import Patience
from convmesh.supervise.policy import Policy
from convmesh.supervise.rendezvous import Rendezvous
from convmesh.supervise.telling import Telling

_KILLED = 128
"""Statuses from here on are of ranks that a signal ended; others may have crashed only because of that."""

SECONDS_UNTOLD = 15.0
"""How long to wait for hosts before saying so."""

BEGUN = "begun"
"""The key of the store under which a host says, before its first beat, that ranks of this run have trained before."""

ENDED, HUNG = "ended", "hung"
"""Why a generation is over: after a hang, every host reports where its ranks are."""


@dataclass
class _Host:
    """What the coordinator knows about a host."""

    name: str
    since: float
    beats: int = -1
    slots: int = 0
    address: str = ""
    port: int = 0


@dataclass(frozen=True)
class Heritage:
    """What a coordinator takes over from its predecessor, which was lost with its host."""

    hosts: int
    """How many hosts were left."""
    wanted: int = 0
    """How many ranks the run was started with."""
    step: int = 0
    ranks: int = 0


class Coordinator:
    """`look` reads what hosts wrote and writes what they should do; call it a few times a second."""

    def __init__(self, rendezvous: Rendezvous, policy: Policy, hosts: int | Heritage, telling: Telling) -> None:
        self._meeting, self._policy, self._telling = rendezvous, policy, telling
        self._patience = Patience(policy)
        self._hosts: dict[int, _Host] = {}
        self._number, self._wanted = 0, 0
        if isinstance(hosts, Heritage):
            seconds, self._awaited, self._wanted = policy.seconds_host, hosts.hosts, hosts.wanted
        else:
            seconds, self._awaited = policy.seconds_timeout, hosts
        self._patient_until = time.monotonic() + seconds
        self._tells_at: float | None = time.monotonic() + SECONDS_UNTOLD
        self._members: list[tuple[int, int]] = []
        """Hosts of the running generation and their ranks; none between generations."""
        self._is_over = False

    def look(self) -> None:
        """Do what is due."""
        self._read_beats()
        if self._members:
            self._watch()
        else:
            self._begin()

    @property
    def waits(self) -> bool:
        """Whether no ranks run: hosts are awaited."""
        return not self._members

    @property
    def hosts_alive(self) -> int:
        return len(self._alive())

    @property
    def _ranks(self) -> int:
        return sum(ranks for _, ranks in self._members)

    def _alive(self) -> dict[int, _Host]:
        end = time.monotonic() - self._policy.seconds_host
        return {member: host for member, host in self._hosts.items() if host.since >= end}

    def _read_beats(self) -> None:
        now = time.monotonic()
        for member in range(self._meeting.add("members", 0)):
            seen = self._meeting.get(f"beat/{member}")
            if seen is None:
                continue
            if member not in self._hosts:
                self._hosts[member] = _Host(self._meeting.get(f"member/{member}")["host"], now)
            host = self._hosts[member]
            was_silent = now - host.since > self._policy.seconds_host
            if seen["beats"] > host.beats + was_silent:  # the next one may have been on its way since the link was cut
                host.since = now
                host.beats, host.slots, host.address, host.port = (
                    seen["beats"], seen["slots"], seen["address"], seen["port"],
                )  # fmt: skip

    def _begin(self) -> None:
        """Publish the next generation once enough ranks are here."""
        able = [(member, host) for member, host in self._alive().items() if host.slots]
        ranks = sum(host.slots for _, host in able)
        waits = not self._number and len(able) < self._awaited and time.monotonic() < self._patient_until
        if waits or ranks < max(self._policy.min_ranks, 1):
            self._tell_of_waiting(len(able), ranks)
            return
        self._tells_at = None
        self._wanted = self._wanted or ranks
        self._members, self._is_over = [(member, host.slots) for member, host in able], False
        first = able[0][1]
        place = {"address": first.address, "port": first.port}
        again = self._number > 0 or self._meeting.get(BEGUN) is not None
        world = {"hosts": self._members, "wanted": self._wanted, "again": again, **place}
        self._meeting.set(f"world/{self._number}", world)
        self._meeting.set("current", self._number)

    def _tell_of_waiting(self, hosts: int, ranks: int) -> None:
        """Say so once if it takes long: somebody may have forgotten to start one."""
        if self._tells_at is not None and time.monotonic() >= self._tells_at:
            self._tells_at = None
            awaited = f"{self._awaited} hosts (`--hosts`) and {max(self._policy.min_ranks, 1)} ranks (`--min-ranks`)"
            here = f"{hosts} host{'' if hosts == 1 else 's'} with {ranks} ranks {'is' if hosts == 1 else 'are'} here"
            self._telling.say(f"waits for {awaited}: {here}")

    def _watch(self) -> None:
        """End a generation that has failed; when all its hosts have reported or are gone, decide what comes next."""
        alive = self._alive()
        reports = {member: self._meeting.get(f"report/{self._number}/{member}") for member, _ in self._members}
        gone = [member for member in reports if member not in alive and reports[member] is None]
        told = {member: report for member, report in reports.items() if report is not None}
        failed = [_outcome(each).ending for each in told.values() if _outcome(each).ending in FAILURES]
        if not self._is_over and (gone or failed):
            self._is_over = True
            self._meeting.set(f"over/{self._number}", HUNG if Ending.HUNG in failed else ENDED)
        if len(told) + len(gone) == len(reports):
            self._conclude(told, [self._hosts[member].name for member in gone])
        elif sum(host.slots for host in alive.values()) > self._ranks:
            self._meeting.set(f"room/{self._number}", True)

    def _conclude(self, told: Mapping[int, Any], gone: list[str]) -> None:
        outcomes = [_outcome(each) for each in told.values()]
        failed = [each for each in outcomes if each.ending in FAILURES]
        step = max((each["step"] for each in told.values()), default=0)
        if failed or gone:
            return self._after_loss(failed, gone, told, step)
        ending = max((each for each in outcomes), key=lambda each: each.status)
        if ending.ending is Ending.MADE_ROOM:
            self._tell("grown", "stops for ranks that are back", step)
            return self._next()
        return self._meeting.set("end", ending.status)

    def _after_loss(self, failed: list[Outcome], gone: list[str], told: Mapping[int, Any], step: int) -> None:
        guilty = [each for each in failed if each.status != LOST_RANK] or ([] if gone else failed)
        # First hosts whose ranks hold up the others; of those, the ones whose ranks did not end by themselves.
        guilty.sort(key=lambda each: (not each.ranks, each.status < _KILLED))
        reason = "; ".join([*(f"host {name} is silent" for name in gone), *(each.reason for each in guilty)])
        outcome = Outcome(Ending.HUNG, 1, reason=reason) if gone else guilty[0]
        least = min((each["step_of_all"] for each in told.values()), default=0)
        began = min((each["began"] for each in told.values()), default=-1)
        if why := self._patience.lost(outcome, least, began):
            self._tell("failed", f"{reason}; {why}", step)
            return self._meeting.set("end", outcome.status)
        self._tell("lost", f"{reason}; goes on from the last checkpoint with the ranks left", step)
        return self._next()

    def _tell(self, kind: Any, what: str, step: int) -> None:
        able = sum(host.slots for host in self._alive().values())
        self._telling.tell(Event(kind, what, step, self._ranks, able))

    def _next(self) -> None:
        self._members, self._number = [], self._number + 1
        self._tells_at = time.monotonic() + SECONDS_UNTOLD


def _outcome(report: Mapping[str, Any]) -> Outcome:
    return Outcome(Ending[report["ending"]], report["status"], tuple(report["ranks"]), report["reason"])
