"""What `compile` asks for but cannot have: one line for each reason."""

from __future__ import annotations

import warnings

from convmesh.dist import OpenMesh


class Fallbacks:
    """Says why something runs eagerly: each reason once, from one rank; in a pipeline, from one rank of each stage."""

    def __init__(self, mesh: OpenMesh) -> None:
        self._mesh = mesh
        self.told: list[str] = []
        """The reasons so far, on every rank."""

    def __call__(self, reason: str, everywhere: bool = False) -> None:
        """Report a reason; one that holds `everywhere` is reported by the first rank alone."""
        if reason in self.told:
            return
        self.told.append(reason)
        places = self._mesh.mesh.coordinates(self._mesh.rank)
        if not any(place for axis, place in places.items() if everywhere or axis != "pipe"):
            text = f"`compile`: {reason}; it runs eagerly, with the same numbers."
            warnings.warn(text, UserWarning, stacklevel=3)
