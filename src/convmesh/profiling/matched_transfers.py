"""The transfers of all ranks side by side: who was last to post each, and what the others lost by waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from convmesh.layout.mesh import Mesh
from convmesh.profiling.rank_profile import TransferTimes

_SECONDS_SEEN = 2e-5
"""A wait shorter than this means that the transfer was already complete."""

Kind = tuple[str, tuple[str, ...], bool, str]
"""Carrier, axes, whether it runs in the background, and a message's name: ranks of a group post transfers of one kind
in the same order."""


@dataclass(frozen=True, slots=True)
class Match:
    """A transfer as one rank saw it: from when all ranks had posted it until it was complete."""

    rank: int
    crossing: TransferTimes
    begin: float
    end: float
    last: int
    """The rank that posted it last."""
    is_timed: bool
    """Whether its end is known, and not only that it came before it was needed."""

    @property
    def idle(self) -> float:
        """The part of the wait until the last rank had posted it."""
        return min(self.stall, max(0.0, self.begin - self.crossing.needed))

    @property
    def exposed(self) -> float:
        """The part of the wait that was the transfer itself."""
        return self.stall - self.idle

    @property
    def hidden(self) -> float:
        """The part of the transfer behind other work."""
        return max(0.0, self.end - self.begin - self.exposed)

    @property
    def stall(self) -> float:
        return self.crossing.arrived - self.crossing.needed


def matched(crossings: Mapping[int, tuple[TransferTimes, ...]], mesh: Mesh) -> dict[int, list[Match]]:
    """Every rank's transfers of one step."""
    sorted_out = {rank: _by_kind(listed) for rank, listed in crossings.items()}
    matches: dict[int, list[Match]] = {rank: [] for rank in crossings}
    for rank, kinds in sorted_out.items():
        for kind, listed in kinds.items():
            group = [member for member in mesh.group(kind[1], rank) if member in sorted_out]
            partners = {member: sorted_out[member].get(kind, []) for member in group}
            # Where ranks post different numbers of messages, it is unknown which belong together.
            same = {member: each for member, each in partners.items() if len(each) == len(listed)}
            matches[rank] += [_match(rank, number, same) for number in range(len(listed))]
    return matches


def _by_kind(crossings: tuple[TransferTimes, ...]) -> dict[Kind, list[TransferTimes]]:
    kinds: dict[Kind, list[TransferTimes]] = defaultdict(list)
    for each in sorted(crossings, key=lambda crossing: crossing.posted):
        kinds[each.carrier, each.axes, each.phase in ("reduction", "update"), each.message].append(each)
    return kinds


def _match(rank: int, number: int, partners: Mapping[int, list[TransferTimes]]) -> Match:
    crossing = partners[rank][number]
    last = max(partners, key=lambda member: partners[member][number].posted)
    waited = crossing.arrived - crossing.needed > _SECONDS_SEEN
    end = crossing.arrived if waited or crossing.done is None else crossing.done
    end = min(end, crossing.arrived)
    begin = min(partners[last][number].posted, end)
    return Match(rank, crossing, begin, end, last, waited or crossing.done is not None)
