"""Gives a network and its optimiser the values of a checkpoint: each rank reads the boxes that it holds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.checkpoint.box_reader import BoxReader, shapes_of
from convmesh.checkpoint.manifest import Manifest
from convmesh.checkpoint.optimizer_state import (
    PREFIX,
    OptimizerState,
    empty_like,
    kind_of,
    merged_options,
    number,
    tensor_name,
)
from convmesh.checkpoint.random_state import set_random, wanted_random
from convmesh.errors import CheckpointError
from convmesh.gradients.local_gradients import local_of
from convmesh.runtime import ParallelNet
from convmesh.runtime.weight_places import WeightPlace, check_fits, settle_weights, weight_places

WEIGHTS = "net/"
"""Prefix of the names of weights and buffers."""


def check_matches(manifest: Manifest, net: ParallelNet, optimizer: Optimizer | None) -> None:
    """Refuse the checkpoint of another network or optimiser, before anything changes."""
    shapes = shapes_of(manifest.tensors, WEIGHTS)
    check_fits(net, {**shapes, **{name: shapes[first] for name, first in manifest.shared.items()}})
    if optimizer is None:
        return
    if manifest.optimizer is None:
        raise CheckpointError(f"checkpoint {manifest.step} has no optimiser; load it with `optimizer=None`.")
    if manifest.optimizer["kind"] != kind_of(optimizer):
        raise CheckpointError(
            f"checkpoint {manifest.step} is of {manifest.optimizer['kind']}, but `optimizer` is {kind_of(optimizer)}; "
            "make the same one, or load with `optimizer=None`."
        )
    merged_options(manifest.optimizer["groups"], optimizer.param_groups)


def restore(reader: BoxReader, net: ParallelNet, optimizer: Optimizer | None) -> None:
    """Load weights, buffers, the optimiser's state and random numbers."""
    settle_weights(net)
    shared = reader.manifest.shared
    for place, values in weight_places(net)[0]:
        _read(reader, f"{WEIGHTS}{shared.get(place.name, place.name)}", place, values)
    if optimizer is not None:
        _restore_optimizer(reader, OptimizerState(net, optimizer), net.mesh.rank)
    world = reader.manifest.world
    names = [name for name in wanted_random(net, world) if name in reader.manifest.tensors]
    set_random(net, {name: reader.whole(name) for name in names}, world)


def _read(reader: BoxReader, name: str, place: WeightPlace, values: torch.Tensor) -> None:
    for box, view in place.parts(values):
        reader.read(name, box, view)


def _restore_optimizer(reader: BoxReader, state: OptimizerState, rank: int) -> None:
    described = reader.manifest.optimizer
    assert described is not None
    keys = _keys_by_parameter(reader.manifest)
    loaded = {
        index: _state_of(reader, parameter, place, keys[place.name], described["numbers"].get(place.name, {}))
        for index, (parameter, place) in enumerate(state.updated)
        if rank in place.holders
    }
    present = state.optimizer.state_dict()["param_groups"]
    groups = merged_options(described["groups"], present)
    state.optimizer.load_state_dict({"state": {i: s for i, s in loaded.items() if s}, "param_groups": groups})


def _keys_by_parameter(manifest: Manifest) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = defaultdict(list)
    for name in manifest.tensors:
        if name.startswith(f"{PREFIX}/"):
            _, key, parameter = name.split("/", 2)
            keys[parameter].append(key)
    return keys


def _state_of(
    reader: BoxReader, parameter: torch.Tensor, place: WeightPlace, keys: list[str], numbers: dict[str, Any]
) -> dict[str, Any]:
    state = {key: number(plain) for key, plain in numbers.items()}
    for key in keys:
        name = tensor_name(key, place.name)
        state[key] = empty_like(parameter, reader.manifest.tensors[name].dtype)
        _read(reader, name, place, local_of(state[key]))
    return state
