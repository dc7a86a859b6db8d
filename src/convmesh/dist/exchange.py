"""Executing exchange plans: boxes move forward, gradients are added back."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from convmesh.dist.alike_messages import add_all, buffers, pack_all, put_all
from convmesh.dist.launching import Flying, Launched, Tensors, is_tracing_transfers, launch
from convmesh.dist.open_mesh import OpenMesh
from convmesh.dist.wire import add, put, settled, take
from convmesh.kernels.memory_format import empty_like_format
from convmesh.layout import ExchangePlan, Region, Route
from convmesh.layout.exchange_plan import Carrier
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.private_torch.tensor_internals import is_view

# torch 2.13 renamed the collective and warns about the name that 2.11 has.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Arrived = list[tuple[Region, torch.Tensor]]


@lru_cache(maxsize=LAYOUTS_KEPT)
def place_of(inner: Region, outer: Region) -> Region:
    """`inner` in the compact indices of `outer`; kept, as every step asks for the same ones."""
    return inner.within(outer)


@lru_cache(maxsize=LAYOUTS_KEPT)
def common_of(a: Region, b: Region) -> Region:
    """The indices that both have; kept likewise."""
    return a.intersect(b)


class PendingExchange:
    """Messages under way; `wait` returns what arrived, by global region."""

    def __init__(
        self, launched: Launched, collect: Callable[[Tensors], Arrived], on_wait: Callable[[], None] | None = None
    ) -> None:
        self._launched = launched
        self._collect = collect
        self._on_wait = on_wait

    def wait(self) -> Arrived:
        if self._on_wait is not None:
            self._on_wait()
        return self._collect(self._launched.wait())


def _nothing(received: Tensors) -> Arrived:
    del received
    return []


def start(mesh: OpenMesh, route: Route, carrier: Carrier, axes: tuple[str, ...], payload: Pieces) -> PendingExchange:
    """Post this rank's messages for one direction of an exchange."""
    if mesh.is_dry:
        return _start_dry(mesh, route, carrier, axes, payload)
    if carrier == "neighbour":
        return _start_neighbour(mesh, route, axes, payload)
    if carrier == "all_to_all":
        return _start_all_to_all(mesh, route, axes, payload)
    if carrier == "all_gather":
        return _start_all_gather(mesh, route, axes, payload)
    return PendingExchange(Flying((), [], []), _nothing)


class Pieces:
    """Disjoint pieces of a global tensor, by the region that each holds; `like` gives type and device.

    `wire` is the order in which values travel. Every rank of an exchange must name the same one, and a rank cannot
    infer it from its shard: with one channel, or one row, both orders look the same.
    """

    def __init__(
        self, pieces: Arrived, like: torch.Tensor, wire: torch.memory_format = torch.contiguous_format
    ) -> None:
        self.pieces = pieces
        self.like = like
        self._channels_last = wire != torch.contiguous_format
        self._target: tuple[Region, torch.Tensor] | None = None

    def landing_in(self, frame: Region, target: torch.Tensor) -> Pieces:
        """The same pieces, but what arrives may be written straight into `target`, which holds `frame`."""
        self._target = (frame, target)
        return self

    def gather(self, region: Region) -> torch.Tensor:
        """A region's values: a view if one piece holds them all, else a copy with zeros where no piece reaches."""
        for held, tensor in self.pieces:
            if held == region:
                return tensor
        common = []
        for held, tensor in self.pieces:
            shared = common_of(held, region)
            if shared == region:
                return take(tensor, place_of(region, held))
            common.append((shared, held, tensor))
        out = empty_like_format(region.shape, self.pieces[0][1] if self.pieces else self.like)
        if sum(shared.size for shared, _, _ in common) < region.size:
            out.zero_()
        for shared, held, tensor in common:
            if shared.size:
                put(out, place_of(shared, region), take(tensor, place_of(shared, held)))
        return out

    def flat(self, region: Region) -> torch.Tensor:
        """A region's values as one contiguous run, in the order in which they travel."""
        values = self.gather(region)
        return (values.movedim(1, -1) if self._channels_last else values).reshape(-1)

    def shaped(self, region: Region, flat: torch.Tensor) -> torch.Tensor:
        """A region's values from the run that arrived."""
        if not self._channels_last:
            return flat.view(region.shape)
        samples, channels, *space = region.shape
        return flat.view(samples, *space, channels).movedim(-1, 1)

    def landing(self, region: Region, device: torch.device) -> torch.Tensor:
        """Where a region's run is received: in place if that is one run of memory too, else in a buffer."""
        if self._target is not None and device == self._target[1].device:
            frame, target = self._target
            place = take(target, place_of(region, frame))
            place = place.movedim(1, -1) if self._channels_last else place
            if place.is_contiguous() and place.numel() == region.size:
                return place.view(-1)
        return self.buffer(region, device)

    def buffer(self, region: Region, device: torch.device) -> torch.Tensor:
        return self.empty(region.size, device)

    def empty(self, elements: int, device: torch.device) -> torch.Tensor:
        return torch.empty(elements, dtype=self.like.dtype, device=device)


