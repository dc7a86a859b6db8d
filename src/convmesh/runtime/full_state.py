"""A split network's weights and gradients as ordinary single-device dictionaries, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.dist.cut_weights import block_layout, cut_weight, cuts_of, weight_blocks, weight_layout
from convmesh.errors import ShapeError, UnsupportedError
from convmesh.gradients.local_gradients import as_gradient_of, local_of
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.private_torch.module_tables import buffers_of, give_tables, parameters_of

State = dict[str, torch.Tensor]


def whole(tensor: torch.Tensor, mesh: OpenMesh) -> torch.Tensor:
    """A copy of the whole tensor, on every rank; a cut one is gathered in one exchange, however many axes cut it."""
    local = local_of(tensor).detach()
    if not is_dtensor(tensor) or not (cuts := cuts_of(tensor)):
        return local.clone()
    if (blocks := weight_blocks(tensor)) > 1:
        layout = block_layout(tensor.shape, mesh.mesh, cuts, blocks)
        return Sharded(local.unflatten(0, (blocks, -1)), layout, mesh).gather().flatten(0, 1)
    return Sharded(local, weight_layout(tensor.shape, mesh.mesh, cuts), mesh).gather()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, shared ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    saved = {*module.state_dict(keep_vars=True)}
    yield from ((name, b) for name, b in module.named_buffers(remove_duplicate=False) if name in saved)


def check_names(given: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state of another network, before anything is changed."""
    if missing := [name for name in wanted if name not in given]:
        raise ShapeError(f"the state has no {missing[0]!r} ({len(missing)} of {len(wanted)} names are missing).")
    if extra := [name for name in given if name not in wanted]:
        raise ShapeError(f"the state has {extra[0]!r}, which the network has not ({len(extra)} such names).")
    for name, tensor in wanted.items():
        if tuple(given[name].shape) != tuple(tensor.shape):
            raise ShapeError(
                f"the state's {name!r} has shape {tuple(given[name].shape)}, the network's {tuple(tensor.shape)}."
            )


@torch.no_grad()
def load_whole(tensor: torch.Tensor, value: torch.Tensor, mesh: OpenMesh, cuts: Mapping[int, tuple[str, ...]]) -> None:
    """Copy a whole value, or this rank's shard of it, into the rank's tensor."""
    if is_dtensor(tensor):
        tensor.to_local().copy_(cut_weight(value.detach(), mesh, dict(cuts), weight_blocks(tensor)).to_local())
    else:
        tensor.copy_(value)


@torch.no_grad()
def reset(
    module: nn.Module, mesh: OpenMesh, cuts: Mapping[str, Mapping[int, tuple[str, ...]]], drawn_like: nn.Module
) -> None:
    """Draw initial weights layer by layer: each is drawn whole, so that the mesh does not change it, and then cut.

    `drawn_like` has all layers. Those of other ranks' stages are drawn too, so that stages do not change the weights.
    """
    for path, owner in drawn_like.named_modules():
        tensors = {**parameters_of(owner), **buffers_of(owner)}
        if not any(tensor is not None for tensor in tensors.values()):
            continue
        if not hasattr(owner, "reset_parameters"):
            raise UnsupportedError(
                f"layer {path!r} ({type(owner).__name__}) has weights but no `reset_parameters`; give the network its "
                "weights with `net.load_full_state_dict(state)`."
            )
        drawn = _whole_copy(owner)
        drawn.reset_parameters()  # type: ignore[operator]
        for name in tensors:
            tensor = getattr(module.get_submodule(path), name)
            if tensor is not None:
                full_name = f"{path}.{name}" if path else name
                load_whole(tensor, getattr(drawn, name), mesh, cuts.get(full_name, {}))


def _whole_copy(owner: nn.Module) -> nn.Module:
    """A layer with the same options and whole, uninitialised tensors of its own."""
    layer = copy.copy(owner)
    parameters = {
        n: p if p is None else nn.Parameter(_empty(p), p.requires_grad) for n, p in parameters_of(owner).items()
    }
    give_tables(layer, parameters, {n: b if b is None else _empty(b) for n, b in buffers_of(owner).items()})
    return layer


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate tensors that are on the meta device; those that two layers share stay shared."""
    allocated: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for table in (parameters_of(owner), buffers_of(owner)):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = allocated.setdefault(id(tensor), _with_memory(tensor, device))


def _with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = as_gradient_of(tensor, torch.empty_like(local_of(tensor), device=device))
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def is_materialised(module: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@torch.no_grad()
def copy_buffers_along(module: nn.Module, mesh: OpenMesh, axis: str) -> None:
    """Copy the first rank's buffers to all ranks along an axis: each had running statistics of its own samples."""
    if mesh.everyone is None or mesh.mesh.extent((axis,)) == 1:
        return
    first = mesh.world_rank(mesh.mesh.group((axis,), mesh.rank)[0])
    for buffer in module.buffers():
        local = local_of(buffer)
        wire = local.cpu() if mesh.stages_through_host else local.contiguous()
        dist.broadcast(wire, first, group=mesh.group((axis,)))
        local.copy_(wire)


@torch.no_grad()
def copy_from_first(module: nn.Module, mesh: OpenMesh) -> None:
    """Copy the first rank's weights to all ranks."""
    if mesh.everyone is None or mesh.mesh.size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        wire = tensor.detach().to(mesh.wire_device).contiguous()
        dist.broadcast(wire, mesh.world_rank(0), group=mesh.everyone)
        tensor.copy_(wire)


@torch.no_grad()
def gather_cut_weights(module: nn.Module, mesh: OpenMesh) -> None:
    """Put whole weights in place of cut ones, on every rank; those that two layers share stay shared."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for owner in module.modules():
        for table in (parameters_of(owner), buffers_of(owner)):
            for name, tensor in table.items():
                if tensor is not None and is_dtensor(tensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _as_whole(tensor, mesh)
                    table[name] = made[id(tensor)][1]


def _as_whole(tensor: torch.Tensor, mesh: OpenMesh) -> torch.Tensor:
    gathered = whole(tensor, mesh)
    return nn.Parameter(gathered, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else gathered


def cut_like(value: torch.Tensor, weight: torch.Tensor, mesh: OpenMesh) -> torch.Tensor:
    """A whole tensor, cut as the weight is if it has the weight's shape; the tensor itself if the weight is whole."""
    if not is_dtensor(weight) or value.shape != weight.shape:
        return value
    return cut_weight(value.detach().to(mesh.device), mesh, cuts_of(weight), weight_blocks(weight))
