"""What a checkpoint holds of a run: this rank's tensors, and what the first rank says about the whole."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from convmesh.checkpoint.optimizer_state import OptimizerState, described
from convmesh.checkpoint.random_state import held_random
from convmesh.checkpoint.restoring import WEIGHTS
from convmesh.checkpoint.snapshot import HostMemory, Snapshot, snapshot
from convmesh.checkpoint.spreading import HeldTensor
from convmesh.errors import CheckpointError
from convmesh.runtime import ParallelNet
from convmesh.runtime.weight_places import settle_weights, weight_places
from convmesh.versions import own_version


def head_of(step: int, net: ParallelNet, optimizer: Optimizer | None, state: dict[str, Any]) -> dict[str, Any]:
    """The fields of the manifest that need no other rank."""
    return {
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "world": net.mesh.mesh.size,
        "mesh": dict(net.mesh.mesh.axes),
        "plan": hashlib.sha256(str(net.plan).encode()).hexdigest(),
        "versions": {"torch": torch.__version__, "convmesh": own_version()},
        "optimizer": None if optimizer is None else described(optimizer),
        "state": _copied(state),
    }


def content_of(net: ParallelNet, optimizer: Optimizer | None, memory: HostMemory) -> Snapshot:
    """A copy of this rank's share of all tensors."""
    settle_weights(net)
    weights, shared = weight_places(net)
    learned = {name for name, _ in net.named_parameters()} if optimizer is not None else set()
    held = [
        HeldTensor(replace(place, name=f"{WEIGHTS}{place.name}"), values, place.name in learned)
        for place, values in weights
    ]
    numbers: dict[str, Any] = {}
    if optimizer is not None:
        updates = OptimizerState(net, optimizer)
        held += (replace(each, is_steady=True) for each in updates.held())
        numbers = updates.numbers()
    extra = {"shared": shared, "numbers": numbers}
    return snapshot(net.mesh.rank, [*held, *held_random(net)], extra, memory)


def _copied(state: dict[str, Any]) -> Any:
    """A copy, since training changes the original while the checkpoint is being written."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"`state` must be JSON: numbers, texts, lists, dicts ({_where(state)}: {error})."
        ) from None


def _where(state: dict[str, Any]) -> str:
    """The first key whose value is not JSON."""
    for key, value in state.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError):
            return repr(key)
    return "state"
