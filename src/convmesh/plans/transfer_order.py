"""The order of a rank's transfers on each group of ranks: all of them must post the same, or they wait for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from convmesh.plans.program import BACKGROUND, Program
from convmesh.plans.steps import Transfer, Wait

Order = dict[str, list[str]]
"""By group of ranks: its transfers in order, in words that are the same on all of them."""

EQUAL = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
"""Collectives in which every rank sends the same number of bytes."""

ONE_SIDED = frozenset({"reduce", "broadcast"})
"""Collectives in which some ranks send nothing, and programs list only what is sent."""


def transfer_order(program: Program) -> Order:
    """What `program`'s rank posts and receives, by group; messages by sender and receiver."""
    order: Order = {}
    here = program.rank
    for phase, layer, step in program.steps():
        place = f"{phase} of {layer!r}" if layer else phase
        if isinstance(step, Wait):
            for sender, size in step.arriving:
                order.setdefault(_message(sender, here), []).append(f"{place}: {size} bytes")
        elif isinstance(step, Transfer) and step.peer is not None:
            order.setdefault(_message(here, step.peer), []).append(f"{place}: {step.bytes_sent} bytes")
        elif isinstance(step, Transfer) and step.carrier not in ONE_SIDED:
            bytes_sent = f", {step.bytes_sent} bytes" if step.carrier in EQUAL else ""
            group = _group(program, step.axes, in_background=phase in BACKGROUND)
            order.setdefault(group, []).append(f"{place}: {step.carrier}{bytes_sent}")
    return order


def _message(sender: int, receiver: int) -> str:
    return f"messages from rank {sender} to rank {receiver}"


def _group(program: Program, axes: Sequence[str], in_background: bool) -> str:
    ranks = ", ".join(map(str, sorted(program.mesh.group(axes, program.rank))))
    return f"{'gradients' if in_background else 'layers'} of ranks {ranks}"


def first_difference(group: str, lists: Mapping[int, Sequence[str]]) -> str | None:
    """Where the lists of a group's ranks first differ, in words; None if they are equal."""
    (one, first), *others = sorted(lists.items())
    for rank, other in others:
        for number, (mine, theirs) in enumerate(zip_longest(first, other)):
            if mine != theirs:
                return (
                    f"transfer {number} of the {group} is {mine or 'missing'} on rank {one}, but "
                    f"{theirs or 'missing'} on rank {rank}"
                )
    return None
