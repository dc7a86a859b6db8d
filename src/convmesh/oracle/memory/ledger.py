"""Bytes held over a step: storages by key, each counted once however many holders it has."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "gradients", "optimizer", "activations", "buffers", "batch"]
Key = Hashable


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes held while a layer runs, by kind."""

    phase: str
    layer: str
    held: Mapping[Kind, int]

    @property
    def bytes_held(self) -> int:
        return sum(self.held.values())


class Ledger:
    """The storages that are held, and the moment of the peak."""

    def __init__(self, rounding: int = 1) -> None:
        self._rounding = rounding
        self._sizes: dict[Key, tuple[int, Kind]] = {}
        self._holders: dict[Key, int] = {}
        self._held: dict[Kind, int] = {}
        self.bytes_held = 0
        self.curve: list[tuple[str, str, int]] = []
        """By moment: phase, layer, bytes."""
        self.peak = Moment("", "", {})
        self._bytes_peak = 0
        self._counts = True

    def hold(self, key: Key, size: int, kind: Kind) -> None:
        """Add a holder to a storage; the first call sets its size and kind."""
        if key not in self._sizes:
            rounded = -(-size // self._rounding) * self._rounding
            self._sizes[key] = rounded, kind
            self._held[kind] = self._held.get(kind, 0) + rounded
            self.bytes_held += rounded
        self._holders[key] = self._holders.get(key, 0) + 1

    def again(self, key: Key) -> None:
        """Add a holder to a storage that is already held."""
        self.hold(key, *self._sizes[key])

    def release(self, key: Key) -> None:
        self._holders[key] = self._holders.get(key, 0) - 1
        if not self._holders[key]:
            size, kind = self._sizes.pop(key)
            self._held[kind] -= size
            self.bytes_held -= size
            del self._holders[key]

    def holders(self, key: Key) -> int:
        return self._holders.get(key, 0)

    def size(self, key: Key) -> int:
        return self._sizes[key][0]

    @contextmanager
    def seen(self, counts: bool) -> Iterator[None]:
        """Moments inside the block count towards the peak only if `counts`; tensors are held either way."""
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before

    def moment(self, phase: str, layer: str, more: int = 0) -> None:
        """Record the bytes held while a layer runs, with `more` of its own."""
        if not self._counts:
            return
        total = self.bytes_held + more
        self.curve.append((phase, layer, total))
        if total > self._bytes_peak:
            self._bytes_peak = total
            held = dict(self._held)
            held["buffers"] = held.get("buffers", 0) + more
            self.peak = Moment(phase, layer, held)
