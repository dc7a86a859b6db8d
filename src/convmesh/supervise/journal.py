"""What happened to a run, in its folder: events.jsonl, and lines of log.txt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from convmesh.system.saving import write_whole

EVENTS, LOG, SUMMARY = "events.jsonl", "log.txt", "summary.json"

Kind = Literal["started", "resumed", "lost", "grown", "shrunk", "stopped", "failed", "balanced"]
_STARTS = ("started", "resumed")


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl."""

    kind: Kind
    what: str
    step: int
    """Steps done when it happened."""
    ranks_before: int
    ranks_after: int


class Journal:
    """The events of a run folder. Several processes may write: each line is one write to the end of the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, event: Event) -> None:
        self._append(EVENTS, json.dumps({"time": time.time(), **asdict(event)}))
        self.log(event.what)
        if event.kind == "failed":
            self._summarise(event)

    def _summarise(self, event: Event) -> None:
        """Ranks write the summary when they end; this is for a run with no ranks left to do so."""
        file = self._folder / SUMMARY
        before = (_parsed(file.read_text(encoding="utf-8")) if file.exists() else None) or {}
        known = {"steps": event.step, "ranks": event.ranks_before, "restarts": self.restarts(), "events": self.events()}
        write_whole(file, json.dumps({**before, **known, "failed": event.what}, indent=2) + "\n")

    def log(self, text: str) -> None:
        """A line of log.txt, with the time."""
        self._append(LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def start(self, resumed: bool, step: int, ranks: int, notes: Iterable[str] = ()) -> None:
        """The first rank begins to train; `notes` say why it begins there."""
        begins = f"resumes after step {step}" if resumed else f"starts at step {step}"
        what = "; ".join([f"{begins} on {_counted(ranks)}", *notes])
        before = self.events()
        kind: Kind = "resumed" if resumed or before else "started"
        self.add(Event(kind, what, step, before[-1]["ranks_after"] if before else 0, ranks))

    def events(self) -> list[dict[str, Any]]:
        """All events so far, oldest first; a line that a crash cut off is left out."""
        file = self._folder / EVENTS
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [event for line in lines if (event := _parsed(line)) is not None]

    def restarts(self) -> int:
        """How often ranks have begun to train again after the first time."""
        return max(0, sum(event["kind"] in _STARTS for event in self.events()) - 1)

    def _append(self, name: str, line: str) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
