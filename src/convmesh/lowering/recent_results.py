"""A dictionary that forgets the least recently used entry."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentResults(Generic[Key, Value]):
    """Keeps the last `most` values that were stored or asked for."""

    def __init__(self, most: int = 1 << 14) -> None:
        self._most = most
        self._values: dict[Key, Value] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value  # now the youngest
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self._values.pop(key, None)
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.pop(next(iter(self._values)))
