"""Watching this process's transfers: when each is posted, needed and complete. Without a watch it costs one lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from convmesh.dist.lost_ranks import await_work


class TransferNote(Protocol):
    """One transfer under way, as a watch follows it."""

    def needed(self) -> None:
        """The rank waits from here on."""

    def arrived(self) -> None:
        """The rank goes on."""


class TransferWatch(Protocol):
    """Told of every transfer that this process posts."""

    beyond_steps: bool
    """Whether to be told also of transfers that are in no program, such as ranks' questions to each other."""

    def posted(self, works: Sequence[Any], carrier: str, axes: tuple[str, ...], message: str = "") -> TransferNote:
        """Given torch's handles, and the carrier and axes if the transfer runs in the background of layers.

        A `message` between stages has a name, the same for sender and receiver.
        """


_watches: list[TransferWatch] = []  # not a ContextVar: backward on a GPU runs in one of torch's threads


@dataclass(frozen=True)
class _SharedNote:
    """One transfer that several watches follow."""

    notes: tuple[TransferNote, ...]

    def needed(self) -> None:
        for note in self.notes:
            note.needed()

    def arrived(self) -> None:
        for note in self.notes:
            note.arrived()


def noted(
    works: Sequence[Any], carrier: str = "", axes: tuple[str, ...] = (), message: str = ""
) -> TransferNote | None:
    """Tell the watches of a transfer that was just posted."""
    return _joined(tuple(watch.posted(works, carrier, axes, message) for watch in _watches)) if _watches else None


def wait_for(work: Any) -> None:
    """Wait for a transfer that is not part of a step, such as a question of ranks to each other."""
    note = _joined(tuple(watch.posted([work], "", ()) for watch in _watches if watch.beyond_steps))
    if note is not None:
        note.needed()
    await_work(work)
    if note is not None:
        note.arrived()


def _joined(notes: tuple[TransferNote, ...]) -> TransferNote | None:
    return (notes[0] if len(notes) == 1 else _SharedNote(notes)) if notes else None


def is_watched() -> bool:
    """Whether anyone watches transfers."""
    return bool(_watches)


def add_watch(watch: TransferWatch) -> None:
    """Watch from here on."""
    _watches[:] = [*(each for each in _watches if each is not watch), watch]


def remove_watch(watch: TransferWatch) -> None:
    """Stop watching."""
    _watches[:] = [each for each in _watches if each is not watch]
