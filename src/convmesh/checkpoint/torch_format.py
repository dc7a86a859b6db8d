"""Torch's own distributed checkpoints, to exchange runs with other programs. Reading one unpickles its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from convmesh.dist.cut_weights import cuts_of, weight_blocks
from convmesh.errors import CheckpointError, UnsupportedError
from convmesh.gradients import ShardedOptimizer
from convmesh.private_torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from convmesh.private_torch.dtensors import is_dtensor
from convmesh.runtime import ParallelNet
from convmesh.runtime.full_state import load_whole, whole
from convmesh.runtime.weight_places import settle_weights


def export_torch_checkpoint(folder: str | Path, net: ParallelNet, optimizer: Optimizer | None = None) -> None:
    """Write weights and optimiser as torch.distributed.checkpoint does, under `net` and `optimizer`. On all ranks."""
    from torch.distributed.checkpoint.state_dict_saver import save  # late: few need it, and it takes long to import

    save(_in_runs(_states(net, optimizer), net), checkpoint_id=str(folder), process_group=net.mesh.everyone)


def import_torch_checkpoint(folder: str | Path, net: ParallelNet, optimizer: Optimizer | None = None) -> None:
    """Read what `export_torch_checkpoint` wrote, or a program that uses the same names. On all ranks.

    Torch unpickles the metadata: a malicious file can run any code. Import only files that you trust.
    """
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(f"`folder` (={str(folder)!r}) is no checkpoint of torch: it has no .metadata.")
    held = _states(net, optimizer)
    states = _in_runs(held, net)
    load(states, checkpoint_id=str(folder), process_group=net.mesh.everyone)
    states = _in_blocks(held, states, net)
    updates: Any = states.get("optimizer", {})
    set_state_dict(net, _listed(optimizer), model_state_dict=states["net"], optim_state_dict=updates)


def _states(net: ParallelNet, optimizer: Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if isinstance(optimizer, ShardedOptimizer):
        raise UnsupportedError(
            "torch's checkpoint cannot hold the runs of a ShardedOptimizer; load a `Checkpointer`'s checkpoint into a "
            'network with reduction="bucketed" and export that, or pass `optimizer=None`.'
        )
    settle_weights(net)
    weights, updates = get_state_dict(net, _listed(optimizer))
    return {"net": weights} if optimizer is None else {"net": weights, "optimizer": updates}


def _in_runs(states: dict[str, Any], net: ParallelNet) -> dict[str, Any]:
    """The states, with weights that are cut block by block made whole: torch's checkpoints know only runs of rows."""
    made: dict[str, Any] = tree_map(lambda leaf: whole(leaf, net.mesh) if _has_blocks(leaf) else leaf, states)
    return made


def _in_blocks(held: dict[str, Any], loaded: dict[str, Any], net: ParallelNet) -> dict[str, Any]:
    """The loaded states, with such weights cut as this rank holds them."""
    leaves, spec = tree_flatten(loaded)
    pairs = zip(leaves, tree_leaves(held), strict=True)
    made: dict[str, Any] = tree_unflatten([_taken(leaf, into, net) for leaf, into in pairs], spec)
    return made


def _taken(leaf: Any, into: Any, net: ParallelNet) -> Any:
    if not _has_blocks(into):
        return leaf
    load_whole(into, leaf, net.mesh, cuts_of(into))
    return into


def _has_blocks(leaf: Any) -> bool:
    return is_dtensor(leaf) and weight_blocks(leaf) > 1


def _listed(optimizer: Optimizer | None) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer]
