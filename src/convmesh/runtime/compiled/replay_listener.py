"""The listener that is told of every call of a replayed step. Without one, the cost is one lookup per replay."""

from __future__ import annotations

from convmesh.runtime.layer_following import LayerListener

_listeners: list[LayerListener] = []  # not a ContextVar: backward on a GPU runs in one of torch's threads


def listen_to_replays(listener: LayerListener | None) -> None:
    """Tell `listener` from here on; None tells nobody."""
    _listeners[:] = [] if listener is None else [listener]


def replay_listener() -> LayerListener | None:
    return _listeners[0] if _listeners else None
