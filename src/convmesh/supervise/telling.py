"""Reports events: on the terminal at once, in the run folder once it is known to belong to this run."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from convmesh.supervise.journal import Event, Journal

_SHOW_CURSOR = "\x1b[?25h"


class Telling:
    """The reports of one supervisor."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder)
        self._owns_folder = False
        self._unwritten: list[Event] = []

    def tell(self, event: Event) -> None:
        """Show an event now, and note it when that is possible."""
        when = f"after step {event.step}: " if event.step else ""  # none if ranks were still setting up
        self.say(f"{when}{event.what}")
        self._unwritten.append(event)
        self.flush(False)

    def say(self, what: str) -> None:
        """Show a message that is not an event of the run."""
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""  # the bar of a killed rank has hidden it
        sys.stderr.write(f"{cursor}convmesh: {what}.\n")

    def flush(self, owns_folder: bool) -> None:
        """A folder that another run uses must stay untouched, so wait until the ranks have taken it."""
        self._owns_folder = self._owns_folder or owns_folder
        while self._unwritten and self._owns_folder:
            with contextlib.suppress(OSError):  # a full disk, which the ranks report
                self._journal.add(self._unwritten.pop(0))
