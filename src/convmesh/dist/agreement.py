"""Ranks compare values that must be equal on all of them, so that a mistake is one error everywhere, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch.distributed as dist

from convmesh.errors import DisagreementError


def agree(
    group: dist.ProcessGroup, world_ranks: Sequence[int], what: str, value: str, problem: str | None = None
) -> None:
    """Raise on every rank of `group` if any rank has a `problem`, or if their `value`s differ.

    `world_ranks` are the group's ranks in the order in which error messages number them.
    """
    digest = hashlib.sha256(value.encode()).hexdigest()[:12]
    reports: list[tuple[str, str | None]] = [(digest, problem)] * len(world_ranks)
    if len(world_ranks) > 1:
        dist.all_gather_object(reports, (digest, problem), group=group)
    if all(report == (digest, None) for report in reports):
        return
    # torch sorts the ranks of a group.
    places = sorted(range(len(world_ranks)), key=world_ranks.__getitem__)
    raise DisagreementError(_message(what, value, dict(sorted(zip(places, reports, strict=True)))))


def problems_of(group: dist.ProcessGroup, size: int, problem: str | None) -> list[str]:
    """The problems of all ranks of `group`, the same list on each of them."""
    told: list[str | None] = [problem] * size
    if size > 1:
        dist.all_gather_object(told, problem, group=group)
    return sorted({text for text in told if text})


def _message(what: str, value: str, reports: dict[int, tuple[str, str | None]]) -> str:
    problems = [f"rank {rank}: {text}" for rank, (_, text) in reports.items() if text]
    if problems:
        return f"{what}: " + _first(problems, 4)
    holders: dict[str, list[str]] = {}
    for rank, (digest, _) in reports.items():
        holders.setdefault(digest, []).append(str(rank))
    differing = "; ".join(f"{digest} on ranks {_first(ranks, 8)}" for digest, ranks in holders.items())
    return f"{what} must be the same on every rank, but digests differ: {differing}. Here: {value}"


def _first(items: list[str], most: int) -> str:
    more = f" (and {len(items) - most} more)" if len(items) > most else ""
    return ", ".join(items[:most]) + more
