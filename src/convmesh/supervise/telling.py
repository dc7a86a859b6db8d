"""Tells of events: on the terminal at once, in the run folder as soon as that is known to be this run's own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from convmesh.supervise.journal import Event, Journal

_SHOW_CURSOR = "\x1b[?25h"


class Telling:
    """Of one supervisor."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)
        self._owns_folder = False
        self._unwritten: list[Event] = []

    def tell(self, event: Event) -> None:
        """Show an event now, and note it when that is possible."""
        when = f"after step {event.step}: " if event.step else ""  # ranks that were still setting up know of none
        self.say(f"{when}{event.what}")
        self._unwritten.append(event)
        self.flush(False)

    def say(self, what: str) -> None:
        """Show what is no event of the run."""
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""  # the bar of a rank that was killed has hidden it
        sys.stderr.write(f"{cursor}convmesh: {what}.\n")

    def flush(self, owns_folder: bool) -> None:
        """A folder that another run uses must stay as it is, so wait until the ranks have taken it."""
        self._owns_folder = self._owns_folder or owns_folder
        while self._unwritten and self._owns_folder:
            with contextlib.suppress(OSError):  # a full disk, of which the ranks tell
                self._journal.add(self._unwritten.pop(0))
