"""Watching transfers of this process: when each was posted, needed and there. Without a watch it costs one look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TransferNote(Protocol):
    """One transfer under way, as a watch follows it."""

    def needed(self) -> None:
        """The rank waits from here on."""

    def arrived(self) -> None:
        """The rank goes on."""


class TransferWatch(Protocol):
    """Told of every transfer that this process posts."""

    def posted(self, works: Sequence[Any], carrier: str, axes: tuple[str, ...]) -> TransferNote:
        """Torch's handles; carrier and axes where the transfer runs in the background of layers."""


_watch: TransferWatch | None = None  # not a ContextVar: backward on a GPU runs in a thread of torch's


def noted(works: Sequence[Any], carrier: str = "", axes: tuple[str, ...] = ()) -> TransferNote | None:
    """Tell the watch of a transfer that was just posted."""
    return None if _watch is None else _watch.posted(works, carrier, axes)


def set_watch(watch: TransferWatch | None) -> None:
    """Watch from here on, or no longer."""
    global _watch
    _watch = watch
