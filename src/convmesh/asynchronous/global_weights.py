"""The weights that all ranks train, on the first of them: each arrival makes a new version."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from convmesh.asynchronous.attenuation import attenuation, quality

WORK, DONE, FAILED = 0.0, 1.0, 2.0
"""What a rank says: that it hands in or fetches weights, that it has no more work, or that it cannot go on."""


def header(kind: float, loss: float = 0.0) -> torch.Tensor:
    return torch.tensor([kind, loss], dtype=torch.float64)


class GlobalWeights:
    """Versions of one flat tensor; threads may add to it at any time."""

    def __init__(self, values: torch.Tensor, ranks: int) -> None:
        self.values, self.version = values, 0
        self.staleness: list[int] = []
        """For every arrival: how many versions others made since its work began."""
        self.has_failed = False
        """Whether the first rank cannot go on: others are told when they next call."""
        self._held = [0] * ranks
        self._losses: dict[int, float] = {}
        self._lock = threading.Lock()

    def add(self, rank: int, change: torch.Tensor, loss: float) -> torch.Tensor:
        """Add what a rank changed; returns a copy of the new version, which the rank holds from then on."""
        with self._lock:
            self._losses[rank] = loss
            self.staleness.append(self.version - self._held[rank])
            factor = attenuation(self._held[rank], self._held, self.version) * quality(loss, self._losses.values())
            if factor > 0:
                self.values.add_(change, alpha=factor)
            self.version += 1
            self._held[rank] = self.version
            return self.values.clone()


class Reception(threading.Thread):
    """Serves one other rank, so that a slow one holds up nobody."""

    def __init__(self, weights: GlobalWeights, rank: int, world_rank: int, group: dist.ProcessGroup) -> None:
        super().__init__(name=f"convmesh-weights-{rank}", daemon=True)
        self._weights, self._rank, self._peer, self._group = weights, rank, world_rank, group
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception as error:  # the connection broke: the first rank raises this at its next call
            self.error = error

    def _serve(self) -> bool:
        told, change = header(DONE), torch.empty_like(self._weights.values)
        dist.recv(told, self._peer, group=self._group)
        kind, loss = told.tolist()
        if kind == FAILED:
            raise RuntimeError(f"rank {self._rank} cannot go on")
        if kind == DONE:
            return False
        dist.recv(change, self._peer, group=self._group)
        newest = self._weights.add(self._rank, change, loss)
        dist.send(header(FAILED if self._weights.has_failed else WORK), self._peer, group=self._group)
        dist.send(newest, self._peer, group=self._group)
        return True