def _start_dry(
    mesh: OpenMesh, route: Route, carrier: Carrier, axes: tuple[str, ...], payload: Pieces
) -> PendingExchange:
    """Pack and count what would be sent; what would arrive has no values."""
    itemsize = payload.like.element_size()
    packed = [] if carrier == "none" else _packed_dry(mesh, route, payload)
    if carrier == "all_to_all" and packed:
        torch.cat(packed)
    posted: list[int] = []
    arriving: list[tuple[int, int]] = []
    if carrier == "neighbour":
        posted = [mesh.traffic.record(carrier, m.region.size * itemsize, axes, m.peer) for m in route.sends]
        arriving = [(message.peer, message.region.size * itemsize) for message in route.receives]
    elif carrier != "none" and (route.sends or carrier == "all_to_all"):
        posted.append(mesh.traffic.record(carrier, route.elements_sent * itemsize, axes))
    if carrier == "neighbour":
        received = [payload.landing(message.region, mesh.device) for message in route.receives]
    else:
        received = buffers([m.region.size for m in route.receives], partial(payload.empty, device=mesh.device))
    told = partial(mesh.traffic.awaited, posted, arriving)
    return PendingExchange(Flying((), packed, received), partial(_shaped_dry, route, payload), told)


def _packed_dry(mesh: OpenMesh, route: Route, payload: Pieces) -> list[torch.Tensor]:
    def flat(region: Region) -> torch.Tensor:
        values = payload.flat(region)
        return (values.detach() if values.requires_grad else values).contiguous()

    held = payload.pieces[0][0] if len(payload.pieces) == 1 else None
    return pack_all(mesh.traffic, [message.region for message in route.sends], flat, held)


def _start_neighbour(mesh: OpenMesh, route: Route, axes: tuple[str, ...], payload: Pieces) -> PendingExchange:
    """One packed message per peer and direction."""
    wire = mesh.wire_device
    sent = [_on_wire(payload.flat(m.region), wire) for m in route.sends]
    received = [payload.landing(m.region, wire) for m in route.receives]
    if not sent and not received:
        return PendingExchange(Flying((), [], []), _nothing)
    launched = launch(partial(_post_neighbour, mesh, route, axes), sent, received)
    return PendingExchange(launched, partial(_shaped, route, payload))


