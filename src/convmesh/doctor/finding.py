"""One result of an examination."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "missing", "broken"]
"""`missing` is something that ConvMesh can do without; `broken` keeps it from training."""


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do if something is wrong."""

    topic: str
    state: State
    text: str
    advice: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)
