"""What is held at each moment: storages by key, each counted once however many hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weights", "gradients", "optimizer", "activations", "buffers", "batch"]
Key = Hashable


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held when a layer runs, by kind."""

    phase: str
    layer: str
    held: Mapping[Kind, int]

    @property
    def bytes_held(self) -> int:
        return sum(self.held.values())


class Ledger:
    """Storages that are held, and the moment at which most are."""

    def __init__(self, rounding: int = 1) -> None:
        self._rounding = rounding
        self._sizes: dict[Key, tuple[int, Kind]] = {}
        self._holders: Counter[Key] = Counter()
        self._held: Counter[Kind] = Counter()
        self.curve: list[tuple[str, str, int]] = []
        """By moment: phase, layer, bytes."""
        self.peak = Moment("", "", {})
        self._looks = True

    @property
    def bytes_held(self) -> int:
        return self._held.total()

    def hold(self, key: Key, size: int, kind: Kind) -> None:
        """One more holder of a storage; its size and kind are those that it was first held with."""
        if key not in self._sizes:
            rounded = -(-size // self._rounding) * self._rounding
            self._sizes[key] = rounded, kind
            self._held[kind] += rounded
        self._holders[key] += 1

    def again(self, key: Key) -> None:
        """One more holder of a storage that is held."""
        self.hold(key, *self._sizes[key])

    def release(self, key: Key) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            size, kind = self._sizes.pop(key)
            self._held[kind] -= size
            del self._holders[key]

    def holders(self, key: Key) -> int:
        return self._holders[key]

    def size(self, key: Key) -> int:
        return self._sizes[key][0]

    @contextmanager
    def seen(self, looks: bool) -> Iterator[None]:
        """Whether moments inside the block count; without, tensors are held and released as if before."""
        before, self._looks = self._looks, looks
        try:
            yield
        finally:
            self._looks = before

    def moment(self, phase: str, layer: str, more: int = 0) -> None:
        """While a layer runs, which holds so much more for itself."""
        if not self._looks:
            return
        total = self.bytes_held + more
        self.curve.append((phase, layer, total))
        if total > self.peak.bytes_held:
            held = dict(self._held)
            held["buffers"] = held.get("buffers", 0) + more
            self.peak = Moment(phase, layer, held)