def _post_neighbour(mesh: OpenMesh, route: Route, axes: tuple[str, ...], sent: Tensors, received: Tensors) -> list[Any]:
    group = mesh.everyone
    sent, received = [_real(buffer) for buffer in sent], [_real(buffer) for buffer in received]
    incoming, outgoing = zip(route.receives, received, strict=True), list(zip(route.sends, sent, strict=True))
    works, ops = [], []
    for m, buffer in incoming:
        if line := mesh.line(m.peer, buffer.nbytes):
            works.append(line.receive("neighbour", buffer))
        else:
            ops.append(dist.P2POp(dist.irecv, buffer, mesh.world_rank(m.peer), group))
    for m, buffer in outgoing:
        if line := mesh.line(m.peer, buffer.nbytes):
            works.append(line.send("neighbour", buffer))
        else:
            ops.append(dist.P2POp(dist.isend, buffer, mesh.world_rank(m.peer), group))
    for message, buffer in outgoing:
        mesh.traffic.record("neighbour", buffer.nbytes, axes, message.peer)
    if not outgoing:
        mesh.traffic.joined("neighbour", axes)
    return works + dist.batch_isend_irecv(ops) if ops else works


def _real(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that backends know: complex numbers as pairs. Collectives do that themselves."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _start_all_to_all(mesh: OpenMesh, route: Route, axes: tuple[str, ...], payload: Pieces) -> PendingExchange:
    """One collective over the group; ranks with nothing to send take part with empty pieces."""
    wire = mesh.wire_device
    members = mesh.members(axes)
    outgoing, incoming = ({m.peer: m.region for m in side} for side in (route.sends, route.receives))
    pieces = [payload.flat(outgoing[peer]) for peer in members if peer in outgoing]
    sent = _on_wire(torch.cat(pieces) if pieces else payload.empty(0, payload.like.device), wire)
    received = payload.empty(route.elements_received, wire)
    out_splits, in_splits = ([side[p].size if p in side else 0 for p in members] for side in (incoming, outgoing))
    launched = launch(partial(_post_all_to_all, mesh, axes, out_splits, in_splits), [sent], [received])
    return PendingExchange(launched, partial(_shaped_parts, route, payload, members, out_splits))


def _post_all_to_all(
    mesh: OpenMesh,
    axes: tuple[str, ...],
    out_splits: list[int],
    in_splits: list[int],
    sent: Tensors,
    received: Tensors,
) -> list[Any]:
    mesh.traffic.record("all_to_all", sent[0].nbytes, axes)
    group = mesh.group(axes)
    return [dist.all_to_all_single(received[0], sent[0], out_splits, in_splits, group=group, async_op=True)]


def _start_all_gather(mesh: OpenMesh, route: Route, axes: tuple[str, ...], payload: Pieces) -> PendingExchange:
    """Equal pieces that every rank wants."""
    if not route.sends:  # empty in another dim, on all ranks of the group alike
        return PendingExchange(Flying((), [], []), _nothing)
    wire = mesh.wire_device
    members = mesh.members(axes)
    sent = _on_wire(payload.flat(route.sends[0].region), wire)
    received = payload.empty(sent.numel() * len(members), wire)
    launched = launch(partial(_post_all_gather, mesh, axes), [sent], [received])
    return PendingExchange(launched, partial(_shaped_parts, route, payload, members, [sent.numel()] * len(members)))


def _post_all_gather(mesh: OpenMesh, axes: tuple[str, ...], sent: Tensors, received: Tensors) -> list[Any]:
    mesh.traffic.record("all_gather", sent[0].nbytes * (mesh.mesh.extent(axes) - 1), axes)
    return [_gather_equal(received[0], sent[0], group=mesh.group(axes), async_op=True)]


def _on_wire(flat: torch.Tensor, wire: torch.device) -> torch.Tensor:
    return settled(flat.detach()).contiguous().to(wire)


def _shaped_parts(route: Route, payload: Pieces, members: list[int], splits: list[int], received: Tensors) -> Arrived:
    """What came from each rank of a group, one after the other in one buffer."""
    parts = dict(zip(members, received[0].split(splits), strict=True))
    return _shaped(route, payload, [parts[m.peer] for m in route.receives])


def _shaped(route: Route, payload: Pieces, buffers: Tensors) -> Arrived:
    pairs = zip(route.receives, buffers, strict=True)
    return [(m.region, payload.shaped(m.region, buffer.to(payload.like.device))) for m, buffer in pairs]


def _shaped_dry(route: Route, payload: Pieces, received: Tensors) -> Arrived:
    """The same, where buffers of one size are the same tensor."""
    known: dict[Any, torch.Tensor] = {}
    arrived: Arrived = []
    for message, flat in zip(route.receives, received, strict=True):
        key = (id(flat), message.region.shape)
        if key not in known:
            known[key] = payload.shaped(message.region, flat)
        arrived.append((message.region, known[key]))
    return arrived


def accumulate(mesh: OpenMesh, plan: ExchangePlan, grad: torch.Tensor, arrived: Arrived) -> torch.Tensor:
    """The gradient of the held region: what this rank computed for it plus what others did."""
    own = Pieces([(plan.frame, grad)], grad).gather(plan.held)
    if not arrived:
        return own
    out = own.clone() if is_view(own) or own is grad else own
    add_arrived(mesh, plan, out, arrived)
    return out


def add_arrived(mesh: OpenMesh, plan: ExchangePlan, grad: torch.Tensor, arrived: Arrived) -> None:
    """Add what others found to this rank's gradient of the held region, in place."""
    placed = [(place_of(region, plan.held), values) for region, values in arrived]
    if mesh.is_dry:
        add_all(mesh.traffic, grad, placed)
        return
    for place, values in placed:
        add(grad, place, values)


def fetch(
    mesh: OpenMesh, plan: ExchangePlan, local: torch.Tensor, wire: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """This rank's frame of the tensor of which it holds `local`; a view if it needs nothing else."""
    return Fetching(mesh, plan, local, wire).wait()


class Fetching:
    """A fetch under way: posted at once, assembled by `wait`."""

    def __init__(self, mesh: OpenMesh, plan: ExchangePlan, local: torch.Tensor, wire: torch.memory_format) -> None:
        self._mesh, self._plan, self._local = mesh, plan, local
        self._payload = Pieces([(plan.held, local)], local, wire)
        self._out: torch.Tensor | None = None
        if plan.carrier != "none" and plan.forward.receives:
            self._out = empty_like_format(plan.frame.shape, local)
            if plan.needed != plan.frame:
                self._out.zero_()
            self._payload.landing_in(plan.frame, self._out)
        self._transfer = start(mesh, plan.forward, plan.carrier, plan.group_axes, self._payload)

    def wait(self) -> torch.Tensor:
        out, plan = self._out, self._plan
        if out is None:
            self._transfer.wait()
            return self._payload.gather(plan.frame)
        kept = plan.forward.kept
        if kept is not None:
            put(out, place_of(kept, plan.frame), take(self._local, place_of(kept, plan.held)))
        arrived = [(place_of(region, plan.frame), values) for region, values in self._transfer.wait()]
        if self._mesh.is_dry:
            put_all(self._mesh.traffic, out, arrived)
            return out
        for place, values in arrived:
            if is_tracing_transfers() or take(out, place).data_ptr() != values.data_ptr():
                put(out, place, values)
        return out


class _Exchange(torch.autograd.Function):
    """Gives this rank the region it needs; the adjoint adds gradients back where the values came from."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: ExchangePlan, mesh: OpenMesh) -> torch.Tensor:
        ctx.plan, ctx.mesh = plan, mesh
        out = fetch(mesh, plan, local)
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        plan: ExchangePlan = ctx.plan
        payload = Pieces([(plan.frame, grad)], grad)
        transfer = start(ctx.mesh, plan.adjoint, plan.adjoint_carrier, plan.group_axes, payload)
        return accumulate(ctx.mesh, plan, grad, transfer.wait()), None, None


def exchange(local: torch.Tensor, plan: ExchangePlan, mesh: OpenMesh) -> torch.Tensor:
    """This rank's needed region of the tensor of which it holds `local`; differentiable."""
    if plan.is_identity:
        return local
    result: torch.Tensor = _Exchange.apply(local, plan, mesh)
    return result
