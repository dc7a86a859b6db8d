"""Random numbers: the seeds of dropout, which all ranks share, and every rank's own generators."""

from __future__ import annotations

import torch

from convmesh.checkpoint.spreading import HeldTensor
from convmesh.layout import Box
from convmesh.runtime import ParallelNet
from convmesh.runtime.weight_places import WeightPlace

SEEDS = "random/seeds"
PREFIX = "random"


def held_random(net: ParallelNet) -> list[HeldTensor]:
    """The states of this rank's generators, as tensors of bytes."""
    mesh = net.mesh
    everyone, own = tuple(range(mesh.mesh.size)), (mesh.rank,)
    states = [_held(SEEDS, mesh.seeds.get_state(), everyone), _held(host_name(mesh.rank), torch.get_rng_state(), own)]
    if mesh.device.type == "cuda":
        states.append(_held(device_name(mesh.rank), torch.cuda.get_rng_state(mesh.device), own))
    return states


def host_name(rank: int) -> str:
    """What a checkpoint calls the state of a rank's generator on the host."""
    return f"{PREFIX}/host/{rank}"


def device_name(rank: int) -> str:
    """What a checkpoint calls the state of a rank's generator on its GPU."""
    return f"{PREFIX}/device/{rank}"


def set_random(net: ParallelNet, states: dict[str, torch.Tensor], world: int) -> None:
    """Continue the generators. Ranks beyond the checkpoint's number take the states of its ranks, cyclically."""
    mesh = net.mesh
    saved = mesh.rank % world
    mesh.seeds.set_state(states[SEEDS])
    torch.set_rng_state(states[host_name(saved)])
    if mesh.device.type == "cuda" and device_name(saved) in states:
        torch.cuda.set_rng_state(states[device_name(saved)], mesh.device)


def wanted_random(net: ParallelNet, world: int) -> list[str]:
    """The names that `set_random` reads."""
    saved = net.mesh.rank % world
    return [SEEDS, host_name(saved), device_name(saved)]


def _held(name: str, state: torch.Tensor, holders: tuple[int, ...]) -> HeldTensor:
    shape = tuple(state.shape)
    return HeldTensor(WeightPlace(name, shape, Box.whole(shape), holders), state)
