"""Ranks compare values that must be equal on all of them, so that a mistake is one error everywhere, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from convmesh.dist.told_values import values_of_all
from convmesh.errors import DisagreementError

Value = TypeVar("Value")
Tell = Callable[[str, Mapping[int, Sequence[str]]], str | None]


def agree(
    group: dist.ProcessGroup, world_ranks: Sequence[int], what: str, value: str, problem: str | None = None
) -> None:
    """Raise on every rank of `group` if any rank has a `problem`, or if their `value`s differ.

    `world_ranks` are the group's ranks in the order in which error messages number them.
    """
    report = [_digest(value), problem]
    reports = told_by_all(group, world_ranks, report)
    if any(other != [report[0], None] for other in reports.values()):
        raise DisagreementError(_message(what, value, reports))


def agree_on_lists(
    group: dist.ProcessGroup, world_ranks: Sequence[int], what: str, lists: Mapping[str, Sequence[str]], told: Tell
) -> None:
    """Raise on every rank of `group` if a list that several ranks have under one name differs between them.

    `told(name, lists by rank)` says where. Digests travel first, lists only if they differ.
    """
    mine = {name: _digest(str(list(items))) for name, items in lists.items()}
    answers = told_by_all(group, world_ranks, mine)
    names = {name for digests in answers.values() for name in digests}
    differing = sorted(n for n in names if len({digests[n] for digests in answers.values() if n in digests}) > 1)
    if differing:
        name = differing[0]
        shown = told_by_all(group, world_ranks, list(lists[name]) if name in lists else None)
        raise DisagreementError(f"{what}: {told(name, {r: items for r, items in shown.items() if items is not None})}.")


def told_by_all(group: dist.ProcessGroup, world_ranks: Sequence[int], value: Value) -> dict[int, Value]:
    """The values of all ranks, by their number in error messages."""
    values: list[Value] = values_of_all(group, len(world_ranks), value)
    # torch sorts the ranks of a group.
    places = sorted(range(len(world_ranks)), key=world_ranks.__getitem__)
    return dict(sorted(zip(places, values, strict=True)))


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:12]


def problems_of(group: dist.ProcessGroup, size: int, problem: str | None) -> list[str]:
    """The problems of all ranks of `group`, the same list on each of them."""
    return sorted({text for text in values_of_all(group, size, problem) if text})


def _message(what: str, value: str, reports: Mapping[int, Sequence[str | None]]) -> str:
    problems = [f"rank {rank}: {text}" for rank, (_, text) in reports.items() if text]
    if problems:
        return f"{what}: " + _first(problems, 4)
    holders: dict[str, list[str]] = {}
    for rank, (digest, _) in reports.items():
        holders.setdefault(str(digest), []).append(str(rank))
    differing = "; ".join(f"{digest} on ranks {_first(ranks, 8)}" for digest, ranks in holders.items())
    return f"{what} must be the same on every rank, but digests differ: {differing}. Here: {value}"


def _first(items: list[str], most: int) -> str:
    more = f" (and {len(items) - most} more)" if len(items) > most else ""
    return ", ".join(items[:most]) + more
