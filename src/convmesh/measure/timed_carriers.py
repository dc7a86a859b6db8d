"""One transfer of each kind, through the runtime's own functions, for timing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from convmesh.dist import OpenMesh
from convmesh.dist.exchange import Pieces, start
from convmesh.dist.flat_buffers import (
    FlatBuffer,
    start_broadcast,
    start_gather,
    start_sum,
    start_sum_at_root,
    start_sum_scatter,
)
from convmesh.layout import Layout
from convmesh.layout.exchange_plan import Carrier, ExchangePlan, plan_conversion
from convmesh.lowering.parcels import Parcel
from convmesh.measure.timing import AXES
from convmesh.ops.core.sharded import Sharded

Once = Callable[[], object]
Maker = Callable[[OpenMesh, int], Once]

BYTES_ELEMENT = 4


def _sum(mesh: OpenMesh, bytes_sent: int) -> Once:
    ranks = mesh.mesh.extent(AXES)
    buffer = _buffer(bytes_sent * ranks / (2 * (ranks - 1)), mesh)
    return lambda: start_sum(buffer, mesh, AXES).wait()


def _gather(mesh: OpenMesh, bytes_sent: int) -> Once:
    """Gather channels that all ranks need; for two ranks, parts of a flat buffer."""
    ranks = mesh.mesh.extent(AXES)
    if ranks > 2:
        before, after = _layouts(mesh, bytes_sent, {1: AXES}, {})
        return _sending(mesh, plan_conversion(before, after, mesh.rank), _shard(before, mesh), "all_gather")
    part, whole = _part_and_whole(mesh, bytes_sent)
    return lambda: start_gather(whole, part, mesh, AXES).wait()


def _sum_scatter(mesh: OpenMesh, bytes_sent: int) -> Once:
    part, whole = _part_and_whole(mesh, bytes_sent)
    return lambda: start_sum_scatter(part, whole, mesh, AXES).wait()


def _broadcast(mesh: OpenMesh, bytes_sent: int) -> Once:
    buffer = _buffer(bytes_sent, mesh)
    return lambda: start_broadcast(buffer, mesh, AXES).wait()


def _sum_at_root(mesh: OpenMesh, bytes_sent: int) -> Once:
    buffer = _buffer(bytes_sent, mesh)
    return lambda: start_sum_at_root(buffer, mesh, AXES).wait()


def _neighbour(mesh: OpenMesh, bytes_sent: int) -> Once:
    """Columns become rows: every rank has a message for every other rank."""
    return _sending(mesh, *_conversion(mesh, bytes_sent), "neighbour")


def _all_to_all(mesh: OpenMesh, bytes_sent: int) -> Once:
    """The same messages in one collective, as meshes of many ranks send them."""
    return _sending(mesh, *_conversion(mesh, bytes_sent), "all_to_all")


def _stage(mesh: OpenMesh, bytes_sent: int) -> Once:
    """A message to the next stage and one back: packed, sent, received and unpacked."""
    layout = Layout.of(mesh.mesh, (1, max(1, bytes_sent // BYTES_ELEMENT)))
    parcel = Parcel(("x",), (layout,), (torch.float32,), ((),))
    values = Sharded(torch.zeros(layout.shape, device=mesh.device), layout, mesh)
    first, last = mesh.members(AXES)[0], mesh.members(AXES)[-1]
    turns = (_send, _receive) if mesh.rank == first else (_receive, _send)
    peer = mesh.world_rank(last if mesh.rank == first else first)

    def once() -> None:
        for turn in turns:
            turn(parcel, values, mesh, peer)

    return once


def _send(parcel: Parcel, values: Sharded, mesh: OpenMesh, peer: int) -> None:
    (flat,) = parcel.pack([values], mesh.device)
    _wait(dist.P2POp(dist.isend, flat.detach(), peer, mesh.everyone))


def _receive(parcel: Parcel, values: Sharded, mesh: OpenMesh, peer: int) -> None:
    flat = torch.empty(values.local.numel(), device=mesh.device)
    _wait(dist.P2POp(dist.irecv, flat, peer, mesh.everyone))
    parcel.unpack([flat], mesh)


def _wait(op: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv([op]):
        work.wait()


def _sending(mesh: OpenMesh, plan: ExchangePlan, local: torch.Tensor, carrier: Carrier) -> Once:
    """Post and wait. Copies before and after are the program's own computations: here the data sent is contiguous
    (an all-to-all joins its pieces), and the data received stays where it is."""
    payload = Pieces([(plan.held, local)], local)
    return lambda: start(mesh, plan.forward, carrier, AXES, payload).wait()


def _conversion(mesh: OpenMesh, bytes_sent: int) -> tuple[ExchangePlan, torch.Tensor]:
    before, after = _layouts(mesh, bytes_sent, {1: AXES}, {0: AXES})
    return plan_conversion(before, after, mesh.rank), _shard(before, mesh)


def _layouts(mesh: OpenMesh, bytes_sent: int, *cuts: dict[int, tuple[str, ...]]) -> list[Layout]:
    """Layouts of a tensor of which each rank sends one tile to every other rank, about `bytes_sent` in total."""
    ranks = mesh.mesh.extent(AXES)
    tile = max(1, round(bytes_sent / BYTES_ELEMENT / (ranks - 1)))
    rows = max(d for d in range(1, min(32, tile) + 1) if tile % d == 0)
    if {} in cuts:  # a gathered tensor has one tile per rank
        return [Layout.of(mesh.mesh, (rows, tile // rows * ranks), cut) for cut in cuts]
    return [Layout.of(mesh.mesh, (rows * ranks, tile // rows * ranks), cut) for cut in cuts]


def _shard(layout: Layout, mesh: OpenMesh) -> torch.Tensor:
    return torch.zeros(layout.box(mesh.rank).shape, device=mesh.device)


def _buffer(bytes_held: float, mesh: OpenMesh) -> FlatBuffer:
    return FlatBuffer(max(1, round(bytes_held / BYTES_ELEMENT)), torch.float32, mesh)


def _part_and_whole(mesh: OpenMesh, bytes_sent: int) -> tuple[FlatBuffer, FlatBuffer]:
    ranks = mesh.mesh.extent(AXES)
    part = _buffer(bytes_sent / (ranks - 1), mesh)
    return part, FlatBuffer(part.values.numel() * ranks, torch.float32, mesh)


MAKERS: dict[str, Maker] = {
    "all_reduce": _sum,
    "all_gather": _gather,
    "reduce_scatter": _sum_scatter,
    "neighbour": _neighbour,
    "stage": _stage,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _sum_at_root,
}
"""By carrier: allocates the buffers of a transfer in which this rank sends about the given number of bytes."""

ONE_WAY = frozenset({"broadcast", "reduce"})
"""Some ranks finish before others have started: repetitions would overlap."""

OUTSIDE_NODES = ONE_WAY | {"stage"}
"""No node of a network sends these, so no node's overhead contains the time to post them."""

TURNS = {"stage": 2}
"""Consecutive transfers in one timed call."""
