"""A rank's side of asynchronous training: hands in its changes, and goes on from the newest weights."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from convmesh.asynchronous.global_weights import DONE, FAILED, WORK, GlobalWeights, Reception, header
from convmesh.dist import OpenMesh
from convmesh.errors import ConfigError
from convmesh.runtime import ParallelNet
from convmesh.runtime.late_copy import settle_copies


class AsyncWeights:
    """Weights of a network that every rank of `job` trains alone. Make it, and `finish`, on every rank.

    In between no rank waits for another: `submit` talks to the first rank, where a thread for each of the others adds
    what arrives to the global weights (`convmesh.asynchronous.attenuation`) and answers with the result.
    """

    def __init__(self, net: ParallelNet, job: OpenMesh) -> None:
        if net.mesh.mesh.size != 1:
            raise ConfigError(
                f"`net` is split over {net.mesh.mesh}; asynchronous ranks have a network each: "
                "`cm.parallelize(model, plan, mesh=cm.open_mesh(cm.Mesh(), ranks=[rank]))`."
            )
        tensors = [*net.parameters(), *net.buffers()]
        self._tensors = [t for t in {id(t): t for t in tensors}.values() if t.is_floating_point()]
        self._job, self._ranks = job, job.mesh.size
        self._group = job.on_host("weights") if self._ranks > 1 else None
        self._base = self._flat()
        self._share(self._base)
        self.weights = GlobalWeights(self._base.clone(), self._ranks) if job.rank == 0 else None
        """On the first rank: the global weights."""
        self._receptions = self._opened()
        self._load(self._base)

    def _opened(self) -> list[Reception]:
        if self.weights is None or self._group is None:
            return []
        peers = [(rank, self._job.world_rank(rank)) for rank in range(1, self._ranks)]
        receptions = [Reception(self.weights, rank, peer, self._group) for rank, peer in peers]
        for reception in receptions:
            reception.start()
        return receptions

    def submit(self, loss: float) -> None:
        """Hand in this rank's changes since the last time, with its mean loss, and take the newest weights."""
        change = self._flat().sub_(self._base)
        if self.weights is not None:
            self._check()
            newest = self.weights.add(0, change, loss)
        else:
            self._send(header(WORK, loss))
            self._send(change)
            newest = self._answer(torch.empty_like(change))
        self._load(newest)

    def _answer(self, newest: torch.Tensor) -> torch.Tensor:
        told, first = header(WORK), self._job.world_rank(0)
        dist.recv(told, first, group=self._group)
        dist.recv(newest, first, group=self._group)
        if told[0] == FAILED:
            raise RuntimeError("the first rank cannot go on")
        return newest

    def finish(self) -> None:
        """Wait for all ranks to end, and take their combined weights."""
        if self.weights is None:
            self._send(header(DONE))
        for reception in self._receptions:
            reception.join()
        self._check()
        newest = torch.empty_like(self._base) if self.weights is None else self.weights.values
        self._share(newest)
        self._load(newest)

    def abandon(self) -> None:
        """Tell the others, when they next call, that this rank cannot go on."""
        if self.weights is not None:
            self.weights.has_failed = True
        else:
            with suppress(RuntimeError):  # the connection broke: they know
                self._send(header(FAILED))

    def _check(self) -> None:
        error = next((reception.error for reception in self._receptions if reception.error is not None), None)
        if error is not None:
            raise error

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, self._job.world_rank(0), group=self._group)

    def _share(self, tensor: torch.Tensor) -> None:
        """The first rank's values, on all ranks."""
        if self._group is not None:
            dist.broadcast(tensor, self._job.world_rank(0), group=self._group)

    def _flat(self) -> torch.Tensor:
        return torch.cat([t.detach().reshape(-1).cpu() for t in self._tensors])

    @torch.no_grad()
    def _load(self, flat: torch.Tensor) -> None:
        settle_copies()
        for tensor, values in zip(self._tensors, flat.split([t.numel() for t in self._tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))
        self._base = flat
